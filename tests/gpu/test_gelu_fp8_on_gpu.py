"""The GELU kernels that write fp8 on a CUDA GPU: bit for bit what quantising the 16-bit kernels' results gives."""

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs a CUDA GPU with fp8", allow_module_level=True)

from handgrad.joins.fp8.formats import E4M3, E5M2
from tests.kernels import gelu_fp8_checks as checks
from tests.kernels.memory_checks import Draw

SIZES = [(65536, 3072), (16384, 6400), (208, 320), (128, 64), (4, 8)]

formats = pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)
counting = pytest.mark.parametrize("counting", [True, False])
current = pytest.mark.parametrize("current", [True, False])


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def draw(request: pytest.FixtureRequest) -> Draw:
    return Draw(request.param, "cuda")


@counting
@current
@pytest.mark.parametrize(("N", "F"), SIZES)
def test_forward(draw: Draw, N: int, F: int, counting: bool, current: bool) -> None:
    checks.forward(draw, N, F, counting=counting, current=current)


@formats
@counting
@current
@pytest.mark.parametrize(("N", "F"), SIZES)
def test_backward(draw: Draw, N: int, F: int, kind: torch.dtype, counting: bool, current: bool) -> None:
    checks.backward(draw, N, F, kind, counting=counting, current=current)


@formats
@pytest.mark.parametrize(("N", "O"), [(65536, 768), (65536, 3072), (16384, 4800), (208, 320), (5000, 6), (3, 1)])
def test_bias_backward(draw: Draw, N: int, O: int, kind: torch.dtype) -> None:
    checks.bias_backward(draw, N, O, kind)
