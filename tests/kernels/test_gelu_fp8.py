"""The GELU kernels that write fp8, in float16 by Triton's interpreter (tests/gpu has the same in bf16 on a GPU)."""

import os
from itertools import product

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("a GPU runs tests/gpu/test_gelu_fp8_on_gpu.py", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: it decides what @triton.jit makes of a kernel
pytest.importorskip("triton")
import triton
import triton.language as tl

from handgrad.joins.fp8.cuda import activations
from handgrad.joins.fp8.formats import E4M3, E5M2
from handgrad.ops.cuda.activations import gelu, gelu_derivative
from tests.kernels import fp8_stand_ins, gelu_fp8_checks as checks
from tests.kernels.memory_checks import Draw
from tests.kernels.pairs import every_pair


@triton.jit
def exp2_of_minus_abs(x):
    return tl.exp2(-tl.abs(x))


@triton.jit
def reciprocal(x):
    return 1.0 / x


@triton.jit
def both_ways(together, apart, inp, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    x = tl.load(inp + place)
    y, derivative = activations.gelu_and_derivative(x)
    tl.store(together + place, y)
    tl.store(together + BLOCK + place, derivative)
    tl.store(apart + place, gelu(x))
    tl.store(apart + BLOCK + place, gelu_derivative(x))


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8_stand_ins.install(monkeypatch)


@pytest.fixture
def draw() -> Draw:
    return Draw(torch.float16, "cpu")


SHAPES = [(208, 320), (128, 64), (4, 8)]
FORMATS, COUNTING, CURRENT = (E4M3, E5M2), (True, False), (True, False)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(("shape", "counting", "current"), every_pair(product(SHAPES, COUNTING, CURRENT)))
def test_forward(draw: Draw, shape: tuple[int, int], counting: bool, current: bool) -> None:
    checks.forward(draw, *shape, counting=counting, current=current)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(("shape", "kind", "counting", "current"), every_pair(product(SHAPES, FORMATS, COUNTING, CURRENT)))
def test_backward(draw: Draw, shape: tuple[int, int], kind: torch.dtype, counting: bool, current: bool) -> None:
    checks.backward(draw, *shape, kind, counting=counting, current=current)


def test_gelu_and_derivative_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "exp2_of_minus_abs", exp2_of_minus_abs)
    monkeypatch.setattr(activations, "reciprocal", reciprocal)
    x = torch.cat([torch.linspace(-12, 12, 4096 - len(checks.EXTREMES)), torch.tensor(checks.EXTREMES)])
    together, apart = torch.full((2, 4096), torch.nan), torch.full((2, 4096), torch.nan)
    both_ways[(1,)](together, apart, x, 4096)
    torch.testing.assert_close(together, apart, rtol=3e-7, atol=0)


def test_fewer_parts_than_programs(draw: Draw) -> None:
    tensor = checks.make(208, 320, -5, E4M3, "cpu")
    hidden = draw.normal(208, 320)
    with pytest.raises(AssertionError, match="0 parts, 9 needed"):
        activations.gelu_forward_fp8(tensor, hidden)
    with pytest.raises(AssertionError, match="0 parts, 21 needed"):
        activations.gelu_backward_fp8(tensor, tensor, hidden, hidden)


@pytest.mark.parametrize("kind", FORMATS, ids=str)
@pytest.mark.parametrize(("N", "O"), [(208, 320), (5000, 6), (4096, 8), (3, 1)])
def test_bias_backward(draw: Draw, N: int, O: int, kind: torch.dtype) -> None:
    checks.bias_backward(draw, N, O, kind)
