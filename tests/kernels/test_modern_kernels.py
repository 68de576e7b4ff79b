"""The kernels of RMS norm, QK-norm, rotary positions, squared ReLU and a softly capped classifier in float32 by Triton's
interpreter, where there is no GPU (tests/gpu has the same on one)."""

import os

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("a GPU runs tests/gpu/test_modern_kernels_on_gpu.py", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: it decides what @triton.jit makes of a kernel
pytest.importorskip("triton")

from tests.kernels import modern_checks as checks
from tests.kernels.memory_checks import Draw, check


@pytest.fixture
def draw() -> Draw:
    return Draw(torch.float32, "cpu")


@pytest.mark.parametrize(("N", "C"), [(1, 24), (7, 48), (33, 100), (5, 768), (3, 1600), (1, 2500)])
def test_rmsnorm(draw: Draw, N: int, C: int) -> None:
    check(checks.rmsnorm_forward(draw, N, C))
    check(checks.rmsnorm_backward(draw, N, C))
