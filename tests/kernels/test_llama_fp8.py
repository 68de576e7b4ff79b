"""The Llama family's kernels that write fp8, in float16 by Triton's interpreter (tests/gpu has the same on a GPU)."""

import os
from itertools import product

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("a GPU runs tests/gpu/test_llama_fp8_on_gpu.py", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: it decides what @triton.jit makes of a kernel
pytest.importorskip("triton")

from handgrad.joins.fp8 import cuda
from handgrad.joins.fp8.cuda import attention
from handgrad.joins.fp8.formats import E4M3, E5M2
from handgrad.joins.fp8.sizes import QUADS_TILE, QUANTIZE_TILE, SWIGLU_TILE, tiles
from handgrad.ops.cuda import attention_triton
from handgrad.ops.sizes import AttentionTile
from tests.documents import document_starts
from tests.kernels import fp8_stand_ins, llama_fp8_checks as checks
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


NORMS = [(33, 80), (5, 576), (3, 100)]


@pytest.mark.parametrize(("shape", "kind", "counting"), every_pair(product(NORMS, FORMATS, COUNTING)))
def test_gained_rmsnorm(
    draw: Draw, shape: tuple[int, int], kind: torch.dtype, counting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward, a program walks several rows."""
    monkeypatch.setattr("handgrad.ops.sizes.NORM_PROGRAMS", 3)
    checks.gained_rmsnorm_forward(draw, *shape, kind, counting=counting)
    checks.gained_rmsnorm_backward(draw, *shape, kind, counting=counting)


SHAPES = [(208, 160), (64, 256), (36, 72), (4, 8)]


@pytest.mark.parametrize(("shape", "counting", "current"), every_pair(product(SHAPES, COUNTING, CURRENT)))
def test_swiglu_forward(draw: Draw, shape: tuple[int, int], counting: bool, current: bool) -> None:
    checks.swiglu_forward(draw, *shape, counting=counting, current=current)


@pytest.mark.parametrize(("shape", "kind", "counting", "current"), every_pair(product(SHAPES, FORMATS, COUNTING, CURRENT)))
def test_swiglu_backward(draw: Draw, shape: tuple[int, int], kind: torch.dtype, counting: bool, current: bool) -> None:
    checks.swiglu_backward(draw, *shape, kind, counting=counting, current=current)


# N, H, K, D, length; the first takes two programs
HEADS = [(36, 3, 1, 24, 12), (20, 2, 1, 128, 20), (20, 3, 3, 100, 5), (4, 1, 1, 2, 4)]


@pytest.mark.parametrize(("sizes", "turn", "kind", "counting"), every_pair(product(HEADS, checks.TURNS, FORMATS, COUNTING)))
def test_turn_back(draw: Draw, sizes: tuple[int, ...], turn: str, kind: torch.dtype, counting: bool) -> None:
    checks.turn_back(draw, *sizes, turn, kind, counting=counting, scale=1.2 if sizes[1] > 2 else 1.0)


@pytest.mark.parametrize("turn", checks.TURNS)
def test_turn_back_with_columns_in_another_format(draw: Draw, turn: str) -> None:
    """At the scale of the rows."""
    checks.turn_back(draw, 36, 4, 2, 24, 12, turn, E4M3, counting=True, columns=E5M2)


@pytest.mark.parametrize("config", [None, AttentionTile(32, 16, 4, 1)])
@pytest.mark.parametrize("kind", FORMATS)
def test_attention_of_grouped_heads(
    kind: torch.dtype, config: AttentionTile | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if config is not None:
        monkeypatch.setattr(attention_triton, "choose_config", lambda *_: config)
    checks.attention_forward(Draw(torch.float32, "cpu"), 2, 37, 6, 2, 16, kind)
    starts = document_starts([[5, 1, 20, 11], [30, 7]])
    checks.attention_forward(Draw(torch.float32, "cpu"), 2, 37, 3, 1, 24, kind, starts=starts)


def test_gradients_that_attention_cannot_quantise_are_refused(draw: Draw) -> None:
    dqkv, lse = make(16, 64, 50, E4M3, "cpu"), torch.zeros(1, 2, 16)
    out, scratch = torch.zeros(16, 32), torch.zeros(1 << 10, dtype=torch.uint8)
    with pytest.raises(AssertionError, match="quantised behind attention"):
        attention.attention_backward(dqkv, out, out, lse, torch.zeros(16, 64), scratch=scratch)


@pytest.mark.parametrize(("tokens", "F"), [(16384, 1536), (48, 48), (32, 16), (96, 8960)])
def test_room_for_statistics(tokens: int, F: int) -> None:
    """The parts that a run makes room for are enough for the SwiGLU's programs, and for those that quantise alone."""
    sizes = {"batch": 1, "length": tokens, "num_heads": 1, "head_width": 64, "channels": 64, "padded_vocab_size": 128}
    room = cuda.statistics_parts(**sizes, feed_forward=F, widest=2 * F)
    written = [tiles(tokens, F, SWIGLU_TILE), tiles(tokens, F, QUADS_TILE)]
    shapes = (tokens, 2 * F), (2 * F, 64), (64, F), (tokens, 64), (128, 64)
    written += [tiles(*shape, QUANTIZE_TILE) for shape in shapes]
    assert room >= max(written)
