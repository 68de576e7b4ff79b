"""Checks of the modern network's kernels that write fp8, for the interpreter on a CPU and for a GPU alike.

What they write must be, bit for bit, what the reference's `quantize` makes of the results of the 16-bit kernels.
"""

import math
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from handgrad.fp8 import reference
from handgrad.fp8.cuda import elementwise, gelu, layernorm, mix, quantizing, relu2, rmsnorm, rotary
from handgrad.fp8.formats import E4M3, Form, Quantized
from handgrad.fp8.reference.quantizing import write_forms
from handgrad.ops.cuda import mix as plain_mix, relu2 as plain_relu2, rmsnorm as plain_rmsnorm, rotary as plain_rotary
from tests.kernels.fp8_checks import SCALES, copy, forms_of, make, same, wide
from tests.kernels.gelu_fp8_checks import check_counts, fresh
from tests.kernels.memory_checks import Draw
from tests.kernels.modern_checks import mixture


def rmsnorm_forward(draw: Draw, N: int, C: int, kind: torch.dtype, *, counting: bool) -> None:
    inp = wide(draw, N, C)
    rstds = [torch.full((N,), math.nan, device=draw.device) for _ in range(2)]
    plain = torch.full_like(inp, math.nan)
    plain_rmsnorm.rmsnorm_forward(plain, rstds[0], inp)
    parts = max(rmsnorm.forward_parts(N, C), quantizing.quantize_parts(N, C))
    tensor = make(N, C, parts, kind, draw.device, scale=2.0**9, counting=counting)
    both = replace(tensor, plain=torch.full_like(inp, math.nan))
    for name, form in [*forms_of(tensor).items(), ("plain", both)]:
        found = copy(replace(form, plain=both.plain) if name == "columns" else form)
        expected = copy(found)
        reference.quantize(expected, plain)
        rmsnorm.rmsnorm_forward(found, rstds[1], inp)
        same(found, expected)
        assert found.plain is None or torch.equal(found.plain, plain), name
        assert torch.equal(rstds[0], rstds[1])


def rmsnorm_backward(draw: Draw, N: int, C: int, kind: torch.dtype, *, counting: bool) -> None:
    dout, inp, stream = draw.normal(N, C), draw.normal(N, C), wide(draw, N, C)
    rstd = draw.normal(N, dtype=torch.float32).abs()
    plain = stream.clone()
    plain_rmsnorm.rmsnorm_backward(plain, dout, inp, rstd)
    parts = max(rmsnorm.backward_parts(N, C), quantizing.quantize_parts(N, C))
    tensor = make(N, C, parts, kind, draw.device, scale=SCALES[kind], counting=counting)
    for form in forms_of(tensor).values():
        found = copy(replace(form, plain=stream))
        expected = copy(found)
        reference.quantize(expected, plain)
        rmsnorm.rmsnorm_backward(found, dout, inp, rstd)
        same(found, expected)
        assert found.plain is not None and torch.equal(found.plain, plain)


def mixture_of(draw: Draw, N: int, C: int, residual: bool, first: bool) -> tuple[Tensor, list[Tensor | None]]:
    """The stream; what it is mixed with, or None: the first block's stream, and the scalars."""
    inputs, names = mixture(draw, N, C, residual, first)
    return inputs["inp"], [inputs[name] if name in names else None for name in ("first", "residual_scalar", "input_scalar")]


def mix_rmsnorm_forward(
    draw: Draw, N: int, C: int, residual: bool, first: bool, kind: torch.dtype, *, counting: bool
) -> None:
    stream, others = mixture_of(draw, N, C, residual, first)
    stream *= wide(draw, N, C)
    rstds = [torch.full((N,), math.nan, device=draw.device) for _ in range(2)]
    mixed, plain, found_mixed = (torch.full_like(stream, math.nan) for _ in range(3))
    plain_mix.mix_rmsnorm_forward(mixed, plain, rstds[0], stream, *others)
    parts = max(layernorm.forward_parts(N, C), quantizing.quantize_parts(N, C))
    tensor = make(N, C, parts, kind, draw.device, scale=2.0**9, counting=counting)
    both = replace(tensor, plain=torch.full_like(stream, math.nan))
    for name, form in [*forms_of(tensor).items(), ("plain", both)]:
        for into in (found_mixed, None):
            found = copy(replace(form, plain=both.plain) if name == "columns" else form)
            expected = copy(found)
            reference.quantize(expected, plain)
            mix.mix_rmsnorm_forward(into, found, rstds[1].fill_(math.nan), stream, *others)
            same(found, expected)
            assert found.plain is None or torch.equal(found.plain, plain), name
            assert torch.equal(rstds[0], rstds[1]) and torch.equal(found_mixed, mixed)


def mix_rmsnorm_backward(
    draw: Draw, N: int, C: int, residual: bool, first: bool, kind: torch.dtype, *, counting: bool
) -> None:
    inp, others = mixture_of(draw, N, C, residual, first)
    dout, dstream, dfirst = draw.normal(N, C), wide(draw, N, C), draw.normal(N, C) if first else None
    rstd = draw.normal(N, dtype=torch.float32).abs()
    scratch = torch.empty(1 << 20, dtype=torch.uint8, device=draw.device)

    def run(module: ModuleType, dstream: Form) -> list[Tensor]:
        """The other gradients."""
        sums = [None if scalar is None else torch.ones(1, device=draw.device) for scalar in others[1:]]
        gradient = None if dfirst is None else dfirst.clone()
        tensors = dout, inp, others[0], rstd, *others[1:]
        module.mix_rmsnorm_backward(dstream, gradient, *sums, *tensors, scratch=scratch.fill_(0xFF))
        return [tensor for tensor in (gradient, *sums) if tensor is not None]

    plain = dstream.clone()
    beside = run(plain_mix, plain)
    parts = max(layernorm.backward_parts(N, C), quantizing.quantize_parts(N, C))
    tensor = make(N, C, parts, kind, draw.device, scale=SCALES[kind], counting=counting)
    for form in forms_of(tensor).values():
        found = copy(replace(form, plain=dstream))
        expected = copy(found)
        reference.quantize(expected, plain)
        for made, wanted in zip(run(mix, found), beside, strict=True):
            assert torch.equal(made, wanted)
        same(found, expected)
        assert found.plain is not None and torch.equal(found.plain, plain)


def relu2_forward(draw: Draw, N: int, F: int, *, counting: bool, current: bool) -> None:
    hidden = wide(draw, N, F)
    plain = hidden.clone()
    plain_relu2.relu2_forward(plain)
    parts = max(gelu.forward_parts(N, F), quantizing.quantize_parts(N, F))
    found = make(N, F, parts, E4M3, draw.device, scale=SCALES[E4M3], counting=counting)
    found = replace(found, current=current, plain=hidden)
    expected = fresh(found)
    reference.quantize(replace(expected, columns=None), plain)
    relu2.relu2_forward_fp8(found)
    same(replace(found, columns=None), replace(expected, columns=None))
    assert torch.equal(hidden, plain)
    assert found.columns is not None and (found.columns.view(torch.uint8) == 0x7F).all(), "the forward writes no columns"
    check_counts(found, counting and not current and N * F > 1000)


def relu2_backward(draw: Draw, N: int, F: int, kind: torch.dtype, *, counting: bool, current: bool) -> None:
    square, dsquare = wide(draw, N, F).clamp_(min=0), wide(draw, N, F)
    dsquare[-1, -1], square[-1, -1] = 77.0, 9.0  # the largest, in the last row of the last quad
    dplain = dsquare.clone()
    plain_relu2.relu2_backward(dplain, square)
    found = make(N, F, elementwise.backward_parts(N, F), kind, draw.device, scale=SCALES[kind], counting=counting)
    found, inp = replace(found, current=current), make(N, F, 3, E4M3, draw.device, scale=SCALES[E4M3])
    inp = replace(inp, plain=square)
    inp.statistics.fill_(7.0)
    expected, expected_inp, before = fresh(found), copy(inp), (square.clone(), dsquare.clone())
    reference.quantize(expected, dplain)
    write_forms(replace(expected_inp, rows=None), square)
    relu2.relu2_backward_fp8(found, inp, dsquare)
    same(found, expected)
    same(inp, expected_inp)  # its rows and statistics as they were
    assert torch.equal(square, before[0]) and torch.equal(dsquare, before[1])
    check_counts(found, counting and not current and N * F > 1000 and kind == E4M3)


TURNS = ("rotary", "qk_norm", "qk_norm_rotary")


def turn_back(
    draw: Draw,
    N: int,
    H: int,
    D: int,
    length: int,
    turn: str,
    kind: torch.dtype,
    *,
    counting: bool,
    columns: torch.dtype | None = None,
) -> None:
    """`columns`: the format of the transposed form, if it is another than `kind`."""
    C3 = 3 * H * D
    dturned, qkv = wide(draw, N, C3), draw.normal(N, C3)
    rstd = torch.exp2(torch.tanh(draw.normal(N, 2 * H, dtype=torch.float32)))
    dturned[-1, 0] = 77.0  # the largest, in the last row of the last quad

    def run(dqkv: Form) -> None:
        tensors = () if turn == "rotary" else (qkv, rstd)
        options = {"length": length} if "rotary" in turn else {}
        options |= {"num_heads": H} if turn == "rotary" else {}
        module = plain_rotary if isinstance(dqkv, Tensor) else rotary
        getattr(module, f"{turn}_backward")(dqkv, *tensors, **options)

    expected_plain = dturned.clone()
    run(expected_plain)
    parts = rotary.backward_parts(N)
    tensor = make(N, C3, parts, kind, draw.device, scale=SCALES[kind], counting=counting, columns_kind=columns)
    for form in forms_of(tensor).values():
        if form.rows is None and columns is not None:
            continue  # whose own limits are others
        found = replace(copy(form), workspace=dturned.clone(), plain=torch.full_like(dturned, math.nan))
        run(found)
        plain = found.plain
        assert plain is not None and found.workspace is not None and torch.equal(found.workspace, dturned)
        # Sums over a head may be added in another order than by the kernel in place: a rounding in a thousand flips.
        assert (plain.double() - expected_plain.double()).norm() <= torch.finfo(draw.dtype).eps * expected_plain.norm()
        assert torch.equal(plain[:, 2 * H * D :], dturned[:, 2 * H * D :]), "the values pass"
        expected: Quantized = fresh(form)
        reference.quantize(expected, plain)
        same(found, expected)
        check_counts(found, counting and not found.current and N * C3 > 1000 and kind == E4M3)
        alone = replace(copy(form), workspace=dturned.clone())
        run(alone)
        same(alone, expected)
