"""Checks of the Llama family's kernels that write fp8, for the interpreter on a CPU and for a GPU alike.

What they write must be, bit for bit, what the reference's `quantize` makes of the results of the 16-bit kernels.
"""

import math
from dataclasses import replace

import torch
import triton
from torch import Tensor

from handgrad.fp8 import reference
from handgrad.fp8.cuda import (
    attention,
    gained_qk_norm,
    gained_rmsnorm,
    layernorm,
    quantizing,
    rotary,
    swiglu,
)
from handgrad.fp8.formats import E4M3, Form, Quantized
from handgrad.fp8.reference.quantizing import write_forms
from handgrad.llama_shape import LlamaShape
from handgrad.ops.cuda import (
    attention_triton,
    gained_qk_norm as plain_gained_qk_norm,
    gained_rmsnorm as plain_gained_rmsnorm,
    rotary as plain_rotary,
    swiglu as plain_swiglu,
)
from handgrad.ops.cuda.attention_configs import rows_of
from tests.kernels.fp8_checks import SCALES, copy, forms_of, make, same, wide
from tests.kernels.gelu_fp8_checks import check_counts, fresh
from tests.kernels.memory_checks import Draw


def scratch_of(draw: Draw) -> Tensor:
    return torch.full((1 << 22,), 255, dtype=torch.uint8, device=draw.device)


def gained_rmsnorm_forward(draw: Draw, N: int, C: int, kind: torch.dtype, *, counting: bool) -> None:
    inp, gain = wide(draw, N, C), draw.normal(C)
    rstds = [torch.full((N,), math.nan, device=draw.device) for _ in range(2)]
    plain = torch.full_like(inp, math.nan)
    plain_gained_rmsnorm.gained_rmsnorm_forward(plain, rstds[0], inp, gain, epsilon=1e-3)
    parts = max(layernorm.forward_parts(N, C), quantizing.quantize_parts(N, C))
    tensor = make(N, C, parts, kind, draw.device, scale=2.0**9, counting=counting)
    both = replace(tensor, plain=torch.full_like(inp, math.nan))
    for name, form in [*forms_of(tensor).items(), ("plain", both)]:
        found = copy(replace(form, plain=both.plain) if name == "columns" else form)
        expected = copy(found)
        reference.quantize(expected, plain)
        gained_rmsnorm.gained_rmsnorm_forward(found, rstds[1].fill_(math.nan), inp, gain, epsilon=1e-3)
        same(found, expected)
        assert found.plain is None or torch.equal(found.plain, plain), name
        assert torch.equal(rstds[0], rstds[1])


def gained_rmsnorm_backward(draw: Draw, N: int, C: int, kind: torch.dtype, *, counting: bool) -> None:
    dout, inp, stream, gain = draw.normal(N, C), draw.normal(N, C), wide(draw, N, C), draw.normal(C)
    rstd = draw.normal(N, dtype=torch.float32).abs()
    tensors, scratch = (dout, inp, rstd, gain), scratch_of(draw)
    plain, dgain = stream.clone(), torch.ones(C, device=draw.device)
    plain_gained_rmsnorm.gained_rmsnorm_backward(plain, dgain, *tensors, scratch=scratch)
    parts = max(layernorm.backward_parts(N, C), quantizing.quantize_parts(N, C))
    tensor = make(N, C, parts, kind, draw.device, scale=SCALES[kind], counting=counting)
    for form in forms_of(tensor).values():
        found, sums = copy(replace(form, plain=stream)), torch.ones(C, device=draw.device)
        expected = copy(found)
        reference.quantize(expected, plain)
        gained_rmsnorm.gained_rmsnorm_backward(found, sums, *tensors, scratch=scratch.fill_(255))
        same(found, expected)
        assert found.plain is not None and torch.equal(found.plain, plain)
        assert torch.equal(sums, dgain), "the gain's gradient has the bits of bf16's kernel"


def swiglu_forward(draw: Draw, N: int, F: int, *, counting: bool, current: bool) -> None:
    hidden = wide(draw, N, 2 * F)
    plain = torch.full((N, F), math.nan, dtype=draw.dtype, device=draw.device)
    plain_swiglu.swiglu_forward(plain, hidden)
    found = make(N, F, swiglu.forward_parts(N, F), E4M3, draw.device, scale=SCALES[E4M3], counting=counting)
    found = replace(found, current=current)
    expected, before = fresh(found), hidden.clone()
    reference.quantize(replace(expected, columns=None), plain)
    swiglu.swiglu_forward_fp8(found, hidden)
    same(replace(found, columns=None), replace(expected, columns=None))
    assert found.columns is not None and (found.columns.view(torch.uint8) == 0x7F).all(), "the forward writes no columns"
    assert torch.equal(hidden, before)
    check_counts(found, counting and not current and N * F > 1000)


def swiglu_backward(draw: Draw, N: int, F: int, kind: torch.dtype, *, counting: bool, current: bool) -> None:
    hidden, dout = wide(draw, N, 2 * F), wide(draw, N, F)
    dout[-1, -1], hidden[-1, F - 1], hidden[-1, -1] = 16.0, 3.0, 5.0  # the largest, in the last row of the last quad
    plain = torch.full((N, F), math.nan, dtype=draw.dtype, device=draw.device)
    dplain = torch.full_like(hidden, math.nan)
    plain_swiglu.swiglu_forward(plain, hidden)
    plain_swiglu.swiglu_backward(dplain, dout, hidden)
    found = make(N, 2 * F, swiglu.backward_parts(N, F), kind, draw.device, scale=SCALES[kind], counting=counting)
    found, inp = replace(found, current=current), make(N, F, 3, E4M3, draw.device, scale=SCALES[E4M3])
    inp.statistics.fill_(7.0)
    expected, expected_inp, before = fresh(found), copy(inp), (hidden.clone(), dout.clone())
    reference.quantize(expected, dplain)
    write_forms(replace(expected_inp, rows=None), plain)
    swiglu.swiglu_backward_fp8(found, inp, dout, hidden)
    same(found, expected)
    same(inp, expected_inp)  # its rows and statistics as they were
    assert torch.equal(hidden, before[0]) and torch.equal(dout, before[1])
    check_counts(found, counting and not current and N * F > 1000 and kind == E4M3)


TURNS = ("rotary", "gained_qk_norm_rotary")


def turn_back(
    draw: Draw,
    N: int,
    H: int,
    K: int,
    D: int,
    length: int,
    turn: str,
    kind: torch.dtype,
    *,
    counting: bool,
    scale: float = 1.0,
    columns: torch.dtype | None = None,
) -> None:
    """`columns`: the format of the transposed form, if it is another than `kind`."""
    width = (H + 2 * K) * D
    dturned, qkv, gains = wide(draw, N, width), draw.normal(N, width), [draw.normal(D) for _ in range(2)]
    rstd = torch.exp2(torch.tanh(draw.normal(N, H + K, dtype=torch.float32)))
    dturned[-1, -1] = 77.0  # the largest, of a value in the last row of the last quad
    frequencies = LlamaShape(head_width=D, rotary_base=500000.0).frequencies
    options = {"length": length, "frequencies": frequencies, "scale": scale}

    def run(dqkv: Form) -> list[Tensor]:
        """The gains' gradients."""
        sums = [torch.ones(D, device=draw.device) for _ in gains]
        plain = isinstance(dqkv, Tensor)
        if turn == "rotary":
            (plain_rotary if plain else rotary).rotary_backward(dqkv, num_heads=H, **options)
        else:
            module = plain_gained_qk_norm if plain else gained_qk_norm
            module.gained_qk_norm_rotary_backward(dqkv, *sums, qkv, rstd, *gains, **options, scratch=scratch_of(draw))
        return sums

    expected_plain = dturned.clone()
    expected_sums = run(expected_plain)
    tensor = make(
        N, width, rotary.backward_parts(N), kind, draw.device, scale=SCALES[kind], counting=counting, columns_kind=columns
    )
    for form in forms_of(tensor).values():
        if form.rows is None and columns is not None:
            continue  # whose own limits are others
        found = replace(copy(form), workspace=dturned.clone(), plain=torch.full_like(dturned, math.nan))
        sums = run(found)
        plain = found.plain
        assert plain is not None and found.workspace is not None and torch.equal(found.workspace, dturned)
        # Sums over a head may be added in another order than by the kernel in place: a rounding in a thousand flips.
        assert (plain.double() - expected_plain.double()).norm() <= torch.finfo(draw.dtype).eps * expected_plain.norm()
        assert torch.equal(plain[:, (H + K) * D :], dturned[:, (H + K) * D :]), "the values pass"
        # And those over rows: of terms of random sign, as many as rows and heads, in float32.
        for found_sum, expected_sum in zip(sums, expected_sums, strict=True):
            terms = math.sqrt(N * H) * max(1.0, expected_plain.abs().max().item()) * 4
            assert (found_sum - expected_sum).abs().max() <= 2.0**-20 * terms
        expected: Quantized = fresh(form)
        reference.quantize(expected, plain)
        same(found, expected)
        check_counts(found, counting and not found.current and N * width > 1000 and kind == E4M3)
        alone = replace(copy(form), workspace=dturned.clone())
        for again, once in zip(run(alone), sums, strict=True):
            assert torch.equal(again, once), "with a 16-bit form or without, the same bits"
        same(alone, expected)


def attention_forward(
    draw: Draw, B: int, T: int, H: int, K: int, D: int, kind: torch.dtype, *, starts: Tensor | None = None
) -> None:
    """Of heads of queries that share keys. `starts`: of documents."""
    N, C = B * T, H * D
    qkv = wide(draw, N, (H + 2 * K) * D)
    outs = [torch.full((N, C), math.nan, dtype=draw.dtype, device=draw.device) for _ in range(2)]
    lses = [torch.full((B, H, T), math.nan, device=draw.device) for _ in range(2)]
    documents = {"document_starts": None if starts is None else starts.to(draw.device)}
    attention_triton.attention_forward(outs[0], lses[0], qkv, **documents)
    config = attention_triton.choose_config("forward", qkv, D, True, starts is not None)
    parts = max(B * H * triton.cdiv(T, rows_of("forward", config)), quantizing.quantize_parts(N, C))
    tensor = make(N, C, parts, kind, draw.device, scale=SCALES[kind])
    for form in forms_of(tensor).values():
        found = replace(copy(form), plain=outs[1].fill_(math.nan))
        expected = fresh(form)
        reference.quantize(expected, outs[0])
        attention.attention_forward(found, lses[1].fill_(math.nan), qkv, scratch=scratch_of(draw), **documents)
        same(replace(found, plain=None), expected)
        assert torch.equal(outs[0], outs[1]) and torch.equal(lses[0], lses[1])
