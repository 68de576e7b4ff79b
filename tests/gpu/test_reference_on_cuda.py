"""The reference on a CUDA GPU: the numbers of the CPU, and the same bits every time."""

import dataclasses

import pytest
import torch

from handgrad.ops import reference
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from tests.gpu.models import gradients
from tests.gpu.runs import leave_the_same_bits
from tests.test_runs import elsewhere, records

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def gradients_on(device: str, dtype: torch.dtype, recompute: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(all gradients, losses) of the same model and batch, on the CPU."""
    found = gradients(reference, torch.device(device), dtype, scale=1 / 240, recompute=recompute)
    losses = found.pop("losses").cpu()
    return torch.cat([gradient.flatten() for gradient in found.values()]).cpu(), losses


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_are_as_good_as_on_the_cpu(dtype: torch.dtype) -> None:
    """The error against float64 on the CPU is at most twice the CPU's own in the same dtype (plus float64's floor)."""
    exact, exact_losses = gradients_on("cpu", torch.float64)
    cpu, cpu_losses = gradients_on("cpu", dtype)
    gpu, gpu_losses = gradients_on("cuda", dtype)
    floor = 1e-12 * exact.norm()
    assert (gpu.double() - exact).norm() <= 2 * (cpu.double() - exact).norm() + floor
    assert (gpu_losses.double() - exact_losses).norm() <= 2 * (cpu_losses.double() - exact_losses).norm() + 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_at_every_recompute_level(dtype: torch.dtype) -> None:
    first = gradients_on("cuda", dtype)
    for recompute in (0, 1, 2, 3):
        for found, expected in zip(gradients_on("cuda", dtype, recompute), first, strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_two_runs_and_a_resumed_one(config: RunConfig, precision: str) -> None:
    """The same bits; the third stops after 8 of 12 steps and goes on from its checkpoint."""
    config = dataclasses.replace(config, device="cuda", backend="reference", precision=precision)
    leave_the_same_bits(config)


def test_the_loss_follows_the_cpu(config: RunConfig) -> None:
    train(config)
    on_gpu = elsewhere(config, "gpu", device="cuda", backend="reference", precision="fp32")
    train(on_gpu)
    for a, b in zip(records(config.out, ("step",)), records(on_gpu.out, ("step",)), strict=True):
        assert abs(a["loss"] - b["loss"]) <= 1e-4
