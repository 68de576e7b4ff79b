"""Tensors in fp8: rounding against tables made from the formats' definitions, scales against trying every exponent, and
products against float64 of the numbers that the codes stand for."""

import math
from collections import deque
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from handgrad.joins.fp8 import reference as ops
from handgrad.joins.fp8.formats import (
    AMAX,
    CLIPPED,
    COUNTING,
    E4M3,
    E5M2,
    INVERSE,
    LARGEST_EXPONENT,
    MARGIN,
    REPORT_PLACES,
    SATURATED,
    SATURATED_STEPS,
    SCALE,
    SCALING_PLACES,
    STATISTICS_PLACES,
    USED_SCALE,
    VANISHED,
    Quantized,
    largest_scale,
)
from handgrad.ops import CONTROL_STEP, CONTROLS

LARGEST = {E4M3: 448.0, E5M2: 57344.0}
BOTH = pytest.mark.parametrize("kind", [E4M3, E5M2], ids=["e4m3", "e5m2"])
BF16_ROUNDOFF, FLOAT32_ROUNDOFF = 2.0**-8, 2.0**-24


@cache
def magnitudes(kind: torch.dtype) -> Tensor:
    """The values of the codes 0, 1, 2, ... up to the largest number, by the format's definition (float64)."""
    mantissa_bits, bias = {E4M3: (3, 7), E5M2: (2, 15)}[kind]
    values = []
    for code in range(128):
        exponent, mantissa = code >> mantissa_bits, (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
        values.append(math.ldexp(1 + mantissa, exponent - bias) if exponent else math.ldexp(mantissa, 1 - bias))
        if values[-1] == LARGEST[kind]:
            return torch.tensor(values, dtype=torch.float64)
    raise AssertionError("the format has no such number")


def nearest_codes(x: Tensor, kind: torch.dtype) -> Tensor:
    """The codes (without sign) of the numbers next to x (float64, no NaN): of two as near, the even one."""
    values = magnitudes(kind)
    size = x.abs()
    below = torch.searchsorted(values, size, right=True) - 1
    above = (below + 1).clamp(max=len(values) - 1)
    down, up = size - values[below], values[above] - size
    code = torch.where((up < down) | ((up == down) & (below % 2 == 1)), above, below)
    return torch.where(size >= values[-1], len(values) - 1, code)


def make(
    rows: int, columns: int, kind: torch.dtype, scale: float = 1.0, *, forms: str = "rows columns", **rest
) -> Quantized:
    """A tensor (rows, columns) to be filled: NaN in its forms and in its part of the statistics."""
    scaling = torch.zeros(SCALING_PLACES)
    scaling[SCALE], scaling[INVERSE], scaling[COUNTING] = scale, 1 / scale, 1.0
    statistics = torch.zeros(STATISTICS_PLACES, 2)
    statistics[:, 0] = math.nan
    sizes = {"rows": (rows, columns), "columns": (columns, rows)}
    made = {n: torch.full(size, math.nan).to(kind) if n in forms.split() else None for n, size in sizes.items()}
    return Quantized(made["rows"], made["columns"], scaling, statistics, **rest)


def quantized(inp: Tensor, kind: torch.dtype, scale: float = 1.0, **settings) -> Quantized:
    out = make(*inp.shape, kind, scale, **settings)
    ops.quantize(out, inp)
    return out


def value(tensor: Quantized) -> Tensor:
    """(N, C) float64: what the codes stand for."""
    form = tensor.rows if tensor.rows is not None else tensor.columns.t()
    return form.double() * tensor.scaling[INVERSE].double()


def bits(form: Tensor) -> Tensor:
    return form.view(torch.uint8)


def same(found: Quantized, expected: Quantized) -> None:
    for a, b in ((found.rows, expected.rows), (found.columns, expected.columns)):
        assert (a is None) == (b is None) and (a is None or torch.equal(bits(a), bits(b)))
    assert torch.equal(found.statistics, expected.statistics) and torch.equal(found.scaling, expected.scaling)


def every_bf16_number() -> Tensor:
    """(256, 256): all of them, with subnormals, infinities, NaN and the negative zero."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Rounding.


@BOTH
@pytest.mark.parametrize("exponent", [0, 7, -13, 100, -100])
def test_every_bf16_number_becomes_the_nearest_one(kind: torch.dtype, exponent: int) -> None:
    """Ties to the even code; what is too large, and infinities, become the largest number; NaN stays NaN."""
    inp = every_bf16_number()
    out = quantized(inp, kind, 2.0**exponent)
    assert out.rows is not None and out.columns is not None
    assert torch.equal(bits(out.columns), bits(out.rows).t()), "columns are the same numbers, transposed"
    nan = inp.isnan()
    assert torch.equal(out.rows.float().isnan(), nan)
    expected = nearest_codes(inp.double()[~nan] * 2.0**exponent, kind) + 128 * inp[~nan].signbit()
    assert torch.equal(bits(out.rows)[~nan].long(), expected)


@BOTH
@pytest.mark.parametrize("forms", ["rows", "columns"])
def test_only_the_forms_that_are_wanted_are_written(kind: torch.dtype, forms: str) -> None:
    inp = randn(5, 3)
    both, one = quantized(inp, kind), quantized(inp, kind, forms=forms)
    expected, found = getattr(both, forms), getattr(one, forms)
    assert torch.equal(bits(found), bits(expected)) and torch.equal(one.statistics, both.statistics)


@BOTH
@pytest.mark.parametrize("exponent", [0, 5, -9])
def test_statistics_are_what_counting_one_by_one_finds(kind: torch.dtype, exponent: int) -> None:
    inp = every_bf16_number()
    finite = inp.double()[~inp.isnan()] * 2.0**exponent
    codes = nearest_codes(finite, kind)
    clipped = sum(abs(x) > LARGEST[kind] for x in finite.tolist())
    vanished = sum(x != 0 and code == 0 for x, code in zip(finite.tolist(), codes.tolist(), strict=True))
    out = quantized(inp, kind, 2.0**exponent)
    assert out.statistics[:, 0].tolist() == [math.inf, clipped, vanished] and min(clipped, vanished) > 1000
    assert (out.statistics[:, 1] == 0).all(), "a part that is not used stays 0"
    without = inp[inp.isfinite()].view(-1, 2)
    assert quantized(without, kind).statistics[AMAX, 0] == torch.finfo(torch.bfloat16).max, "the amax knows no NaN"


def test_numbers_are_counted_only_where_the_scaling_says_so() -> None:
    out = make(4, 4, E4M3, 2.0**30)
    out.scaling[COUNTING] = 0.0
    ops.quantize(out, torch.full((4, 4), 3.0, dtype=torch.bfloat16))
    assert out.statistics[:, 0].tolist() == [3.0, 0.0, 0.0]


# Scales.


def largest_scales(amax: Tensor, kind: torch.dtype, margin: int) -> Tensor:
    """By trying: the largest power of two for which amax * scale * 2^margin is a number of the format, or smaller."""
    scales = torch.arange(-100, 101, dtype=torch.float64).exp2()
    fits = amax.double().unsqueeze(1) * scales * 2.0**margin <= LARGEST[kind]
    return torch.where(fits, scales, scales[0]).amax(1).float()


@BOTH
@pytest.mark.parametrize("margin", [0, 1, 3])
def test_a_scale_is_the_largest_that_clips_nothing(kind: torch.dtype, margin: int) -> None:
    positive = every_bf16_number().flatten()[1:0x7F80]
    around = torch.tensor([1.75, 1.75 + 2**-20, 1.75 - 2**-20, 1.0, 2.0 - 2**-22, 1.25e-40]).double()
    amax = torch.cat([positive.double(), around])
    scaling, report = torch.zeros(len(amax), SCALING_PLACES), torch.zeros(len(amax), REPORT_PLACES, dtype=torch.float64)
    scaling[:, MARGIN] = margin
    totals = torch.stack([amax, torch.zeros_like(amax), torch.zeros_like(amax)], 1)
    exponents = torch.full((len(amax),), LARGEST_EXPONENT[kind], dtype=torch.int32)
    controls, settings = torch.ones(CONTROLS), {"count_every": 1, "saturation_steps": 9, "widen": False}
    ops.update_scaling(scaling, torch.zeros(len(amax), 1), totals, report, exponents, controls, **settings)
    expected = largest_scales(amax.float(), kind, margin)
    assert torch.equal(scaling[:, SCALE], expected) and torch.equal(scaling[:, INVERSE], 1 / expected)
    assert [largest_scale(number, kind, margin) for number in amax.float().tolist()] == expected.tolist(), "on the host"


@BOTH
def test_a_current_scale_is_made_from_the_tensor_itself(kind: torch.dtype) -> None:
    for seed, size in enumerate((1e-3, 1.0, 1e5)):
        inp = randn(7, 9, seed=seed) * size
        scale = largest_scales(inp.abs().max().view(1), kind, 0).item()
        same(quantized(inp, kind, 0.125, current=True), quantized(inp, kind, scale))
    for amax in (0.0, math.inf):
        assert quantized(torch.full((2, 2), amax), kind, 0.125, current=True).scaling[SCALE] == 0.125, "it keeps its scale"


@pytest.mark.parametrize("widen", [False, True])
@pytest.mark.parametrize(("window", "count_every", "saturation_steps"), [(1, 1, 1), (4, 3, 2), (7, 5, 3)])
def test_scales_follow_the_window(window: int, count_every: int, saturation_steps: int, widen: bool) -> None:
    """Thirty steps of three tensors against a model that keeps the last amax of each in a list."""
    kinds = [E4M3, E5M2, E4M3]
    generator = torch.Generator().manual_seed(window)
    scaling, history = torch.zeros(3, SCALING_PLACES), torch.zeros(3, window)
    scaling[:, [SCALE, INVERSE]] = 1.0
    report = torch.full((3, REPORT_PLACES), math.nan, dtype=torch.float64)
    exponents = torch.tensor([LARGEST_EXPONENT[kind] for kind in kinds], dtype=torch.int32)
    scale, margin, in_a_row = [1.0] * 3, [0] * 3, [0] * 3
    recent: list[deque] = [deque(maxlen=window) for _ in kinds]
    seen_saturated = 0
    for step in range(1, 31):
        totals = torch.rand(3, STATISTICS_PLACES, generator=generator, dtype=torch.float64) * 100
        totals[:, AMAX] = (torch.randn(3, generator=generator) * 6).exp2()  # so wide that some are above the limit
        if step in (5, 12):
            totals[0, AMAX], totals[1, AMAX] = 0.0, math.inf
        if step in range(14, 25):
            totals[2, AMAX] = 8.0**step  # faster than any window follows
        found = totals.clone()
        controls = torch.zeros(CONTROLS, dtype=torch.float64)
        controls[CONTROL_STEP] = step
        settings = {"count_every": count_every, "saturation_steps": saturation_steps, "widen": widen}
        ops.update_scaling(scaling, history, totals, report, exponents, controls, **settings)
        assert (totals == 0).all(), "the next step begins with nothing"
        for n, kind in enumerate(kinds):
            amax = found[n, AMAX].float().item()
            in_a_row[n] = in_a_row[n] + 1 if amax * scale[n] > LARGEST[kind] else 0
            seen_saturated += in_a_row[n] >= saturation_steps
            assert report[n, :STATISTICS_PLACES].tolist() == found[n].tolist()
            assert report[n, [USED_SCALE, SATURATED]].tolist() == [scale[n], in_a_row[n]]
            if widen and in_a_row[n] >= saturation_steps:
                margin[n], in_a_row[n] = margin[n] + 1, 0
            recent[n].append(amax if math.isfinite(amax) else 0.0)
            if max(recent[n]) > 0:
                scale[n] = largest_scales(torch.tensor([max(recent[n])]), kind, margin[n]).item()
            counting = float((step + 1) % count_every == 0)
            expected = {SCALE: scale[n], INVERSE: 1 / scale[n], COUNTING: counting, MARGIN: margin[n]}
            expected[SATURATED_STEPS] = in_a_row[n]
            assert scaling[n, list(expected)].tolist() == list(expected.values()), f"step {step}, tensor {n}"
    assert seen_saturated >= 2 and (max(margin) > 0) == widen


def test_statistics_are_folded_into_the_totals() -> None:
    statistics, totals = randn(4, 3, 5, dtype=torch.float32).abs(), randn(4, 3, seed=1, dtype=torch.float64).abs()
    expected = totals.clone()
    for n in range(4):
        expected[n, AMAX] = max(totals[n, AMAX].item(), *statistics[n, AMAX].tolist())
        for place in (CLIPPED, VANISHED):
            expected[n, place] += sum(statistics[n, place].tolist())
    ops.fold_statistics(totals, statistics)
    torch.testing.assert_close(totals, expected, rtol=1e-14, atol=0.0)


# Products.


def within(found: Tensor, left: Tensor, right: Tensor, added: Tensor | float = 0.0) -> None:
    """found = left right + added, within the probabilistic rounding bound of a float32 inner product of K terms,
    4 sqrt(K) u |x| |w| (Higham & Mary 2019), and the rounding of the result to its dtype."""
    exact = left @ right + added
    bound = 4 * math.sqrt(left.shape[1]) * FLOAT32_ROUNDOFF * (left.abs() @ right.abs() + abs(added))
    if found.dtype == torch.bfloat16:
        bound += BF16_ROUNDOFF * (exact.abs() + bound)
    assert ((found.double() - exact).abs() <= bound).all()


SIZES = pytest.mark.parametrize(("N", "inputs", "outputs"), [(1, 1, 1), (5, 3, 7), (33, 144, 40)])


@SIZES
@pytest.mark.parametrize("with_bias", [True, False])
def test_forward_products_are_those_of_the_fp8_numbers(N: int, inputs: int, outputs: int, with_bias: bool) -> None:
    inp = quantized(randn(N, inputs), E4M3, 2.0**5, forms="rows")
    weight = quantized(randn(outputs, inputs, seed=1) * 0.1, E4M3, 2.0**9, forms="rows")
    bias, residual = randn(outputs, seed=2), randn(N, outputs, seed=3)
    out = torch.full((N, outputs), math.nan, dtype=torch.bfloat16)
    ops.linear_forward(out, inp, weight, bias if with_bias else None)
    within(out, value(inp), value(weight).t(), bias.double() if with_bias else 0.0)
    if with_bias:
        total, expected = torch.full_like(out, math.nan), torch.empty_like(out)
        ops.linear_residual_forward(total, residual, inp, weight, bias)
        ops.residual_forward(expected, residual, out)
        assert torch.equal(total, expected)


@BOTH
@SIZES
def test_backward_products_are_those_of_the_fp8_numbers(kind: torch.dtype, N: int, inputs: int, outputs: int) -> None:
    """Only the forms that each product reads are there; a 16-bit one is not read where there are those."""
    unread = torch.full((N, outputs), math.nan, dtype=torch.bfloat16)
    dout = quantized(randn(N, outputs) * 1e-4, kind, 2.0**18, plain=unread)
    inp = quantized(randn(N, inputs, seed=1), E4M3, 2.0**5, forms="columns")
    weight = quantized(randn(outputs, inputs, seed=2) * 0.1, E4M3, 2.0**9, forms="columns")
    dinp = torch.full((N, inputs), math.nan, dtype=torch.bfloat16)
    dweight_acc, dbias_acc = randn(outputs, inputs, seed=3).float() * 1e-3, randn(outputs, seed=4).float() * 1e-3
    dweight_before, dbias_before = dweight_acc.double(), dbias_acc.double()
    ops.linear_backward(dinp, dweight_acc, dbias_acc, dout, inp, weight)
    within(dinp, value(dout), value(weight))
    within(dweight_acc, value(dout).t(), value(inp), dweight_before)
    within(dbias_acc, torch.ones(1, N, dtype=torch.float64), value(dout), dbias_before)


def test_a_product_reads_16_bits_unless_both_operands_have_the_form() -> None:
    """The forms of one alone are not read: they are NaN."""
    x, w, dy = randn(6, 4), randn(5, 4, seed=1), randn(6, 5, seed=2)
    expected, dinp, dweight = torch.zeros(6, 5).bfloat16(), torch.zeros(6, 4).bfloat16(), torch.zeros(5, 4)
    ops.linear_forward(expected, x, w, None)
    ops.linear_backward(dinp, dweight, None, dy, x, w)
    inp, dout = make(6, 4, E4M3, plain=x), make(6, 5, E5M2, forms="rows", plain=dy)
    weight = make(5, 4, E4M3, forms="", plain=w)
    out, dinp_too, dweight_too = torch.zeros(6, 5).bfloat16(), torch.zeros(6, 4).bfloat16(), torch.zeros(5, 4)
    ops.linear_forward(out, inp, weight, None)
    ops.linear_backward(dinp_too, dweight_too, None, dout, inp, weight)
    assert torch.equal(out, expected) and torch.equal(dinp_too, dinp) and torch.equal(dweight_too, dweight)


# Fused operations are their compositions, to the bit.

N, C, F, H = 24, 32, 128, 2


@pytest.mark.parametrize("current", [False, True])
@pytest.mark.parametrize("with_plain", [False, True])
def test_layernorm_forward_ends_with_a_quantise(with_plain: bool, current: bool) -> None:
    inputs = randn(N, C), randn(C, seed=1), randn(C, seed=2)
    expected, out = torch.empty(N, C, dtype=torch.bfloat16), torch.full((N, C), math.nan, dtype=torch.bfloat16)
    statistics, found = [torch.full((N,), math.nan) for _ in range(4)], None
    ops.layernorm_forward(expected, *statistics[:2], *inputs)
    found = make(N, C, E4M3, 2.0**4, current=current, plain=out if with_plain else None)
    ops.layernorm_forward(found, *statistics[2:], *inputs)
    same(found, quantized(expected, E4M3, 2.0**4, current=current))
    assert torch.equal(statistics[0], statistics[2]) and torch.equal(statistics[1], statistics[3])
    assert not with_plain or torch.equal(out, expected)


def test_layernorm_backward_ends_with_a_quantise() -> None:
    inp, dout, residual, weight = randn(N, C), randn(N, C, seed=1), randn(N, C, seed=2), randn(C, seed=3)
    mean, rstd = torch.empty(N), torch.empty(N)
    ops.layernorm_forward(torch.empty_like(inp), mean, rstd, inp, weight, weight)
    plain, stream = residual.clone(), residual.clone()
    sums, sums_too = ([torch.ones(C) for _ in range(3)] for _ in range(2))
    ops.layernorm_backward(plain, *sums[:2], dout, inp, mean, rstd, weight, sums[2])
    found = make(N, C, E5M2, 2.0**8, plain=stream)
    ops.layernorm_backward(found, *sums_too[:2], dout, inp, mean, rstd, weight, sums_too[2])
    same(found, quantized(plain, E5M2, 2.0**8))
    assert torch.equal(stream, plain) and all(torch.equal(a, b) for a, b in zip(sums, sums_too, strict=True))


def test_attention_ends_with_a_quantise() -> None:
    qkv, dout = randn(N, 3 * C), randn(N, C, seed=1)
    plain, out, dqkv = (torch.full(size, math.nan, dtype=torch.bfloat16) for size in ((N, C), (N, C), (N, 3 * C)))
    lse, lse_too = torch.empty(2, H, N // 2), torch.empty(2, H, N // 2)
    ops.attention_forward(plain, lse, qkv)
    found = make(N, C, E4M3, 2.0**6, plain=out)
    ops.attention_forward(found, lse_too, qkv)
    same(found, quantized(plain, E4M3, 2.0**6))
    assert torch.equal(out, plain) and torch.equal(lse, lse_too)
    ops.attention_backward(dqkv, dout, plain, lse, qkv)
    gradient = make(N, 3 * C, E5M2, 2.0**10)
    ops.attention_backward(gradient, dout, found, lse, qkv)
    same(gradient, quantized(dqkv, E5M2, 2.0**10))


@pytest.mark.parametrize("current", [False, True])
def test_gelu_is_quantised_in_rows_forwards_and_in_columns_backwards(current: bool) -> None:
    inp, weight = quantized(randn(N, C), E4M3, 2.0**5), quantized(randn(F, C, seed=1) * 0.1, E4M3, 2.0**9)
    dout, projection = quantized(randn(N, C, seed=2), E5M2, 2.0**11), quantized(randn(C, F, seed=3), E4M3, 2.0**5)
    bias = randn(F, seed=4)
    expected_hidden, expected, dgelu = (torch.empty(N, F, dtype=torch.bfloat16) for _ in range(3))
    ops.linear_forward(expected_hidden, inp, weight, bias)
    ops.gelu_forward(expected, expected_hidden)

    hidden, out = torch.full((N, F), math.nan, dtype=torch.bfloat16), make(N, F, E4M3, 2.0**4, current=current)
    ops.linear_gelu_forward(out, hidden, inp, weight, bias)
    assert torch.equal(hidden, expected_hidden) and out.columns is not None and out.columns.float().isnan().all()
    wanted = quantized(expected, E4M3, 2.0**4, current=current)
    same(replace(out, columns=None), replace(wanted, columns=None))

    dweight, expected_dweight = torch.ones(C, F), torch.ones(C, F)
    dhidden = replace(make(N, F, E5M2, 2.0**7, current=current), workspace=dgelu)
    ops.gelu_linear_backward(dhidden, dweight, dout, out, hidden, projection)
    expected_dhidden = torch.empty(N, F, dtype=torch.bfloat16)
    ops.linear_backward(expected_dhidden, expected_dweight, None, dout, wanted, projection)
    ops.gelu_backward(expected_dhidden, hidden)
    same(dhidden, quantized(expected_dhidden, E5M2, 2.0**7, current=current))
    same(out, wanted)
    assert torch.equal(dweight, expected_dweight)


def test_the_gradient_of_the_logits_has_a_static_scale() -> None:
    """No number of it is larger than the loss's factor, so nothing needs to be measured."""
    V, Vp, scale = 57, 128, torch.tensor([2.0**-9])
    logits, targets = randn(N, Vp) * 4, torch.arange(N) % V
    plain, losses, losses_too = logits.clone(), torch.empty(N), torch.empty(N)
    ops.classifier_forward_backward(losses, plain, targets, scale, vocab_size=V)
    found = make(N, Vp, E5M2, 2.0**24, forms="rows", plain=logits)
    ops.classifier_forward_backward(losses_too, found, targets, scale, vocab_size=V)
    expected = quantized(plain, E5M2, 2.0**24, forms="rows")
    assert found.rows is not None and expected.rows is not None
    assert torch.equal(bits(found.rows), bits(expected.rows)) and torch.equal(logits, plain)
    assert torch.equal(losses, losses_too) and expected.statistics[CLIPPED, 0] == 0
    assert (found.rows[:, V:].float() == 0).all(), "the padded columns have none"
