"""The modern network's kernels that write fp8, in float16 by Triton's interpreter (tests/gpu has the same on a GPU)."""

import os
from dataclasses import replace
from itertools import product

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("a GPU runs tests/gpu/test_modern_fp8_on_gpu.py", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: it decides what @triton.jit makes of a kernel
pytest.importorskip("triton")

from handgrad.joins.fp8.cuda import rotary
from handgrad.joins.fp8.formats import E4M3, E5M2
from tests.kernels import fp8_stand_ins, modern_fp8_checks as checks
from tests.kernels.fp8_checks import make
from tests.kernels.memory_checks import Draw
from tests.kernels.pairs import every_pair

FORMATS, COUNTING, CURRENT = (E4M3, E5M2), (True, False), (True, False)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8_stand_ins.install(monkeypatch)


@pytest.fixture
def draw() -> Draw:
    return Draw(torch.float16, "cpu")


NORMS = [(33, 80), (5, 768), (3, 100)]


@pytest.mark.parametrize(("shape", "kind", "counting"), every_pair(product(NORMS, FORMATS, COUNTING)))
def test_rmsnorm_forward(draw: Draw, shape: tuple[int, int], kind: torch.dtype, counting: bool) -> None:
    checks.rmsnorm_forward(draw, *shape, kind, counting=counting)


@pytest.mark.parametrize(("shape", "kind", "counting"), every_pair(product(NORMS, FORMATS, COUNTING)))
def test_rmsnorm_backward(
    draw: Draw, shape: tuple[int, int], kind: torch.dtype, counting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handgrad.joins.fp8.sizes.RMSNORM_PROGRAMS", 3)
    checks.rmsnorm_backward(draw, *shape, kind, counting=counting)


SCALARS = [(True, True), (True, False), (False, True)]


@pytest.mark.parametrize(("shape", "has", "kind", "counting"), every_pair(product(NORMS, SCALARS, FORMATS, COUNTING)))
def test_mixed_streams(
    draw: Draw, shape: tuple[int, int], has: tuple[bool, bool], kind: torch.dtype, counting: bool
) -> None:
    checks.mix_rmsnorm_forward(draw, *shape, *has, kind, counting=counting)
    checks.mix_rmsnorm_backward(draw, *shape, *has, kind, counting=counting)


SHAPES = [(208, 320), (128, 64), (4, 8)]


@pytest.mark.parametrize(("shape", "counting", "current"), every_pair(product(SHAPES, COUNTING, CURRENT)))
def test_relu2_forward(draw: Draw, shape: tuple[int, int], counting: bool, current: bool) -> None:
    checks.relu2_forward(draw, *shape, counting=counting, current=current)


@pytest.mark.parametrize(("shape", "kind", "counting", "current"), every_pair(product(SHAPES, FORMATS, COUNTING, CURRENT)))
def test_relu2_backward(draw: Draw, shape: tuple[int, int], kind: torch.dtype, counting: bool, current: bool) -> None:
    checks.relu2_backward(draw, *shape, kind, counting=counting, current=current)


HEADS = [(36, 2, 24, 12), (20, 1, 128, 20), (20, 3, 100, 5), (4, 1, 2, 4)]  # N, H, D, length; the first takes two programs


@pytest.mark.parametrize(("sizes", "turn", "kind", "counting"), every_pair(product(HEADS, checks.TURNS, FORMATS, COUNTING)))
def test_turn_back(draw: Draw, sizes: tuple[int, ...], turn: str, kind: torch.dtype, counting: bool) -> None:
    checks.turn_back(draw, *sizes, turn, kind, counting=counting)


def test_turn_back_with_columns_in_another_format(draw: Draw) -> None:
    """At the scale of the rows."""
    checks.turn_back(draw, 36, 2, 24, 12, "qk_norm_rotary", E4M3, counting=True, columns=E5M2)


def test_what_a_tile_cannot_hold_is_refused(draw: Draw) -> None:
    tensor = make(48, 72, -5, E4M3, "cpu")
    tensor = replace(tensor, workspace=draw.normal(48, 72))
    with pytest.raises(AssertionError, match="0 parts, 2 needed"):
        rotary.rotary_backward(tensor, num_heads=1, length=16)
    with pytest.raises(AssertionError, match="even number of channels, found 3"):
        rotary.rotary_backward(tensor, num_heads=8, length=16)
