"""The kernels of generation in float32 by Triton's interpreter, where there is no GPU (tests/gpu has the same on one)."""

import os

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("a GPU runs tests/gpu/test_decode_kernels_on_gpu.py", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: it decides what @triton.jit makes of a kernel
pytest.importorskip("triton")

from handgrad.ops.cuda import attention_decode, choosing, decode, row_gemms
from handgrad.ops.reference import decode as reference
from handgrad.ops.reference.decode import gumbel
from tests.kernels import decode_checks as checks
from tests.kernels.decode_checks import check
from tests.kernels.memory_checks import Draw


@pytest.fixture
def draw() -> Draw:
    return Draw(torch.float32, "cpu")


@pytest.mark.parametrize(("C", "O"), [(24, 7), (100, 33), (768, 11), (1600, 5), (6400, 40)])
def test_row_gemms(draw: Draw, C: int, O: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(checks.row_gemms(draw, C, O), terms=4)  # of the layer norm: as its own check has it
    check(checks.swiglu_product(draw, C, O), terms=8)
    monkeypatch.setattr(row_gemms, "FEWEST_PROGRAMS", 2)  # several rows in a tile, the last one cut
    for limit in ("MOST_OF_ONE_TILE", "MOST_OF_ONE_SWIGLU_TILE", "RESIDENT", "MOST_OF_A_VOCABULARY"):
        monkeypatch.setattr(row_gemms, limit, 2)  # several tiles in a program
    check(checks.row_gemms(draw, C, O), terms=4)
    check(checks.swiglu_product(draw, C, O), terms=8)


def test_a_row_far_from_zero_keeps_its_variance(draw: Draw) -> None:
    """A mean two thousand deviations away: squares less the mean's square would leave nothing of the variance."""
    C, O = 768, 11
    x, weight, one, none = 4096 + 2 * draw.normal(1, C), draw.normal(O, C), torch.ones(C), torch.zeros(C)
    out = torch.full((1, O), torch.nan)
    decode.layernorm_linear_forward(out, *checks.workspace(x), x, one, none, weight, None, scratch=torch.empty(0))
    exact = torch.nn.functional.layer_norm(x.double(), (C,)) @ weight.double().T
    assert (out - exact).norm() < 1e-3 * exact.norm()


def test_a_program_has_rows_while_there_are_enough_programs() -> None:
    assert row_gemms.gemm_tile(4800, 1600) == (4, 2048, 4)
    assert row_gemms.gemm_tile(50304, 768) == (8, 1024, 4)
    assert row_gemms.gemm_tile(768, 768) == (2, 1024, 4)
    assert row_gemms.gemm_tile(1600, 6400) == (1, 8192, 4)
    each = {tiles: row_gemms.tiles_of(tiles) for tiles in (96, 792, 793, 1200, 1600, 2048, 4864, 7920, 7921, 12576)}
    assert each == {96: 1, 792: 1, 793: 2, 1200: 2, 1600: 3, 2048: 4, 4864: 8, 7920: 12, 7921: 5, 12576: 7}
    assert [row_gemms.tiles_of(tiles, 2) for tiles in (2640, 2641)] == [1, 5]
    assert [row_gemms.stages_of(count) for count in (1, 2, 4, 5)] == [0, 2, 2, 3]
    assert row_gemms.gemm_tile(8192, 2048, 2) == (4, 2048, 8), "SwiGLU: as many rows of each half"


@pytest.mark.parametrize(
    ("B", "H", "maxT", "D", "positions"),
    [(1, 2, 8, 16, [0]), (3, 1, 200, 24, [0, 64, 199]), (2, 3, 150, 64, [63, 65]), (1, 1, 140, 100, [128])],
)
def test_attention(draw: Draw, B: int, H: int, maxT: int, D: int, positions: list[int]) -> None:
    check(checks.attention(draw, B, H, maxT, D, positions))


@pytest.mark.parametrize("positions", [[0, 1, 15], [16, 17, 31], [32, 33, 79]])
def test_attention_over_several_tiles(draw: Draw, positions: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 keys: at their borders, and past the fifth; in either choice of a tile."""
    monkeypatch.setattr(attention_decode, "FEW_ATTENTIONS", (16 * 32, 1))
    check(checks.attention(draw, 3, 2, 80, 24, positions))
    monkeypatch.setattr(attention_decode, "FEW_PROGRAMS", 1)
    monkeypatch.setattr(attention_decode, "MANY_ATTENTIONS", (16 * 32, 1))
    check(checks.attention(draw, 3, 2, 80, 24, positions))


@pytest.mark.parametrize("window", [1, 2, 16, 17, 40, 79, 200])
def test_attention_within_a_window(draw: Draw, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 keys; nothing before the window is read."""
    monkeypatch.setattr(attention_decode, "FEW_ATTENTIONS", (16 * 32, 1))
    check(checks.attention(draw, 4, 2, 80, 24, [0, 15, 41, 79], window))


@pytest.mark.parametrize("window", [1, 5, 32, 33, 64])
def test_attention_of_new_tokens_within_a_window(draw: Draw, window: int) -> None:
    check(checks.attention_append(draw, 70, [0, 130], 3, 3, 201, 64, window))
    check(checks.attention_append(draw, 5, [3, 0, 11], 4, 2, 16, 24, window))


# Shared keys at each border of a tile; keys of one head each in one part and in all. Of a width of 24: padded tiles.
IN_PARTS = [
    *((6, 2, 32, position) for position in (0, 1, 15, 16, 17, 63, 64, 65, 129, 199)),
    (3, 3, 24, 0),
    (3, 3, 24, 199),
]


@pytest.mark.nightly(but=["6-2-32-0", "6-2-32-65", "3-3-24-199"])
@pytest.mark.parametrize(("H", "K", "D", "position"), IN_PARTS)
def test_heads_in_parts(draw: Draw, H: int, K: int, D: int, position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One part with keys, some, all; parts of one tile and of several; heads that share keys."""
    monkeypatch.setattr(attention_decode, "FEW_ATTENTIONS", (16 * 32, 1))
    for most, parts in ((16, 16), (4, 4), (1, 1)):
        monkeypatch.setattr(attention_decode, "MOST_PARTS", most)
        assert attention_decode.parts_of(H, 200, 16) == parts
        check(checks.split_attention(draw, H, K, 200, D, position, with_bias=position != 64))
        for window in (1, 17, 64) if position in (16, 199) else ():
            check(checks.split_attention(draw, H, K, 200, D, position, window=window))


@pytest.mark.parametrize(
    ("T", "starts", "H", "K", "maxT", "D"),
    [(1, [0], 1, 1, 16, 16), (5, [3, 0, 11], 4, 2, 16, 24), (70, [0, 130], 3, 3, 201, 64), (130, [64], 2, 1, 200, 20)],
)
def test_attention_of_new_tokens(draw: Draw, T: int, starts: list[int], H: int, K: int, maxT: int, D: int) -> None:
    check(checks.attention_append(draw, T, starts, H, K, maxT, D))


def test_attention_of_new_tokens_in_turings_tiles(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_decode, "APPEND_TILE", attention_decode.TURING_APPEND_TILE)
    check(checks.attention_append(draw, 37, [3, 0, 11], 4, 2, 64, 24))


def test_parts_while_programs_are_few() -> None:
    """As many as a full cache has tiles, up to 264 programs."""
    sizes = {(12, 1024, 256): 4, (12, 200, 256): 1, (16, 1024, 128): 8, (32, 1 << 17, 256): 8, (12, 1 << 17, 256): 16}
    sizes |= {(133, 4096, 256): 1, (132, 4096, 256): 2}
    assert {size: attention_decode.parts_of(*size) for size in sizes} == sizes


@pytest.mark.parametrize("B", [1, 3, 65])
def test_advance(draw: Draw, B: int) -> None:
    checks.advance(draw, B)


@pytest.mark.parametrize(("B", "C"), [(1, 24), (3, 100), (2, 1600)])
def test_embedding(draw: Draw, B: int, C: int) -> None:
    checks.embedding(draw, B, C)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("V", [100, 9001])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.7},
        {},
        {"temperature": 0.7, "min_p": 0.05},
        {"temperature": 1.3, "repetition_penalty": 1.2},
        {"top_k": 5, "top_p": 0.9},
    ],
    ids=str,
)
def test_choices(draw: Draw, V: int, options: dict[str, float]) -> None:
    checks.choices(draw, V, V + 28, **options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_penalty_makes_every_seen_token_less_likely(draw: Draw, temperature: float) -> None:
    """In rows of one sign each, whose best logit is a seen one: positive ones are divided, negative ones multiplied."""
    V, rows = 40, 8
    logits = draw.normal(rows, V).abs() + 0.1
    logits[::2] *= -1
    found = []
    for ops in (choosing, reference):
        seen = torch.zeros(rows, V, dtype=torch.bool)
        seen[:, : V // 2] = True
        seen[torch.arange(rows), logits.argmax(1)] = True
        tokens, seeds = torch.empty(rows, dtype=torch.int64), torch.arange(rows)
        settings = checks.PLAIN | {"temperature": temperature, "repetition_penalty": 1.5}
        scratch = torch.zeros(choosing.choosing_scratch_bytes(batch=rows, vocab_size=V), dtype=torch.uint8)
        ops.choose_tokens(tokens, logits, seen, seeds, seeds, vocab_size=V, **settings, scratch=scratch)
        found.append((tokens.tolist(), seen))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])
    assert (torch.tensor(found[0][0])[::2] >= V // 2).any() and (torch.tensor(found[0][0])[1::2] >= V // 2).any()


def test_draws_are_the_references() -> None:
    """Of one token id over many positions: logits that are equal, so that the draw alone decides."""
    positions = torch.arange(300)
    tokens, seeds = torch.empty(300, dtype=torch.int64), torch.full((300,), 77)
    choosing.choose_tokens(
        tokens,
        torch.zeros(300, 64),
        None,
        seeds,
        positions,
        vocab_size=50,
        **checks.PLAIN,
        scratch=torch.zeros(1 << 16, dtype=torch.uint8),
    )
    assert torch.equal(tokens, gumbel(seeds, positions, 50).argmax(1))
    assert len(set(tokens.tolist())) > 45
