"""Attention within documents and targets that are not trained in float32 by Triton's interpreter, where there is no GPU."""

import os

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("a GPU runs tests/gpu/test_document_kernels_on_gpu.py", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: it decides what @triton.jit makes of a kernel
pytest.importorskip("triton")

import triton
import triton.language as tl

from handgrad.ops.cuda import attention_triton
from handgrad.ops.cuda.attention_tiles import first_after
from handgrad.ops.sizes import AttentionTile
from tests.documents import PACKINGS, document_starts
from tests.kernels import document_checks as checks
from tests.kernels.memory_checks import Draw, check
from tests.kernels.pairs import every_pair

# Queries per tile more and fewer than keys; and the shipped ones, as many of both.
TILES = {"wide": AttentionTile(32, 16, 4, 1), "tall": AttentionTile(16, 32, 4, 1), "shipped": None}
LENGTHS = [*PACKINGS.values(), [[3, 40, 1, 32, 20], [96]], [[64, 32], [16, 80]]]  # the last: no tail, boundaries of blocks
HEADS = [(2, 2, 16), (4, 2, 24), (3, 1, 64), (2, 1, 256)]  # H, K, D


@pytest.fixture
def draw() -> Draw:
    return Draw(torch.float32, "cpu")


@pytest.fixture
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TILES[request.param]
    if config is not None:
        monkeypatch.setattr(attention_triton, "choose_config", lambda *_: config)


CASES = every_pair((t, p, h) for t in TILES for p in range(len(LENGTHS)) for h in HEADS)


@pytest.mark.parametrize(("tiles", "packing", "heads"), CASES, indirect=["tiles"])
def test_attention(draw: Draw, tiles: None, packing: int, heads: tuple[int, int, int]) -> None:
    check(checks.attention(draw, LENGTHS[packing], *heads))


WINDOWS = [1, 2, 15, 16, 17, 40, 95]


@pytest.mark.parametrize(
    ("tiles", "window", "heads"), every_pair((t, w, h) for t in TILES for w in WINDOWS for h in HEADS), indirect=["tiles"]
)
def test_attention_within_a_window(draw: Draw, tiles: None, window: int, heads: tuple[int, int, int]) -> None:
    """In one document longer than the window, and in several. For a single key the reference's probability is 1 without a
    sum; the kernel's comes from scores, as on a GPU."""
    sums = checks.terms([[window]], heads[2]) if window == 1 else None
    check(checks.attention(draw, [[96], [3, 40, 1, 32, 20]], *heads, window), sums)
    check(checks.attention(draw, [[64], [64]], *heads, window), sums)


@pytest.mark.parametrize(("tiles", "packing"), [("wide", 2), ("tall", 3), ("shipped", 3)], indirect=["tiles"])
def test_attention_with_dropout(draw: Draw, tiles: None, packing: int) -> None:
    check(checks.attention_with_dropout(draw, [[3, 40, 1, 32, 20], [96]][: packing - 1], 2, 24))


FEWER = every_pair((t, h) for t in TILES for h in HEADS[:2])[::2]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a hidden score may overflow the exponential before it is dropped
@pytest.mark.parametrize(("tiles", "heads"), FEWER, indirect=["tiles"])
def test_a_document_sees_no_other(draw: Draw, tiles: None, heads: tuple[int, int, int]) -> None:
    checks.check_others(draw, [[19, 2, 16]], *heads)


@pytest.mark.parametrize(("tiles", "heads"), FEWER, indirect=["tiles"])
def test_one_document_has_the_plain_bits(draw: Draw, tiles: None, heads: tuple[int, int, int]) -> None:
    checks.check_one_document(draw, 1, 37, *heads)


@triton.jit
def ends_kernel(out, starts, keys, T, SPAN: tl.constexpr):
    first = tl.program_id(0)
    tl.store(out + first, first_after(starts, first, tl.load(keys + first), T, SPAN))


@pytest.mark.parametrize("ahead", [0, 3, 100])
def test_the_end_of_a_document(ahead: int) -> None:
    """Past many blocks of 16 positions, of a key at the first position or some after it."""
    T, starts = 200, document_starts([[1, 1, 130, 21, 3, 44]])[0]
    keys = (torch.arange(T) + ahead).clamp(max=T - 1).int()
    out = torch.zeros(T, dtype=torch.int32)
    ends_kernel[(T,)](out, starts, keys, T, SPAN=4)
    assert torch.equal(out, torch.searchsorted(starts, keys, right=True).int())


@pytest.mark.parametrize("softcap", [0.0, 15.0])
@pytest.mark.parametrize(("N", "V", "Vp"), [(5, 2, 128), (4, 128, 128), (3, 20011, 20096)])
def test_untrained_targets(draw: Draw, N: int, V: int, Vp: int, softcap: float) -> None:
    checks.check_untrained(draw, N, V, Vp, softcap)
    checks.check_weighted(draw, N, V, Vp, softcap)
