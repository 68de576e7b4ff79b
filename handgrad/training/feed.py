"""Feeds micro-batches into the model's buffers. Reads and copies the next one while the device computes."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

SLOTS = 2  # micro-batches in flight
SAMPLE_NUMBERS = "sample_numbers"  # each sample's index in the run, if an operation needs it
REFERENCES = "references"  # of pairs: each sample's summed log-probability under the first model
ADVANTAGES, SAMPLED = ("advantages", "sampled_losses")  # of rollouts: each token's advantage and its loss at sampling
OF_ANSWERS = (REFERENCES, SAMPLED, ADVANTAGES)  # inputs of a loss on answers

# The inputs of a forward pass: filled by the source or derived from it. `SORTED`: the sort orders for the backward.
READ = ("tokens", "targets", "document_starts", "positions")
SORTED = {"sorted_positions": "tokens", "sorted_by_position": "positions"}


class Source(Protocol):
    """A source of samples: `handgrad.data.batches.Batches`, or any object with its `fill`."""

    def fill(self, inputs: Tensor, targets: Tensor, first_sample: int) -> None: ...


def inputs_of(act: Any, names: Iterable[str] = (*READ, *SORTED)) -> dict[str, Tensor]:
    """The inputs that `act` has, by name."""
    return {name: tensor for name in names if (tensor := getattr(act, name, None)) is not None}


def fill_inputs(source: Source, inputs: Mapping[str, Tensor], first_sample: int) -> None:
    """Fills host tensors `inputs` with the samples from `first_sample` on. A source of documents also fills
    `document_starts`, one of answers its share of `OF_ANSWERS`."""
    fill: Callable[..., None] = source.fill
    starts = inputs.get("document_starts")
    more = [inputs[name] for name in ("document_starts", *OF_ANSWERS) if name in inputs]
    fill(inputs["tokens"], inputs["targets"], first_sample, *more)
    if starts is not None and "positions" in inputs:
        torch.sub(torch.arange(starts.shape[1]), starts, out=inputs["positions"])
    for name, by in SORTED.items():
        if name in inputs:
            sort_positions(inputs[name], inputs[by])


def sort_positions(sorted_positions: Tensor, tokens: Tensor) -> None:
    """sorted_positions (N) int32 = 0..N-1 sorted by tokens (B, T), stable."""
    flat = tokens.numpy().reshape(-1)
    # Keys of 16 bits take a radix sort: 0.27 ms for 65,536 of them.
    keys = flat.astype(np.uint16) if flat.size and flat.max() < 1 << 16 else flat
    sorted_positions.numpy()[:] = np.argsort(keys, kind="stable")


class BatchFeed:
    """Fills the inputs of a micro-batch: `act.tokens`, `act.targets`, `act.sorted_positions`, and document inputs.

    On a CPU it writes in place. On CUDA a micro-batch goes through one of two slots: the host writes pinned memory, a
    separate stream copies it to device memory, and the micro-step copies that into the buffers. The host waits only for a
    slot still in flight, two micro-steps back."""

    def __init__(self, source: Source, act: Any, more: Mapping[str, Tensor] | None = None):
        """`act`: the model's activations; `more`: receive the micro-batch's sample numbers or `OF_ANSWERS`, by name."""
        self.source = source
        self.targets = inputs_of(act) | dict(more or {})
        self.on_host = act.tokens.device.type != "cuda"
        if act.tokens.device.type == "mps":
            self.host = [{name: torch.empty_like(t, device="cpu") for name, t in self.targets.items()}]
        elif self.on_host:
            self.host = [self.targets]
        else:
            self.host, self.staging = (
                [{name: make(t) for name, t in self.targets.items()} for _ in range(SLOTS)]
                for make in (pinned, torch.empty_like)
            )
            self.stream = torch.cuda.Stream()
            self.arrived = [torch.cuda.Event() for _ in range(SLOTS)]
            self.taken = [torch.cuda.Event() for _ in range(SLOTS)]
        self.slot = 0

    def fill(self, first_sample: int) -> None:
        """Loads the next micro-batch, from `first_sample` on. On CUDA it is ordered with the current stream."""
        slot, self.slot = self.slot, (self.slot + 1) % len(self.host)
        host = self.host[slot]
        if not self.on_host:
            self.arrived[slot].synchronize()  # the slot's last copy has left its pinned memory
        fill_inputs(self.source, host, first_sample)
        if SAMPLE_NUMBERS in host:
            torch.arange(first_sample, first_sample + len(host[SAMPLE_NUMBERS]), out=host[SAMPLE_NUMBERS])
        if self.on_host:
            if host is not self.targets:
                copy_all(self.targets, host)
            return
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self.taken[slot])
            copy_all(self.staging[slot], host, non_blocking=True)
            self.arrived[slot].record()
        torch.cuda.current_stream().wait_event(self.arrived[slot])
        copy_all(self.targets, self.staging[slot])
        self.taken[slot].record()


def pinned(tensor: Tensor) -> Tensor:
    """Pinned host memory of the tensor's shape and dtype."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


def copy_all(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor], *, non_blocking: bool = False) -> None:
    """Copies each source into the target of the same name; `non_blocking`: from pinned memory."""
    for name, target in targets.items():
        target.copy_(sources[name], non_blocking=non_blocking)
