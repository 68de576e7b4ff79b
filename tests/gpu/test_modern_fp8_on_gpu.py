"""The modern network's kernels that write fp8 on a CUDA GPU: bit for bit what quantising 16-bit kernels' results gives."""

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs a CUDA GPU with fp8", allow_module_level=True)

from handgrad.joins.fp8.formats import E4M3, E5M2
from tests.kernels import modern_fp8_checks as checks
from tests.kernels.memory_checks import Draw

formats = pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)
counting = pytest.mark.parametrize("counting", [True, False])
current = pytest.mark.parametrize("current", [True, False])
norms = pytest.mark.parametrize(("N", "C"), [(65536, 768), (16384, 1600), (2048, 3072), (208, 80), (1, 8), (333, 100)])
hidden = pytest.mark.parametrize(("N", "F"), [(65536, 3072), (16384, 6400), (208, 320), (128, 64), (4, 8)])


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def draw(request: pytest.FixtureRequest) -> Draw:
    return Draw(request.param, "cuda")


@formats
@counting
@norms
def test_rmsnorm(draw: Draw, N: int, C: int, kind: torch.dtype, counting: bool) -> None:
    checks.rmsnorm_forward(draw, N, C, kind, counting=counting)
    checks.rmsnorm_backward(draw, N, C, kind, counting=counting)


@formats
@counting
@norms
@pytest.mark.parametrize("has", [(True, True), (True, False), (False, True)])
def test_mixed_streams(draw: Draw, N: int, C: int, has: tuple[bool, bool], kind: torch.dtype, counting: bool) -> None:
    checks.mix_rmsnorm_forward(draw, N, C, *has, kind, counting=counting)
    checks.mix_rmsnorm_backward(draw, N, C, *has, kind, counting=counting)


@counting
@current
@hidden
def test_relu2_forward(draw: Draw, N: int, F: int, counting: bool, current: bool) -> None:
    checks.relu2_forward(draw, N, F, counting=counting, current=current)


@formats
@counting
@current
@hidden
def test_relu2_backward(draw: Draw, N: int, F: int, kind: torch.dtype, counting: bool, current: bool) -> None:
    checks.relu2_backward(draw, N, F, kind, counting=counting, current=current)


@formats
@counting
@pytest.mark.parametrize("turn", checks.TURNS)
@pytest.mark.parametrize(
    ("N", "H", "D", "length"),
    [(65536, 6, 128, 1024), (16384, 24, 128, 1024), (8192, 12, 64, 1024), (48, 2, 24, 16), (36, 3, 100, 12), (4, 1, 2, 4)],
)
def test_turn_back(draw: Draw, N: int, H: int, D: int, length: int, turn: str, kind: torch.dtype, counting: bool) -> None:
    checks.turn_back(draw, N, H, D, length, turn, kind, counting=counting)


@pytest.mark.parametrize("turn", checks.TURNS)
def test_turn_back_with_columns_in_another_format(draw: Draw, turn: str) -> None:
    checks.turn_back(draw, 4096, 6, 128, 1024, turn, E4M3, counting=True, columns=E5M2)
