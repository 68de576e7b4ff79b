"""The kernels of RMS norm, QK-norm, rotary positions, squared ReLU and a softly capped classifier in float32 by Triton's
interpreter, where there is no GPU (tests/gpu has the same on one)."""

import math
import os

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("a GPU runs tests/gpu/test_modern_kernels_on_gpu.py", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: it decides what @triton.jit makes of a kernel
pytest.importorskip("triton")

from handgrad.ops.cuda import rotary
from tests.kernels import modern_checks as checks
from tests.kernels.memory_checks import Draw, check, kernels, zipf_tokens


@pytest.fixture
def draw() -> Draw:
    return Draw(torch.float32, "cpu")


@pytest.mark.parametrize(("N", "C"), [(1, 24), (7, 48), (33, 100), (5, 768), (3, 1600), (1, 2500)])
def test_rmsnorm(draw: Draw, N: int, C: int) -> None:
    check(checks.rmsnorm_forward(draw, N, C))
    check(checks.rmsnorm_backward(draw, N, C))


HEADS = [(1, 1, 2, 1), (7, 2, 24, 3), (5, 3, 100, 5), (4, 6, 128, 3), (3, 12, 64, 2), (2, 16, 100, 2)]  # N, H, D, length


@pytest.mark.parametrize(("N", "H", "D", "length"), HEADS)
def test_qk_norm_and_rotary(draw: Draw, N: int, H: int, D: int, length: int) -> None:
    check(checks.head_forward(draw, N, H, D, length))
    check(checks.head_backward(draw, N, H, D, length))


def test_a_program_walks_several_rows(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "PROGRAMS", 3)
    check(checks.head_forward(draw, 11, 2, 24, 4))
    check(checks.head_backward(draw, 11, 2, 24, 4))


@pytest.mark.parametrize(("N", "F"), [(1, 77), (9, 31), (33, 300)])
def test_relu2(draw: Draw, N: int, F: int) -> None:
    check(checks.relu2_forward(draw, N, F))
    check(checks.relu2_backward(draw, N, F))


def test_relu2_hides_no_nan() -> None:
    x = torch.tensor([[math.nan, -math.inf, -1.0, -0.0, 2.0, math.inf]])
    kernels.relu2_forward(x)
    assert math.isnan(x[0, 0]) and x[0, 1:].tolist() == [0, 0, 0, 4, math.inf]


@pytest.mark.parametrize(("B", "T", "C"), [(1, 1, 24), (5, 77, 24), (2, 40, 300)])
def test_token_embedding(draw: Draw, B: int, T: int, C: int) -> None:
    checks.check_token_embedding(draw, zipf_tokens(101, B, T), C, 128)
