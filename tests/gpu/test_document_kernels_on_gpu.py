"""Attention within documents and untrained targets on a CUDA GPU, real sizes and odd ones: as exact as the reference, the
same bits every time, whatever the other documents hold, and the same from a CUDA graph."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from handgrad.machine import devices
from handgrad.ops import cuda as kernels
from tests.documents import PACKINGS, document_starts
from tests.kernels import document_checks as checks
from tests.kernels.memory_checks import Draw, check, check_repeats, copy

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HEADS = [(12, 12, 64), (9, 3, 64), (16, 8, 128), (4, 2, 96), (3, 3, 24), (8, 2, 256)]  # H, K, D
TALKS = [[181, 22, 340, 97, 250, 134], [1024], [64] * 16, [3, 1021]]  # rows of 1024
LENGTHS = [*PACKINGS.values(), TALKS, [[500, 277], [777]], [[5, 19000, 1475]]]


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """No TF32 and no reduced-precision sums: neither in the kernels nor in the reference they are held against."""
    devices.set_arithmetic(torch.device("cuda"), "fp32")


@pytest.fixture(params=[BF16, FP16, FP32], ids=str)
def draw(request: pytest.FixtureRequest) -> Draw:
    return Draw(request.param, "cuda")


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("packing", range(len(LENGTHS)))
def test_attention(draw: Draw, packing: int, heads: tuple[int, int, int]) -> None:
    H, K, D = heads
    if sum(LENGTHS[packing][0]) > 4096:
        H, K = H // K, 1  # the reference's scores of one row take T^2 numbers per head
    case = checks.attention(draw, LENGTHS[packing], H, K, D)
    check(case, checks.terms(LENGTHS[packing], D))
    check_repeats(case)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [1, 17, 64, 512, 1000])
def test_attention_within_a_window(draw: Draw, window: int, heads: tuple[int, int, int]) -> None:
    """Of one document in a row of 1024 tokens, which cuDNN may compute, and of several."""
    for lengths in ([[1024], [1024]], [[1024], TALKS[0]]):
        case = checks.attention(draw, lengths, *heads, window)
        check(case, checks.terms([[window]], heads[2]))
        check_repeats(case)


@pytest.mark.parametrize(("H", "D"), [(12, 64), (4, 128), (3, 24), (2, 256)])
def test_attention_with_dropout(draw: Draw, H: int, D: int) -> None:
    case = checks.attention_with_dropout(draw, TALKS, H, D)
    check(case)
    check_repeats(case)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_document_sees_no_other(draw: Draw, heads: tuple[int, int, int]) -> None:
    checks.check_others(draw, TALKS, *heads)


@pytest.mark.parametrize("T", [1024, 333])
@pytest.mark.parametrize("heads", [(12, 12, 64), (9, 3, 64), (3, 3, 24)], ids=str)
def test_one_document_has_the_plain_bits(draw: Draw, T: int, heads: tuple[int, int, int]) -> None:
    checks.check_one_document(draw, 2, T, *heads)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_graph_reads_the_documents_of_its_replay(heads: tuple[int, int, int]) -> None:
    """Captured with one packing, replayed with another: allocates nothing and asks the host nothing."""
    inputs, run = checks.attention(Draw(BF16, "cuda"), TALKS, *heads)
    run(kernels, inputs)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(kernels, inputs, checked=False)
    inputs["starts"].copy_(document_starts(TALKS[::-1]))
    graph.replay()
    expected = run(kernels, copy(inputs))
    for name, result in found.items():
        assert torch.equal(result, expected[name]), name


@pytest.mark.parametrize("softcap", [0.0, 15.0])
@pytest.mark.parametrize(("N", "V", "Vp"), [(1024, 50257, 50304), (1024, 128256, 128256), (5, 2, 128), (37, 57, 128)])
def test_untrained_targets(draw: Draw, N: int, V: int, Vp: int, softcap: float) -> None:
    checks.check_untrained(draw, N, V, Vp, softcap)
    checks.check_weighted(draw, N, V, Vp, softcap)
