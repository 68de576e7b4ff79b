"""The memory-bound kernels in float32 by Triton's interpreter, where there is no GPU (tests/gpu has the same on one)."""

import math
import os
from types import ModuleType

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("a GPU runs tests/gpu/test_memory_kernels_on_gpu.py", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: it decides what @triton.jit makes of a kernel
pytest.importorskip("triton")

from handgrad import ops as contract
from handgrad.ops import reference, sizes
from tests.kernels import memory_checks as checks
from tests.kernels.memory_checks import Draw, both, case, check, kernels


@pytest.fixture
def draw() -> Draw:
    return Draw(torch.float32, "cpu")


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every program walks several blocks of rows, as at real sizes."""
    monkeypatch.setattr(sizes, "NORM_PROGRAMS", 3)
    monkeypatch.setattr(sizes, "LARGEST_SPLIT", 2)


@pytest.mark.parametrize(("N", "C"), [(1, 24), (7, 48), (33, 100), (5, 768), (3, 1600), (1, 2500)])
def test_layernorm_forward(draw: Draw, N: int, C: int) -> None:
    check(case(draw, "layernorm_forward", N=N, C=C))


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("below", [True, False])
@pytest.mark.parametrize(("N", "C"), [(1, 24), (7, 48), (101, 96), (33, 100), (15, 768), (8, 1600)])
def test_layernorm_backward(draw: Draw, N: int, C: int, below: bool) -> None:
    check(case(draw, "layernorm_backward", N=N, C=C, **({} if below else {"dbias_below_acc": None})))


def test_layernorm_backward_with_its_own_number_of_programs(draw: Draw) -> None:
    check(case(draw, "layernorm_backward", N=35, C=1040))


def test_the_bias_gradient_below_sums_what_was_stored(draw: Draw) -> None:
    checks.check_sums_of_what_was_stored(draw, 37, 48)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(("N", "O"), [(1, 24), (67, 100), (300, 96), (200, 300)])
def test_bias_backward(draw: Draw, N: int, O: int) -> None:
    check(case(draw, "bias_backward", N=N, F=O))


def test_bias_backward_with_its_own_split(draw: Draw) -> None:
    check(case(draw, "bias_backward", N=517, F=48))


@pytest.mark.parametrize(("N", "V", "Vp"), [(5, 2, 128), (3, 57, 128), (2, 128, 128), (2, 20011, 20096), (2, 16384, 16512)])
def test_classifier(draw: Draw, N: int, V: int, Vp: int) -> None:
    check(case(draw, "classifier_forward", N=N, V=V, Vp=Vp))
    check(case(draw, "classifier_forward_backward", N=N, V=V, Vp=Vp))


def test_classifier_survives_extreme_logits() -> None:
    logits = torch.tensor([[1e30, -1e30, 0.0, math.nan], [-1e4, 1e4, 0.0, math.nan]])
    losses, targets = torch.full((2,), math.nan), torch.tensor([0, 0])
    kernels.classifier_forward_backward(losses, logits, targets, torch.ones(1), vocab_size=3)
    assert losses.tolist() == [0.0, 2e4]
    assert logits.tolist() == [[0, 0, 0, 0], [-1, 1, 0, 0]]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_logit_reaches_the_loss(bad: float) -> None:
    logits = torch.zeros(2, 128)
    logits[1, 5] = bad
    losses, targets = torch.zeros(2), torch.tensor([3, 3])
    kernels.classifier_forward(losses, logits, targets, vocab_size=100)
    assert math.isfinite(losses[0]) and math.isnan(losses[1])


@pytest.mark.parametrize(("N", "F"), [(1, 77), (9, 31), (33, 300)])
def test_gelu(draw: Draw, N: int, F: int) -> None:
    for each in both(draw, "gelu", N=N, F=F):
        check(each)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # of the square, which is then capped
def test_gelu_at_the_ends() -> None:
    """Neither end overflows, and far to the left the value is tiny, not rounded away (torch gives 0 from -8 on)."""
    x = torch.tensor([[-3e38, -1e19, -100.0, -9.0, -0.0, 0.0, 9.0, 100.0, 1e19, 3e38]])
    out, slope = torch.full_like(x, math.nan), torch.ones_like(x)
    kernels.gelu_forward(out, x)
    kernels.gelu_backward(slope, x)
    assert out[0, [0, 1, 2, 4, 5]].tolist() == [0] * 5 and torch.equal(out[0, 6:], x[0, 6:])
    assert slope[0, [0, 1, 2, 4, 5]].tolist() == [0, 0, 0, 0.5, 0.5] and slope[0, 6:].tolist() == [1] * 4
    u = math.sqrt(2 / math.pi) * (-9 - 0.044715 * 729)
    assert out[0, 3].item() == pytest.approx(-9 / (1 + math.exp(-2 * u)), rel=1e-4)


TOKENS = {
    "few": torch.tensor([[0, 4, 4, 10, 1], [4, 4, 4, 4, 4], [2, 0, 9, 9, 3]]),
    "one position": torch.tensor([[3]]),
    "one token, parts of more than one tile": torch.full((4, 300), 5),
    "all different": torch.arange(70).flip(0).view(2, 35),
    "runs that end at borders": torch.tensor([1] * 32 + [2] * 64 + [3] * 31 + [4] * 33).view(4, 40),
    "Zipf": checks.zipf_tokens(101, 5, 77),
}


@pytest.mark.parametrize("name", TOKENS)
def test_embedding(draw: Draw, name: str) -> None:
    tokens, C, Vp = TOKENS[name], 24, 128
    checks.check_embedding(draw, tokens, C, Vp)


def test_embedding_of_more_channels_than_a_program_takes(draw: Draw) -> None:
    check(checks.embedding(draw, "embedding_backward", TOKENS["runs that end at borders"], 300, 8))


@pytest.mark.parametrize(("B", "T", "C"), [(1, 1, 8), (3, 37, 100), (2, 20, 768), (1, 3, 1600), (1, 2, 2500)])
def test_dropout(draw: Draw, B: int, T: int, C: int) -> None:
    checks.check_dropouts(draw, B, T, C)


def test_loss_sum() -> None:
    losses = torch.rand(20_011, generator=torch.Generator().manual_seed(0))
    total = torch.tensor([SENTINEL := 3.25], dtype=torch.float64)
    kernels.loss_sum(total, losses)
    assert abs(total.item() - SENTINEL - math.fsum(losses.tolist())) <= 1e-14 * total.item()


@pytest.mark.parametrize(
    ("blocks", "size", "last"),
    [(1, 1000, 1000), (3, 1000, 77), (3, 65536, 65536), (5, 8192, 8192), (3, 65536, 9001), (1, 65536, 1)],
)
def test_squared_norms(draw: Draw, blocks: int, size: int, last: int) -> None:
    check(checks.squared_norms(draw, blocks, size, last))


INF, NAN = math.inf, math.nan
STEPS = {  # (loss, norm of the scaled gradient, updates since the scale changed), limits, verdict
    "good": ((5.0, 64.0, 7), (INF, INF), contract.UPDATE),
    "clipped": ((5.0, 640.0, 7), (INF, INF), contract.UPDATE),
    "a loss of NaN": ((NAN, 64.0, 7), (INF, INF), contract.LOSS_NOT_FINITE),
    "an infinite loss and norm": ((INF, INF, 7), (INF, INF), contract.LOSS_NOT_FINITE),
    "an infinite norm": ((5.0, INF, 7), (INF, INF), contract.NORM_NOT_FINITE),
    "a norm of NaN": ((5.0, NAN, 7), (INF, INF), contract.NORM_NOT_FINITE),
    "a loss and norm past their limits": ((5.0, 64.0, 7), (4.0, 0.1), contract.LOSS_OUTLIER),
    "a norm past its limit": ((5.0, 64.0, 7), (6.0, 0.1), contract.NORM_OUTLIER),
    "good, and the scale grows": ((5.0, 64.0, contract.LOSS_SCALE_GROWTH_STEPS - 1), (6.0, 9.0), contract.UPDATE),
}


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("clip_norm", [0.0, 0.3, 3.0])  # the good step's norm is 1
@pytest.mark.parametrize("scale", [1.0, 64.0, 2.0**24])
@pytest.mark.parametrize("growth", [1, 3])  # of the step's tokens over the first step's
@pytest.mark.parametrize("name", STEPS)
def test_verdict(name: str, growth: int, scale: float, clip_norm: float, dynamic: bool) -> None:
    (loss, norm, good_steps), limits, code = STEPS[name]
    tokens = 3000
    norms = torch.rand(5003, generator=torch.Generator().manual_seed(2))
    norms *= norm * norm / norms.sum() * (growth * scale / 64.0) ** 2
    controls = torch.tensor([3.0, 1e-3, *limits, growth * tokens], dtype=torch.float64)
    total = torch.tensor([loss * growth * tokens], dtype=torch.float64)
    settings = {"gradient_tokens": tokens, "clip_norm": clip_norm, "dynamic_loss_scale": dynamic}

    def run(backend: ModuleType) -> tuple[torch.Tensor, torch.Tensor]:
        results = torch.full((contract.RESULTS,), math.nan, dtype=torch.float64)
        loss_scale = torch.tensor([scale / tokens, scale, float(good_steps)])
        backend.verdict(results, loss_scale, total, norms, controls, **settings)
        return results, loss_scale

    (found, found_scale), (expected, expected_scale) = run(kernels), run(reference)
    assert found[contract.RESULT_VERDICT] == code
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0, equal_nan=True)
    assert torch.equal(found_scale, expected_scale)


@pytest.mark.parametrize(("betas", "clip"), [((0.9, 0.95), 1.0), ((0.9, 0.999), 0.25), ((0.0, 0.99), 1.0)])
@pytest.mark.parametrize("elements", [37, 1037, 3 * 4096 + 128])
def test_adamw(draw: Draw, elements: int, betas: tuple[float, float], clip: float) -> None:
    check(checks.adamw(draw, elements, 4, betas=betas, clip=clip))


def test_adamw_publishes_rounded_weights() -> None:
    draw = Draw(torch.float32, "cpu")
    weight, m, gradient = (draw.normal(517) for _ in range(3))
    published = torch.full((517,), math.nan, dtype=torch.float16)  # the interpreter rounds fp16 properly, not bf16
    controls, results = torch.tensor([1.0, 1e-3, 0, 0]).double(), torch.tensor([1.0, 1, 1, 0, 1]).double()
    settings = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}
    kernels.adamw_update(published, weight, m, m.square(), gradient, controls, results, **settings)
    assert torch.equal(published, weight.half())


def test_adamw_does_not_depend_on_how_the_buffer_is_cut() -> None:
    draw = Draw(torch.float32, "cpu")
    whole = [draw.normal(3 * 1024 + 128) for _ in range(3)]
    whole.append(whole[0].square())
    parts = [b.clone() for b in whole]
    controls, results = torch.tensor([3.0, 1e-3, 0, 0]).double(), torch.tensor([1.0, 1, 0.5, 0, 1]).double()
    settings = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}
    for buffers in (whole, *([b[cut] for b in parts] for cut in (slice(0, 128), slice(128, 1024), slice(1024, None)))):
        w, m, g, v = buffers
        kernels.adamw_update(w, w, m, v, g, controls, results, **settings)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_adamw_on_bf16_rounds_as_the_reference_does(moments: torch.dtype) -> None:
    """The same random numbers; where the float32 updates differ in the last bit, a rounding may, once in thousands."""
    checks.check_stochastic_rounding("cpu" if not torch.cuda.is_available() else "cuda", moments=moments)
