"""The kernels of RMS norm, QK-norm, rotary positions, squared ReLU and a softly capped classifier on a CUDA GPU, real sizes
and odd ones: as exact as the reference, the same bits every time."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from handgrad.machine import devices
from tests.kernels import modern_checks as checks
from tests.kernels.decode_checks import check as check_decode
from tests.kernels.memory_checks import Draw, both, check_all, copy, kernels, nan, poisoned, zipf_tokens

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
V, Vp = 50257, 50304


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """No TF32 and no reduced-precision sums: neither in the kernels nor in the reference they are held against."""
    devices.set_arithmetic(torch.device("cuda"), "fp32")


@pytest.fixture(params=[BF16, FP16, FP32], ids=str)
def draw(request: pytest.FixtureRequest) -> Draw:
    return Draw(request.param, "cuda")


@pytest.mark.parametrize(("N", "C"), [(65536, 768), (16384, 1600), (1, 24), (7, 48), (1031, 96), (333, 100), (9, 2500)])
def test_rmsnorm(draw: Draw, N: int, C: int) -> None:
    for each in checks.rmsnorm(draw, N, C):
        check_all(each)


BOTH, RESIDUAL, INPUT = (True, True), (True, False), (False, True)


@pytest.mark.parametrize("has", [BOTH, RESIDUAL, INPUT])
@pytest.mark.parametrize(("N", "C"), [(65536, 768), (16384, 1600), (1, 24), (1031, 96), (333, 100), (9, 2500)])
def test_mixed_streams(draw: Draw, N: int, C: int, has: tuple[bool, bool]) -> None:
    check_all(checks.mix_forward(draw, N, C, *has))
    check_all(checks.mix_backward(draw, N, C, *has))


@pytest.mark.parametrize(
    ("B", "T", "H", "D", "G"),
    [(64, 1024, 6, 128, 32), (8, 1024, 25, 64, 32), (1, 1, 1, 24, 24), (3, 111, 3, 10, 30), (2, 40, 2, 100, 32)],
)
def test_value_embeddings(draw: Draw, B: int, T: int, H: int, D: int, G: int) -> None:
    tokens = zipf_tokens(V, B, T)
    check_all(checks.values(draw, "forward", tokens, H, D, G, Vp))
    check_all(checks.values(draw, "backward", tokens, H, D, G, Vp))
    check_all(checks.value_decode(draw, B, H, D, G))


@pytest.mark.parametrize(
    ("N", "H", "D", "length"),
    [
        (32768, 12, 64, 1024),
        (8192, 6, 128, 1024),
        (8192, 16, 100, 512),
        (8192, 25, 64, 8192),
        (1, 1, 2, 1),
        (333, 3, 24, 7),
    ],
)
def test_qk_norm_and_rotary(draw: Draw, N: int, H: int, D: int, length: int) -> None:
    for each in checks.turns(draw, N, H, D, length):
        check_all(each)


@pytest.mark.parametrize(("N", "F"), [(65536, 3072), (16384, 6400), (1, 77), (9, 31)])
def test_relu2(draw: Draw, N: int, F: int) -> None:
    for each in both(draw, "relu2", N=N, F=F):
        check_all(each)


def test_relu2_hides_no_nan(draw: Draw) -> None:
    """A GPU's maximum of NaN and 0 is 0; the interpreter's is NaN."""
    checks.check_relu2_of_no_number(draw)


@pytest.mark.parametrize(("N", "C", "F"), [(4096, 768, 3072), (1000, 96, 400)])
def test_products_with_relu2(draw: Draw, N: int, C: int, F: int) -> None:
    check_all(checks.relu2_products(draw, N, C, F))


@pytest.mark.parametrize(("B", "T", "C"), [(64, 1024, 768), (16, 1024, 1600), (1, 1, 24), (5, 77, 100)])
def test_token_embedding(draw: Draw, B: int, T: int, C: int) -> None:
    checks.check_token_embedding(draw, zipf_tokens(V, B, T), C, Vp)


@pytest.mark.parametrize("cap", [15.0, 30.0])
@pytest.mark.parametrize(("N", "V", "Vp"), [(1024, V, Vp), (5, 2, 128), (37, 57, 128), (3, 128, 128), (3, 16384, 16512)])
def test_classifier_with_a_cap(draw: Draw, N: int, V: int, Vp: int, cap: float) -> None:
    for each in checks.capped_classifier(draw, N, V, Vp, cap):
        check_all(each)


@pytest.mark.parametrize(
    ("C", "O"), [(24, 7), (100, 33), (768, 2304), (768, 50304), (1600, 4800), (1600, 1600), (6400, 1600), (3072, 768)]
)
def test_row_gemms(draw: Draw, C: int, O: int) -> None:
    check_decode(checks.modern_row_gemms(draw, C, O), terms=4)


@pytest.mark.parametrize(
    ("H", "D", "positions"),
    [(1, 2, [1]), (12, 64, [700]), (6, 128, [0, 7, 1 << 20]), (16, 100, [3, 1023]), (2, 100, [3, (1 << 31) + 5])],
)
def test_positions_of_generation(draw: Draw, H: int, D: int, positions: list[int]) -> None:
    check_decode(checks.head_decode(draw, H, D, positions))


@pytest.mark.parametrize(("B", "C"), [(1, 24), (64, 768), (2, 1600)])
def test_token_embedding_of_generation(draw: Draw, B: int, C: int) -> None:
    checks.check_token_embedding_decode(draw, B, C)


def test_a_recorded_block_is_the_launched_one() -> None:
    """Norm, product, rotation, squared ReLU and loss as a CUDA graph: the bits of the launches, and nothing allocated."""
    draw, N, C, H = Draw(BF16, "cuda"), 256, 768, 12
    scratch = poisoned(draw.normal(1), tokens=N, channels=C, widest=4 * C)
    x, w, mlp, head = draw.normal(N, C), draw.normal(3 * C, C) / 30, draw.normal(4 * C, C) / 30, draw.normal(512, C) / 30
    targets, scale = draw.integers(500, N), torch.ones(1, device="cuda")

    def block(into: dict[str, torch.Tensor]) -> None:
        options = {"scratch": scratch}
        kernels.rmsnorm_linear_forward(into["qkv"], into["norm"], into["rstd"], x, None, w, None, **options)
        kernels.qk_norm_rotary_forward(into["qkv"], into["heads"], length=64)
        kernels.rmsnorm_linear_relu2_forward(into["mlp"], into["norm"], into["rstd"], x, None, mlp, **options)
        kernels.linear_forward(into["logits"], into["norm"], head, None, **options)
        kernels.classifier_forward_backward(into["losses"], into["logits"], targets, scale, vocab_size=500, softcap=15.0)

    widths = {"qkv": 3 * C, "norm": C, "mlp": 4 * C, "logits": 512}
    buffers = {name: nan(x, N, width) for name, width in widths.items()}
    statistics = {"rstd": (N,), "heads": (N, 2 * H), "losses": (N,)}
    buffers |= {name: nan(x, *shape, dtype=FP32) for name, shape in statistics.items()}
    launched, recorded = copy(buffers), copy(buffers)
    block(launched)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    block(recorded)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    with torch.cuda.graph(graph):
        block(recorded)
    for buffer in recorded.values():
        buffer.fill_(torch.nan)
    graph.replay()
    assert all(torch.isfinite(launched[name]).all() and torch.equal(launched[name], recorded[name]) for name in launched)
