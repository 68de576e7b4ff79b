"""The peer on several GPUs: the twin under torch's own data parallelism, set up as its documentation advises.

DDP: the compiled twin wrapped, gradients as views of the buckets, reduced in the last micro-batch only. FSDP2: every block
and the whole sharded, bf16 on the wire for weights and float32 for gradients, blocks compiled one by one and the loss head
as a whole; weights stay gathered and gradients whole between micro-batches, so both travel once a step.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu_twin import TwinTrainer, head_loss
from benchmarks.twin import optimizer_of
from benchmarks.twin_switches import Switches
from handgrad.settings.config import ModelShape, RunConfig

SWITCHES = Switches(attention="cudnn", bf16_stream=True)  # the fastest of the twins on one H200 without Liger


class DistributedTrainer(TwinTrainer):
    """The twin on a rank, with weights of its own."""

    def __init__(self, config: RunConfig, shape: ModelShape, device: torch.device):
        super().__init__(config, shape, device, SWITCHES)
        self.draw_initial()

    def in_between(self, *, last: bool) -> contextlib.AbstractContextManager[object]:
        raise NotImplementedError  # DDP and FSDP hold gradients back in ways of their own

    def step(self, micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """One optimizer step over this rank's micro-batches of (tokens, targets); their mean loss, on the device."""
        self.optimizer.zero_grad(set_to_none=isinstance(self, FsdpTrainer))
        total = torch.zeros((), device=self.device)
        for index, (tokens, targets) in enumerate(micro_batches):
            with self.in_between(last=index == len(micro_batches) - 1):
                with torch.autocast(self.device.type, torch.bfloat16):
                    loss = self.model(tokens, targets)
                (loss / len(micro_batches)).backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.parameters, self.config.clip_norm)
        self.optimizer.step()
        return total / len(micro_batches) / dist.get_world_size()


class DdpTrainer(DistributedTrainer):
    """The twin under DistributedDataParallel: weights, moments and gradients whole on every rank."""

    def __init__(self, config: RunConfig, shape: ModelShape, device: torch.device):
        super().__init__(config, shape, device)
        devices = [device.index or 0] if device.type == "cuda" else None
        self.model = DistributedDataParallel(
            torch.compile(self.twin) if device.type == "cuda" else self.twin,
            device_ids=devices,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
        )

    def in_between(self, *, last: bool) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if last else self.model.no_sync()


class FsdpTrainer(DistributedTrainer):
    """The twin under FSDP2: weights, moments and gradients sharded over the ranks."""

    def __init__(self, config: RunConfig, shape: ModelShape, device: torch.device):
        super().__init__(config, shape, device)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for index, block in enumerate(self.twin.blocks):
            if device.type == "cuda":
                self.twin.blocks[index] = torch.compile(block)
            fully_shard(self.twin.blocks[index], mp_policy=policy)
        if device.type == "cuda":
            self.twin.stream_loss = torch.compile(head_loss)
        fully_shard(self.twin, mp_policy=policy)
        self.model = self.twin
        self.optimizer = optimizer_of(self.twin, config, fused=True)
        self.parameters = list(self.twin.parameters())

    def in_between(self, *, last: bool) -> contextlib.AbstractContextManager[object]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)
        self.model.set_reshard_after_backward(last)
        return contextlib.nullcontext()
