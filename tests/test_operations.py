"""Every operation's backward equals float64 autograd to 1e-10, at odd shapes, over NaN-filled outputs and sentinels."""

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from handgrad.ops import (
    CONTROL_LEARNING_RATE,
    CONTROL_STEP,
    CONTROLS,
    LOSS_NOT_FINITE,
    LOSS_OUTLIER,
    LOSS_SCALE_GROWTH_STEPS,
    NORM_NOT_FINITE,
    NORM_OUTLIER,
    RESULT_SCALE,
    RESULT_VERDICT,
    RESULTS,
    UPDATE,
    cases,
    cpu,
    reference,
)
from handgrad.ops.cases import SENTINEL
from handgrad.ops.reference.optimizer import round_stochastically


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def nan(*shape: int) -> Tensor:
    return torch.full(shape, math.nan, dtype=torch.float64)


def accumulator(like: Tensor) -> Tensor:
    return torch.full_like(like, SENTINEL)


def close(found: Tensor, expected: Tensor) -> None:
    error = (found - expected).norm() / expected.norm().clamp_min(1e-300)
    assert torch.isfinite(found).all() and error <= 1e-10, f"relative error {error:.3g}"


def gradients(output: Tensor, dout: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output, inputs, dout)


@pytest.fixture(params=[reference, cpu], ids=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


def equal_autograd(
    ops: ModuleType, backward: str, definition: Callable[..., dict[str, Tensor]], **changes: Any
) -> cases.BothWays:
    """Both ways equal `definition`, which takes the arguments of the forward and gives what that writes, by name. What an
    operation reads keeps its bits."""
    ran = cases.both_ways(ops, backward, cases.Draw(torch.float64), **changes)
    leaves = {of: ran.before[of].clone().requires_grad_() for of in ran.of_inputs if ran.before[of] is not None}
    expected = definition(**(ran.before | leaves))
    for name, tensor in expected.items():
        close(ran.after[name], tensor.detach())
    outputs = [expected[name] for name in ran.of_outputs]
    douts = [dout.expand_as(output) for output, dout in zip(outputs, ran.of_outputs.values(), strict=True)]
    for of, gradient in zip(leaves, torch.autograd.grad(outputs, [*leaves.values()], douts), strict=True):
        close(ran.of_inputs[of], gradient)
    forward = ran.before, ran.after, cases.PAIRS[backward].forward
    for before, after, operation in (forward, (ran.backward_before, ran.backward_after, backward)):
        read = cases.TENSOR.findall(cases.CALLS[operation].partition("<-")[2])
        names = [name for name, _, _ in read if before[name] is not None and not name.endswith("_acc")]
        assert all(torch.equal(before[name], after[name]) for name in names)
    return ran


TOKENS = torch.tensor([[0, 4, 4, 10, 1], [4, 4, 4, 4, 4], [2, 0, 9, 9, 3]])  # repeats, within and across samples


def test_embedding(ops: ModuleType) -> None:
    """The table has three positions more than the rows."""

    def definition(wte: Tensor, wpe: Tensor, **_: Any) -> dict[str, Tensor]:
        return {"out": (wte[TOKENS] + wpe[:5]).view(15, 7)}

    sizes = {"B": 3, "T": 5, "C": 7, "Vp": 11, "M": 8}
    ran = equal_autograd(ops, "embedding_backward", definition, **sizes, tokens=TOKENS)
    assert torch.equal(ran.after["out"], definition(**ran.before)["out"])


@pytest.mark.parametrize(("N", "C"), [(1, 3), (7, 13), (33, 64)])
def test_layernorm(ops: ModuleType, N: int, C: int) -> None:
    def definition(inp: Tensor, weight: Tensor, bias: Tensor, **_: Any) -> dict[str, Tensor]:
        mean = inp.mean(1)
        rstd = (inp.var(1, correction=0) + 1e-5).rsqrt()
        return {"out": (inp - mean[:, None]) * rstd[:, None] * weight + bias, "mean": mean, "rstd": rstd}

    after = equal_autograd(ops, "layernorm_backward", definition, N=N, C=C).backward_after
    close(after["dbias_below_acc"] - SENTINEL, after["dresidual_inout"].sum(0))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("N", "inputs", "outputs"), [(1, 1, 1), (5, 3, 7), (17, 40, 1300)])
def test_linear(ops: ModuleType, N: int, inputs: int, outputs: int, bias: bool) -> None:
    def definition(inp: Tensor, weight: Tensor, bias: Tensor | None, **_: Any) -> dict[str, Tensor]:
        return {"out": inp @ weight.t() + (0 if bias is None else bias)}

    absent = {} if bias else {"bias": None, "dbias_acc": None}
    equal_autograd(ops, "linear_backward", definition, N=N, C=inputs, F=outputs, **absent)


def test_float32_products_are_float32(ops: ModuleType) -> None:
    """The float32 path of a CPU, past one block of weight-gradient rows, within the probabilistic rounding bound of an
    inner product of K terms, 4 sqrt(K) u |x| |w| with u = 2^-24 (Higham & Mary 2019): TF32 or bf16 would exceed it."""
    N, I, O = 37, 65, 2500
    generator = torch.Generator().manual_seed(0)
    inp, weight, dout, bias = (torch.randn(*s, generator=generator) for s in ((N, I), (O, I), (N, O), (O,)))
    out, dinp, dweight_acc = torch.full((N, O), math.nan), torch.full((N, I), math.nan), torch.full((O, I), SENTINEL)
    ops.linear_forward(out, inp, weight, bias)
    ops.linear_backward(dinp, dweight_acc, None, dout, inp, weight)
    x, w, dy = inp.double(), weight.double(), dout.double()
    for found, a, b, added in (
        (out, x, w.t(), bias.double()),
        (dinp, dy, w, torch.zeros((), dtype=torch.float64)),
        (dweight_acc, dy.t(), x, torch.tensor(SENTINEL, dtype=torch.float64)),
    ):
        bound = 4 * math.sqrt(a.shape[1]) * 2**-24 * (a.abs() @ b.abs() + added.abs())
        assert ((found - (a @ b + added)).abs() <= bound).all()


def test_gelu(ops: ModuleType) -> None:
    def definition(inp: Tensor, **_: Any) -> dict[str, Tensor]:
        u = math.sqrt(2 / math.pi) * (inp + 0.044715 * inp**3)
        return {"out": 0.5 * inp * (1 + torch.tanh(u))}

    equal_autograd(ops, "gelu_backward", definition, N=9, F=31)


def test_residual(ops: ModuleType) -> None:
    a, b, out = randn(4, 6), randn(4, 6, seed=1), nan(4, 6)
    ops.residual_forward(out, a, b)
    assert torch.equal(out, a + b)


@pytest.mark.parametrize(("B", "T", "H", "D"), [(1, 1, 1, 1), (2, 7, 3, 5), (3, 65, 2, 16)])
def test_attention(ops: ModuleType, B: int, T: int, H: int, D: int) -> None:
    def definition(qkv: Tensor, **_: Any) -> dict[str, Tensor]:
        q, k, v = qkv.view(B, T, 3, H, D).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(D)
        scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B * T, H * D)
        return {"out": y, "lse": scores.logsumexp(-1)}

    equal_autograd(ops, "attention_backward", definition, B=B, T=T, H=H, D=D)


def test_attention_sees_no_later_token(ops: ModuleType) -> None:
    B, T, H, D = 1, 9, 2, 4
    qkv, out, lse = randn(T, 3 * H * D), nan(T, H * D), nan(B, H, T)
    ops.attention_forward(out, lse, qkv)
    before = out.clone()
    qkv[6:] += 1
    ops.attention_forward(out, lse, qkv)
    assert torch.equal(out[:6], before[:6]) and not torch.equal(out[6:], before[6:])


def test_attention_decode_equals_attention(ops: ModuleType) -> None:
    """Two sequences, the second three tokens behind the first; what was never written is not read."""
    B, T, H, D = 2, 11, 3, 4
    qkv, out, lse = randn(B * T, 3 * H * D), nan(B * T, H * D), nan(B, H, T)
    ops.attention_forward(out, lse, qkv)
    keys, values = nan(B, H, T + 2, D), nan(B, H, T + 2, D)
    step = nan(B, H * D)
    behind = torch.tensor([0, 3])
    for position in range(T + 3):
        positions = torch.tensor([position, position]).sub(behind).clamp(0, T - 1)
        rows = qkv.view(B, T, -1)[torch.arange(B), positions]
        ops.decode.attention_decode(step, keys, values, rows, positions)
        close(step, out.view(B, T, -1)[torch.arange(B), positions])


@pytest.mark.parametrize(("N", "V", "Vp"), [(1, 2, 128), (9, 57, 128), (5, 128, 128)])
def test_classifier(ops: ModuleType, N: int, V: int, Vp: int) -> None:
    check_classifier(ops, N, V, Vp, lambda logits: logits)


def check_classifier(
    ops: ModuleType, N: int, V: int, Vp: int, capped: Callable[[Tensor], Tensor], **options: float
) -> None:
    """The padded columns are NaN before. `capped`: the function that `options` name."""

    def definition(logits_to_dlogits_inout: Tensor, targets: Tensor, **_: Any) -> dict[str, Tensor]:
        return {"losses": F.cross_entropy(capped(logits_to_dlogits_inout[:, :V]), targets, reduction="none")}

    ran = equal_autograd(ops, "classifier_forward_backward", definition, N=N, V=V, Vp=Vp, **options)
    assert (ran.of_inputs["logits_to_dlogits_inout"][:, V:] == 0).all(), (
        "the padded vocabulary must have no gradient at all"
    )
    losses, logits = nan(N), ran.before["logits_to_dlogits_inout"]
    found = logits.clone()
    ops.classifier_forward(losses, found, ran.before["targets"], vocab_size=V, **options)
    assert torch.equal(losses, ran.after["losses"])
    assert torch.equal(found[:, :V], logits[:, :V]), "a loss alone leaves the logits as they are"


def test_classifier_survives_extreme_logits(ops: ModuleType) -> None:
    logits = torch.tensor([[1e30, -1e30, 0.0, math.nan], [-1e4, 1e4, 0.0, math.nan]], dtype=torch.float64)
    losses = nan(2)
    one = torch.ones(1, dtype=torch.float64)
    ops.classifier_forward_backward(losses, logits, torch.tensor([0, 0]), vocab_size=3, scale=one)
    assert losses.tolist() == [0.0, 2e4]
    assert torch.isfinite(logits).all()


def test_squared_norms_do_not_depend_on_neighbours(ops: ModuleType) -> None:
    flat = torch.randn(8 * 1000 - 300, generator=torch.Generator().manual_seed(0))
    whole, part, last = (torch.full((blocks,), math.nan) for blocks in (8, 2, 1))
    ops.squared_norms(whole, flat, block_elements=1000)
    ops.squared_norms(part, flat[2000:4000], block_elements=1000)
    ops.squared_norms(last, flat[7000:], block_elements=1000)
    assert torch.equal(whole[2:4], part), "a block's sum must be the same wherever the block lies"
    assert torch.equal(whole[7:], last), "a short block's, too"
    torch.testing.assert_close(whole.sum(), flat.double().square().sum().float())


def told(step: int, learning_rate: float, scale: float, verdict: int = UPDATE) -> tuple[Tensor, Tensor]:
    """`controls` and `results` of a step, as the update reads them."""
    controls, results = torch.zeros(CONTROLS, dtype=torch.float64), torch.zeros(RESULTS, dtype=torch.float64)
    controls[CONTROL_STEP], controls[CONTROL_LEARNING_RATE] = step, learning_rate
    results[RESULT_SCALE], results[RESULT_VERDICT] = scale, verdict
    return controls, results


VERDICTS = [
    # sum of losses, gradient, loss limit, norm limit, verdict
    (30.0, 2.0, math.inf, math.inf, UPDATE),
    (30.0, 2.0, 3.0, 4.0, UPDATE),
    (30.0, 2.0, 2.9, math.inf, LOSS_OUTLIER),
    (30.0, 2.0, math.inf, 3.9, NORM_OUTLIER),
    (math.nan, 2.0, math.inf, math.inf, LOSS_NOT_FINITE),
    (30.0, math.inf, math.inf, math.inf, NORM_NOT_FINITE),
    (math.inf, math.nan, math.inf, math.inf, LOSS_NOT_FINITE),
]


@pytest.mark.parametrize("scale", [1.0, 8.0])
@pytest.mark.parametrize(("sum_of_losses", "gradient", "loss_limit", "norm_limit", "expected"), VERDICTS)
def test_verdict(
    ops: ModuleType,
    sum_of_losses: float,
    gradient: float,
    loss_limit: float,
    norm_limit: float,
    expected: int,
    scale: float,
) -> None:
    """Four gradients of 2 have the norm 4, ten tokens' losses of 30 in all the mean 3; a loss scale changes neither."""
    controls, results = torch.tensor([5, 1e-3, loss_limit, norm_limit, 10], dtype=torch.float64), nan(RESULTS)
    partials = torch.tensor([2 * (gradient * scale) ** 2, 2 * (gradient * scale) ** 2])
    loss_scale = torch.tensor([scale / 10, scale, 7.0])
    before = loss_scale.clone()
    losses = torch.tensor([sum_of_losses], dtype=torch.float64)
    settings = {"gradient_tokens": 10, "clip_norm": 1.0}
    ops.verdict(results, loss_scale, losses, partials, controls, dynamic_loss_scale=False, **settings)
    assert results[RESULT_VERDICT] == expected and torch.equal(loss_scale, before)
    if expected == UPDATE:
        assert results.tolist() == [3.0, 4.0, 0.25 / scale, UPDATE, scale]
    ops.verdict(results, loss_scale, losses, partials, controls, dynamic_loss_scale=True, **settings)
    halved = torch.tensor([max(1.0, scale / 2) / 10, max(1.0, scale / 2), 0.0])
    counted = torch.tensor([scale / 10, scale, 8.0 if expected == UPDATE else 7.0])
    assert torch.equal(loss_scale, halved if expected == NORM_NOT_FINITE else counted)


def test_the_lanes_losses_are_added_one_by_one(ops: ModuleType) -> None:
    """Without the compensation that Python's own sum has, as a GPU adds them."""
    results, losses = nan(RESULTS), torch.tensor([1e16, 1.0, -1e16, 3.0], dtype=torch.float64)
    controls = torch.tensor([1, 0, math.inf, math.inf, 2], dtype=torch.float64)
    settings = {"gradient_tokens": 2, "clip_norm": 0.0, "dynamic_loss_scale": False}
    ops.verdict(results, torch.ones(3), losses, torch.ones(1), controls, **settings)
    assert results[0] == 1.5


@pytest.mark.parametrize(("clip_norm", "factor"), [(8.0, 1.0), (4.0, 1.0), (3.0, 0.75), (0.0, 1.0)])
def test_clipping_scales_down_only(ops: ModuleType, clip_norm: float, factor: float) -> None:
    """A gradient of norm 4; 0 is no limit."""
    results, loss_scale, one = nan(RESULTS), torch.ones(3), torch.ones(1, dtype=torch.float64)
    controls = torch.tensor([1, 1e-3, math.inf, math.inf, 1], dtype=torch.float64)
    settings = {"gradient_tokens": 1, "clip_norm": clip_norm, "dynamic_loss_scale": False}
    ops.verdict(results, loss_scale, one, torch.tensor([7.0, 9.0]), controls, **settings)
    assert results[RESULT_SCALE] == factor


def test_the_loss_scale_grows_after_so_many_good_steps(ops: ModuleType) -> None:
    results, controls = nan(RESULTS), torch.tensor([1, 0, math.inf, math.inf, 2], dtype=torch.float64)
    loss_scale, one = torch.tensor([1.0, 4.0, LOSS_SCALE_GROWTH_STEPS - 2]), torch.ones(1, dtype=torch.float64)
    for expected in (4.0, 8.0, 8.0):
        settings = {"gradient_tokens": 2, "clip_norm": 0.0, "dynamic_loss_scale": True}
        ops.verdict(results, loss_scale, one, torch.ones(1), controls, **settings)
        assert loss_scale[1] == expected and loss_scale[0] == expected / 2
    assert loss_scale[2] == 1.0


@pytest.mark.parametrize(("scale", "norm", "end"), [(2.0**23, 1, 2.0**24), (2.0**24, 1, 2.0**24), (1.0, math.inf, 1.0)])
def test_the_loss_scale_stays_between_its_ends(ops: ModuleType, scale: float, norm: float, end: float) -> None:
    """It doubles up to 2^24, and halves down to 1."""
    results, controls = nan(RESULTS), torch.tensor([1, 0, math.inf, math.inf, 1], dtype=torch.float64)
    loss_scale, one = torch.tensor([scale, scale, LOSS_SCALE_GROWTH_STEPS - 1]), torch.ones(1, dtype=torch.float64)
    settings = {"gradient_tokens": 1, "clip_norm": 0.0}
    ops.verdict(results, loss_scale, one, torch.tensor([norm]), controls, **settings, dynamic_loss_scale=True)
    assert loss_scale.tolist() == [end, end, 0.0]


@pytest.mark.parametrize("clip", [1.0, 0.25])
def test_adamw(ops: ModuleType, clip: float) -> None:
    n = 1037
    w, m, v, g = randn(n), randn(n, seed=1) * 0.1, randn(n, seed=2).square() * 0.1, randn(n, seed=3)
    lr, beta1, beta2, eps, decay, step = 3e-3, 0.9, 0.95, 1e-8, 0.1, 7
    scaled = g * clip
    m2 = beta1 * m + (1 - beta1) * scaled
    v2 = beta2 * v + (1 - beta2) * scaled**2
    root = (v2 / (1 - beta2**step)).sqrt() + eps
    expected = (1 - lr * decay) * w - lr * (m2 / (1 - beta1**step)) / root
    settings = {"beta1": beta1, "beta2": beta2, "epsilon": eps, "weight_decay": decay}
    before, published = w.clone(), torch.full((n,), math.nan)
    ops.adamw_update(published, w, m, v, g, *told(step, lr, clip, verdict=NORM_OUTLIER), **settings)
    assert torch.equal(w, before) and published.isnan().all(), "a verdict against the update leaves everything alone"
    ops.adamw_update(published, w, m, v, g, *told(step, lr, clip), **settings)
    assert torch.equal(published, w.float())
    close(w, expected)
    close(m, m2)
    close(v, v2)


def test_adamw_does_not_depend_on_how_the_buffer_is_cut(ops: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    buffers = [torch.randn(3 * 1024 + 131, generator=generator) for _ in range(3)]
    buffers.append(torch.rand(3 * 1024 + 131, generator=generator))
    whole, parts = [b.clone() for b in buffers], [b.clone() for b in buffers]
    settings = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8}

    def update(w: Tensor, m: Tensor, g: Tensor, v: Tensor) -> None:
        ops.adamw_update(w, w, m, v, g, *told(3, 1e-3, 0.5), weight_decay=0.1, **settings)

    update(*whole)
    for cut in (slice(0, 128), slice(128, 1024), slice(1024, 2944), slice(2944, None)):
        update(*[b[cut] for b in parts])
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_bf16_weights_are_rounded_up_and_down_with_the_right_chances(ops: ModuleType) -> None:
    """Only to the two neighbours, the mean within five deviations of the float32, keyed by place, step and seed."""
    n = 1 << 16
    exact = torch.full((n,), 1.0 + 2**-9 + 2**-11)  # 5/16 of the way from 1 to the next bf16, 1 + 2^-7
    settings = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.0}

    def updated(step: int = 1, seed: int = 0, cut: int = 0) -> Tensor:
        rounded = torch.empty(n - cut, dtype=torch.bfloat16)
        round_stochastically(rounded, exact[cut:], step, seed, cut)
        return rounded

    first = updated()
    assert set(first.unique().tolist()) == {1.0, 1.0 + 2**-7}
    share = (first > 1).double().mean().item()
    assert abs(share - 5 / 16) < 5 * math.sqrt(5 / 16 * 11 / 16 / n)
    assert torch.equal(updated(), first) and torch.equal(updated(cut=384), first[384:])
    for other in (updated(step=2), updated(seed=1)):
        assert 0.3 < (other != first).double().mean() < 0.56, "independent draws differ with chance 2 * 5/16 * 11/16 = 0.43"
    # An update of zero length rounds nothing: a bf16 number is its own neighbour.
    weight, moments = torch.randn(256).bfloat16(), [torch.zeros(256) for _ in range(3)]
    before = weight.clone()
    ops.adamw_update(weight, weight, *moments, *told(1, 0.0, 1.0), **settings)
    assert torch.equal(weight, before)
    # And infinities stay what they are.
    wild = torch.tensor([math.inf, -math.inf])
    round_stochastically(weight[:2], wild, 1, 0, 0)
    assert torch.equal(weight[:2].float(), wild)
    # As do the largest NaN, and a mean of the smallest numbers.
    round_stochastically(weight, torch.full((256,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32), 1, 0, 0)
    assert weight.isnan().all()
    round_stochastically(weight, torch.full((256,), 0x18000, dtype=torch.int32).view(torch.float32), 1, 0, 0)
    assert sorted(weight.view(torch.int16).unique().tolist()) == [1, 2]
