"""The memory-bound kernels on a CUDA GPU, real sizes and odd ones: as exact as the reference, the same bits every time."""

import math
from types import ModuleType

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from handgrad import ops as contract
from handgrad.ops import reference
from tests.kernels import memory_checks as checks, reduction_checks
from tests.kernels.memory_checks import Draw, both, case, check_all, check_repeats, kernels

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
REAL = [(65536, 768), (16384, 1600)]
ODD = [(1, 24), (7, 48), (1031, 96), (333, 100)]
V, Vp = 50257, 50304


@pytest.fixture(params=[BF16, FP16, FP32], ids=str)
def draw(request: pytest.FixtureRequest) -> Draw:
    return Draw(request.param, "cuda")


@pytest.mark.parametrize(("N", "C"), REAL + ODD)
def test_layernorm_forward(draw: Draw, N: int, C: int) -> None:
    check_all(case(draw, "layernorm_forward", N=N, C=C))


@pytest.mark.parametrize("below", [True, False])
@pytest.mark.parametrize(("N", "C"), REAL + ODD)
def test_layernorm_backward(draw: Draw, N: int, C: int, below: bool) -> None:
    check_all(case(draw, "layernorm_backward", N=N, C=C, **({} if below else {"dbias_below_acc": None})))


@pytest.mark.parametrize(("N", "C"), REAL + ODD)
def test_the_bias_gradient_below_sums_what_was_stored(draw: Draw, N: int, C: int) -> None:
    checks.check_sums_of_what_was_stored(draw, N, C)


@pytest.mark.parametrize(("N", "O"), [(65536, 768), (65536, 3072), (16384, 4800), (16384, 6400), (1, 24), (1031, 100)])
def test_bias_backward(draw: Draw, N: int, O: int) -> None:
    check_all(case(draw, "bias_backward", N=N, F=O))


@pytest.mark.parametrize(("N", "V", "Vp"), [(1024, V, Vp), (5, 2, 128), (37, 57, 128), (3, 128, 128), (3, 16384, 16512)])
def test_classifier(draw: Draw, N: int, V: int, Vp: int) -> None:
    check_all(case(draw, "classifier_forward", N=N, V=V, Vp=Vp))
    check_all(case(draw, "classifier_forward_backward", N=N, V=V, Vp=Vp))


def test_classifier_past_two_to_the_31(draw: Draw) -> None:
    """The last rows of a buffer of more than 2^31 elements are those of a small one."""
    N = 2**31 // Vp + 100
    logits = torch.empty(N, Vp, dtype=draw.dtype, device="cuda")
    tail = draw.normal(50, Vp) * 4
    logits[:-50], logits[-50:] = 0, tail
    targets = torch.full((N,), 17, device="cuda")
    losses, small = torch.full((N,), math.nan, device="cuda"), torch.full((50,), math.nan, device="cuda")
    scale = torch.ones(1, device="cuda")
    kernels.classifier_forward_backward(losses, logits, targets, scale, vocab_size=V)
    kernels.classifier_forward_backward(small, tail, targets[:50], scale, vocab_size=V)
    assert torch.equal(logits[-50:], tail) and torch.equal(losses[-50:], small)


@pytest.mark.parametrize(("N", "F"), [(65536, 3072), (16384, 6400), (1, 77), (9, 31)])
def test_gelu(draw: Draw, N: int, F: int) -> None:
    for each in both(draw, "gelu", N=N, F=F):
        check_all(each)


EMBEDDINGS = {
    "124M": (checks.zipf_tokens(V, 64, 1024), 768, Vp),
    "1558M": (checks.zipf_tokens(V, 16, 1024), 1600, Vp),
    "one token": (torch.full((16, 1024), 5), 768, 128),
    "borders": (torch.tensor([1] * 32 + [2] * 64 + [3] * 31 + [4] * 33).view(4, 40), 100, 128),
    "one position": (torch.tensor([[3]]), 24, 128),
}


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embedding(draw: Draw, name: str) -> None:
    tokens, C, rows = EMBEDDINGS[name]
    checks.check_embedding(draw, tokens, C, rows)
    check_repeats(checks.embedding(draw, "embedding_backward", tokens, C, rows))


@pytest.mark.parametrize(("blocks", "size", "last"), [(1900, 65536, 65536), (3, 1000, 1000), (3, 65536, 9001)])
def test_squared_norms(blocks: int, size: int, last: int) -> None:
    draw = Draw(FP32, "cuda")
    check_all(checks.squared_norms(draw, blocks, size, last))


@pytest.mark.parametrize("backend", [reference, kernels], ids=["reference", "kernels"])
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("P", [*reduction_checks.ROWS, 64])
def test_tree_sum(backend: ModuleType, P: int, rounded: bool) -> None:
    draw = Draw(FP32, "cuda")
    for n in (*reduction_checks.SIZES, 96_000_000 // max(P, 32)):  # a check holds several copies of all rows
        reduction_checks.check_tree(backend, draw, P, n, rounded)
        if rounded:
            reduction_checks.check_tree(backend, draw, P, n, rounded, sent=True)
    reduction_checks.check_aliasing(backend, draw, P, rounded)
    reduction_checks.check_not_finite(backend, draw, rounded)
    for world in (2, 4, 8):
        reduction_checks.check_cuts(backend, draw, world, rounded)


@pytest.mark.parametrize("rounded", [False, True])
def test_tree_sums_of_both_backends_are_the_same(rounded: bool) -> None:
    rows = reduction_checks.different_sizes(Draw(FP32, "cuda"), 8, 1_000_003)
    found, expected = torch.empty(1_000_003, device="cuda"), torch.empty(1_000_003)
    kernels.tree_sum(found, rows, rounded=rounded)
    reference.tree_sum(expected, rows.cpu(), rounded=rounded)
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, torch.float64, torch.int64])
def test_checksum(dtype: torch.dtype) -> None:
    draw = Draw(FP32, "cuda")
    for n in (1, 131, 40_009):
        reduction_checks.check_checksum(kernels, draw, dtype, n)
    reduction_checks.check_checksum_sees(kernels, draw, dtype)
    flat = reduction_checks.numbers(draw, dtype, 20_000_003)
    found = {reduction_checks.checksum(kernels, flat) for _ in range(10)}
    assert found == {reduction_checks.checksum(reference, flat)}


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, torch.float64, torch.int64])
def test_digest(dtype: torch.dtype) -> None:
    draw = Draw(FP32, "cuda")
    for n, first in ((1, 0), (131, 4090), (40_009, 0), (9001, 70_000)):
        reduction_checks.check_digest(kernels, draw, dtype, n, first)
    reduction_checks.check_digest_sees(kernels, draw, dtype)
    flat = reduction_checks.numbers(draw, dtype, 20_000_003)
    found = {tuple(reduction_checks.digest(kernels, flat, first=64)) for _ in range(10)}
    assert found == {tuple(reduction_checks.digest(reference, flat.cpu(), first=64))}


@pytest.mark.parametrize("lanes", [1, 2, 3, 16, 64])
def test_losses_of_lanes_are_added_in_order(lanes: int) -> None:
    reduction_checks.check_losses_in_order(kernels, "cuda", lanes)


@pytest.mark.parametrize("N", [1, 65536, 70_001])
def test_loss_sum(N: int) -> None:
    losses = torch.rand(N, device="cuda") * 11
    exact = 3.25 + math.fsum(losses.tolist())
    totals = [torch.tensor([3.25], dtype=torch.float64, device="cuda") for _ in range(10)]
    for total in totals:
        kernels.loss_sum(total, losses)
    assert abs(totals[0].item() - exact) <= 1e-13 * exact and len({t.item() for t in totals}) == 1


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("clip_norm", [0.0, 0.3])
@pytest.mark.parametrize("loss", [5.0, math.nan, math.inf])
@pytest.mark.parametrize("norm", [0.2, 70.0, math.inf, math.nan])
@pytest.mark.parametrize("limits", [(math.inf, math.inf), (4.0, 0.1), (6.0, 0.1)])
@pytest.mark.parametrize("good_steps", [7, contract.LOSS_SCALE_GROWTH_STEPS - 1])
def test_verdict(
    loss: float, norm: float, limits: tuple[float, float], good_steps: int, clip_norm: float, dynamic: bool
) -> None:
    tokens, scale = 524288, 1024.0
    norms = torch.rand(24_000, device="cuda")
    norms *= (norm * scale) ** 2 / norms.sum()
    controls = torch.tensor([3.0, 1e-3, *limits, tokens], dtype=torch.float64, device="cuda")
    total = torch.tensor([loss * tokens], dtype=torch.float64, device="cuda")
    settings = {"gradient_tokens": tokens, "clip_norm": clip_norm, "dynamic_loss_scale": dynamic}
    found = []
    for backend in (kernels, reference, kernels):
        results = torch.full((contract.RESULTS,), math.nan, dtype=torch.float64, device="cuda")
        loss_scale = torch.tensor([scale / tokens, scale, float(good_steps)], device="cuda")
        backend.verdict(results, loss_scale, total, norms, controls, **settings)
        found.append((results.cpu(), loss_scale.cpu()))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-13, atol=0, equal_nan=True)
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(found[0][0].view(torch.int64), found[2][0].view(torch.int64))


@pytest.mark.parametrize(("betas", "clip"), [((0.9, 0.95), 1.0), ((0.9, 0.999), 0.25)])
@pytest.mark.parametrize("elements", [1037, 30_000_128])
def test_adamw(draw: Draw, elements: int, betas: tuple[float, float], clip: float) -> None:
    check_all(checks.adamw(draw, elements, 4, betas=betas, clip=clip))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_adamw_publishes_rounded_weights(dtype: torch.dtype) -> None:
    draw = Draw(FP32, "cuda")
    weight, m, gradient = (draw.normal(100_001) for _ in range(3))
    published = torch.full((100_001,), math.nan, dtype=dtype, device="cuda")
    controls = torch.tensor([1.0, 1e-3, 0, 0], dtype=torch.float64, device="cuda")
    results = torch.tensor([1.0, 1, 1, 0, 1], dtype=torch.float64, device="cuda")
    settings = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}
    kernels.adamw_update(published, weight, m, m.square(), gradient, controls, results, **settings)
    assert torch.equal(published, weight.to(dtype))


def test_a_captured_step_follows_its_buffers() -> None:
    """A recorded update reads learning rate, step and verdict when it is replayed, not when it was recorded."""
    draw = Draw(FP32, "cuda")
    start = [draw.normal(4096), draw.normal(4096), draw.normal(4096).square(), draw.normal(4096)]
    controls = torch.tensor([1.0, 1e-3, 0, 0], dtype=torch.float64, device="cuda")
    results = torch.tensor([1.0, 1, 1, 0, 1], dtype=torch.float64, device="cuda")
    settings = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}

    def update(w: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> None:
        kernels.adamw_update(w, w, m, v, g, controls, results, **settings)

    recorded, launched = [t.clone() for t in start], [t.clone() for t in start]
    update(*(t.clone() for t in start))  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update(*recorded)
    for step, code in ((1, 0.0), (2, 0.0), (3, 4.0), (3, 0.0)):
        controls[0], controls[1], results[3] = step, 1e-3 * step, code
        graph.replay()
        update(*launched)
    assert all(torch.equal(a, b) for a, b in zip(recorded, launched, strict=True))


def test_stochastic_rounding_as_the_reference_does_it() -> None:
    checks.check_stochastic_rounding("cuda")
