"""Odd shapes in fp8 on a GPU: the same bits at every recompute level, losses near the reference's on the same GPU."""

import dataclasses
import math

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs a GPU that computes in fp8", allow_module_level=True)

from handgrad.joins.fp8.cuda import linear
from handgrad.ops import cuda as kernels, reference
from handgrad.run.assemble import assemble
from handgrad.run.resolve import resolve
from handgrad.settings.config import RunConfig, check
from tests.gpu.models import ZipfBytes

GPU = torch.device("cuda")
SHAPES = {
    "three heads": {"num_heads": 3, "channels": 48},
    "25 heads": {"num_heads": 25, "channels": 1600},
    "heads of 64": {"num_heads": 3, "channels": 192},
    "heads of 128": {"num_heads": 3, "channels": 384},
    "heads of 80": {"num_heads": 3, "channels": 240},
    "lengths of no multiple of 16": {"sequence_length": 100, "micro_batch": 4, "tokens_per_step": 800},
    "an odd length": {"sequence_length": 77, "micro_batch": 16, "tokens_per_step": 2464},
    "chunks of the head": {"head_chunk_tokens": 48},  # five, and one of 16
    "chunks of any length": {"head_chunk_tokens": 37, "fp8_head": "forward,dgrad"},
}


@pytest.mark.parametrize("architecture", ["gpt2", "modern"])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"num_layers": 2, "sequence_length": 64, "micro_batch": 4, "tokens_per_step": 512}
    config = RunConfig(
        **(step | {"fp8_head": "forward,dgrad,wgrad"} | SHAPES[name]),
        architecture=architecture,
        precision="fp8",
        learning_rate=1e-4,  # calm: at 6e-4 the loss of 25 heads jumps to 12.5, on every backend
        warmup_steps=2,
        steps=20,
    )

    def losses_and_weights(config: RunConfig, ops: object) -> tuple[list[float], torch.Tensor]:
        training = assemble(resolve(check(config), 257, device=GPU, ops=ops), ZipfBytes())
        return [training.stepper.step(step).loss for step in range(3)], training.state.master

    losses, weights = losses_and_weights(config, kernels)
    for recompute in (1, 2, 3):
        other_losses, other = losses_and_weights(dataclasses.replace(config, recompute=recompute), kernels)
        assert other_losses == losses and torch.equal(other, weights), recompute
    monkeypatch.setattr(linear, "LONGEST_FAST_SUM", 0)  # the tensor cores' own sums miss 2^-8 in logits of this size
    losses, _ = losses_and_weights(config, kernels)
    right, _ = losses_and_weights(config, reference)
    assert all(math.isclose(a, b, rel_tol=2**-8) for a, b in zip(losses, right, strict=True)), (losses, right)
