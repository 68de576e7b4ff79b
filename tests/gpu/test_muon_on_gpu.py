"""Muon on a CUDA GPU: as near to the polar factor as on a CPU, and the same bits every time."""

import dataclasses

import pytest
import torch

from handgrad.config import RunConfig
from handgrad.ops.reference.muon import polar
from tests.gpu.runs import leave_the_same_bits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("shape", [(768, 768), (3072, 768), (768, 3072)])
def test_polar_is_as_good_as_on_the_cpu(shape: tuple[int, int]) -> None:
    """In bf16: its distance from the result in float64 is at most twice the CPU's."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = polar(matrix.double())
    cpu, gpu = polar(matrix).double(), polar(matrix.cuda()).cpu().double()
    assert (gpu - exact).norm() <= 2 * (cpu - exact).norm()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_runs_and_a_resumed_one(config: RunConfig, precision: str) -> None:
    """The same bits; the third stops after 8 of 12 steps and goes on from its checkpoint."""
    config = dataclasses.replace(config, device="cuda", backend="kernels", precision=precision, optimizer="muon")
    leave_the_same_bits(config)
