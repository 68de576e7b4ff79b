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

from handgrad.ops import sizes
from handgrad.ops.cuda import row_gemms, value_embedding
from tests.kernels import modern_checks as checks
from tests.kernels.decode_checks import check as check_decode
from tests.kernels.memory_checks import Draw, both, check, kernels, zipf_tokens


@pytest.fixture
def draw() -> Draw:
    return Draw(torch.float32, "cpu")


@pytest.mark.parametrize(("N", "C"), [(1, 24), (7, 48), (33, 100), (5, 768), (3, 1600), (1, 2500)])
def test_rmsnorm(draw: Draw, N: int, C: int) -> None:
    for each in checks.rmsnorm(draw, N, C):
        check(each)


HEADS = [(1, 1, 2, 1), (7, 2, 24, 3), (5, 3, 100, 5), (4, 6, 128, 3), (3, 12, 64, 2), (2, 16, 100, 2)]  # N, H, D, length


@pytest.mark.parametrize(("N", "H", "D", "length"), HEADS)
def test_qk_norm_and_rotary(draw: Draw, N: int, H: int, D: int, length: int) -> None:
    for each in checks.turns(draw, N, H, D, length):
        check(each)


def test_a_program_walks_several_rows(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "ROTARY_PROGRAMS", 3)
    for each in checks.turns(draw, 11, 2, 24, 4):
        check(each)


BOTH, RESIDUAL, INPUT = (True, True), (True, False), (False, True)


@pytest.mark.parametrize(
    ("N", "C", "has"), [(1, 24, BOTH), (33, 100, RESIDUAL), (7, 48, INPUT), (5, 768, BOTH), (3, 2500, BOTH)]
)
def test_mixed_streams(draw: Draw, N: int, C: int, has: tuple[bool, bool]) -> None:
    check(checks.mix_forward(draw, N, C, *has))
    check(checks.mix_backward(draw, N, C, *has))


@pytest.mark.parametrize("has", [BOTH, RESIDUAL, INPUT])
def test_the_scalars_sums_are_of_all_programs(draw: Draw, has: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "NORM_PROGRAMS", 3)
    check(checks.mix_backward(draw, 29, 48, *has))


@pytest.mark.parametrize(
    ("B", "T", "H", "D", "G"), [(1, 1, 1, 24, 24), (2, 5, 3, 10, 30), (1, 4, 6, 128, 32), (3, 3, 2, 100, 32)]
)
def test_value_embeddings(draw: Draw, B: int, T: int, H: int, D: int, G: int) -> None:
    tokens = zipf_tokens(19, B, T)
    check(checks.values(draw, "forward", tokens, H, D, G, 128))
    check(checks.values(draw, "backward", tokens, H, D, G, 128))
    check(checks.value_decode(draw, B, H, D, G))


def test_a_program_walks_several_rows_of_values(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORWARD_PROGRAMS", "BACKWARD_PROGRAMS"):
        monkeypatch.setattr(value_embedding, name, 3)
    check(checks.values(draw, "forward", zipf_tokens(19, 2, 7), 2, 24, 32, 128))
    check(checks.values(draw, "backward", zipf_tokens(19, 2, 7), 2, 24, 32, 128))


@pytest.mark.parametrize(("N", "F"), [(1, 77), (9, 31), (33, 300)])
def test_relu2(draw: Draw, N: int, F: int) -> None:
    for each in both(draw, "relu2", N=N, F=F):
        check(each)


def test_relu2_hides_no_nan(draw: Draw) -> None:
    checks.check_relu2_of_no_number(draw)


@pytest.mark.parametrize(("B", "T", "C"), [(1, 1, 24), (5, 77, 24), (2, 40, 300)])
def test_token_embedding(draw: Draw, B: int, T: int, C: int) -> None:
    checks.check_token_embedding(draw, zipf_tokens(101, B, T), C, 128)


@pytest.mark.parametrize(("C", "O"), [(24, 7), (100, 33), (768, 11), (1600, 5), (6400, 40)])
def test_row_gemms(draw: Draw, C: int, O: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_decode(checks.modern_row_gemms(draw, C, O), terms=4)  # of the norm: as its own check has it
    monkeypatch.setattr(row_gemms, "FEWEST_PROGRAMS", 2)  # several rows in a program, the last one cut
    check_decode(checks.modern_row_gemms(draw, C, O), terms=4)


@pytest.mark.parametrize(("H", "D", "positions"), [(1, 2, [1]), (3, 24, [0, 7, 1 << 20]), (2, 100, [3, (1 << 31) + 5])])
def test_positions_of_generation(draw: Draw, H: int, D: int, positions: list[int]) -> None:
    check_decode(checks.head_decode(draw, H, D, positions))


@pytest.mark.parametrize(("B", "C"), [(1, 24), (3, 100), (2, 1600)])
def test_token_embedding_of_generation(draw: Draw, B: int, C: int) -> None:
    checks.check_token_embedding_decode(draw, B, C)


@pytest.mark.parametrize("cap", [15.0, 30.0])
@pytest.mark.parametrize(("N", "V", "Vp"), [(5, 2, 128), (3, 57, 128), (2, 128, 128), (2, 20011, 20096), (2, 16384, 16512)])
def test_classifier_with_a_cap(draw: Draw, N: int, V: int, Vp: int, cap: float) -> None:
    for each in checks.capped_classifier(draw, N, V, Vp, cap):
        check(each)


def test_a_cap_at_the_ends() -> None:
    """Neither end overflows, however large a logit is; its slope there is 0."""
    logits = torch.tensor([[3e38, -3e38, 0.0, math.nan]])
    z, losses = logits[:, :3].clone(), torch.full((1,), math.nan)
    kernels.softcap_forward(z, softcap=15.0)
    assert z.tolist() == [[15, -15, 0]]
    kernels.classifier_forward_backward(losses, logits, torch.tensor([1]), torch.ones(1), vocab_size=3, softcap=15.0)
    assert losses.item() == pytest.approx(30.0, rel=1e-6)
    assert logits[0, [0, 1, 3]].tolist() == [0, 0, 0] and logits[0, 2].item() == pytest.approx(math.exp(-15), rel=1e-5)
