"""Dropout in fp8 on a GPU: the same bits however a step is launched, and losses near the CPU's."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs a GPU that computes in fp8", allow_module_level=True)

from handgrad.ops import cuda as kernels
from handgrad.run.assemble import assemble
from handgrad.run.resolve import resolve
from handgrad.settings import presets
from handgrad.settings.config import RunConfig
from handgrad.training.step import StepResult
from tests.gpu.models import ZipfBytes, ZipfTokens
from tests.gpu.runs import check_allocations, leave_the_same_bits
from tests.test_runs import elsewhere

GPU, P = torch.device("cuda"), 0.3


def d12_wide(**settings: object) -> RunConfig:
    sizes = presets.model("d12") | {"num_layers": 2}
    step = {"micro_batch": 8, "tokens_per_step": 16384, "precision": "fp8", "fp8_window": 2, "dropout": P}
    return RunConfig(**(sizes | step | settings), steps=50, warmup_steps=5)


def state_after(steps: int, *, graphs: bool, **settings: object) -> tuple[Tensor, list[StepResult]]:
    """Master weights and results of steps of a d12-wide model."""
    training = assemble(resolve(d12_wide(**settings), 50257, device=GPU, ops=kernels), ZipfTokens(), graphs=graphs)
    return training.state.master, [training.stepper.step(step) for step in range(steps)]


@pytest.mark.parametrize(
    "settings",
    [{}, {"fp8_gradients": "mixed"}, {"fp8_scaling": "current"}, {"num_heads": 6}, {"fp8_keep_bf16": "0.qkv,1.mlp"}],
    ids=str,
)
def test_the_same_bits_with_and_without_graphs_at_every_recompute_level(settings: dict) -> None:
    first, results = state_after(4, graphs=True, **settings)
    assert results[-1].loss < results[0].loss
    for graphs, recompute in ((False, 0), (True, 1), (True, 2)):
        again, other = state_after(4, graphs=graphs, recompute=recompute, **settings)
        assert torch.equal(again, first) and other == results, (graphs, recompute)
    _, without = state_after(1, graphs=False, **settings | {"dropout": 0.0})
    assert without[0].loss != results[0].loss


def test_two_runs_and_a_resumed_one(config: RunConfig) -> None:
    leave_the_same_bits(dataclasses.replace(config, device="cuda", backend="kernels", precision="fp8", dropout=P))


def test_steps_allocate_nothing() -> None:
    check_allocations(d12_wide())


def test_the_loss_follows_the_cpu(config: RunConfig) -> None:
    """The same masks on both machines; a loss is a mean, of which a unit of bf16 is allowed."""
    config = dataclasses.replace(config, precision="fp8", dropout=P, steps=6)
    losses = []
    for device, backend in (("cpu", "reference"), ("cuda", "kernels")):
        design = resolve(elsewhere(config, device, device=device, backend=backend), 257)
        training = assemble(design, ZipfBytes())
        losses.append([training.stepper.step(step).loss for step in range(6)])
    assert all(math.isclose(a, b, rel_tol=2**-8) for a, b in zip(*losses, strict=True))
