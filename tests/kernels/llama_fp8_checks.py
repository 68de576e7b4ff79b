"""Checks of the Llama family's kernels that write fp8, for the interpreter on a CPU and for a GPU alike."""

import math
from dataclasses import replace
from functools import partial

import torch
import triton
from torch import Tensor

from handgrad.joins.fp8 import reference
from handgrad.joins.fp8.cuda import activations, attention, rmsnorm, rotary
from handgrad.joins.fp8.formats import Form
from handgrad.networks.llama import LlamaShape
from handgrad.ops.cuda import activations as plain_activations, attention as plain_attention, attention_triton
from handgrad.ops.reference.attention import Mask
from handgrad.ops.sizes import rows_of
from tests.kernels import fp8_frames as frames
from tests.kernels.fp8_checks import SCALES, copy, forms_of, make, same, wide
from tests.kernels.memory_checks import Draw


def scratch_of(draw: Draw) -> Tensor:
    return torch.full((1 << 22,), 255, dtype=torch.uint8, device=draw.device)


def gained_rmsnorm_forward(draw: Draw, N: int, C: int, kind: torch.dtype, *, counting: bool) -> None:
    """With a gain of w, and of 1 + w."""
    inp, gain = wide(draw, N, C), draw.normal(C)

    def run(out: Form, plus: int) -> list[Tensor]:
        rstd = torch.full((N,), math.nan, device=draw.device)
        rmsnorm.rmsnorm_forward(out, rstd, inp, gain, epsilon=1e-3, plus=plus)
        return [rstd]

    for plus in (0, 1):
        frames.norm_forward(draw, (N, C), kind, partial(run, plus=plus), counting=counting)


def gained_rmsnorm_backward(draw: Draw, N: int, C: int, kind: torch.dtype, *, counting: bool) -> None:
    """The gain's gradient has the bits of bf16's kernel."""
    dout, inp, stream, gain = draw.normal(N, C), draw.normal(N, C), wide(draw, N, C), draw.normal(C)
    rstd, scratch = draw.normal(N, dtype=torch.float32).abs(), scratch_of(draw)

    def run(dresidual: Form) -> list[Tensor]:
        dgain = torch.ones(C, device=draw.device)
        rmsnorm.rmsnorm_backward(dresidual, dgain, dout, inp, rstd, gain, scratch=scratch.fill_(255))
        return [dgain]

    frames.norm_backward(draw, stream, kind, run, counting=counting)


def swiglu_forward(draw: Draw, N: int, F: int, *, counting: bool, current: bool) -> None:
    hidden = wide(draw, N, 2 * F)
    plain, before = torch.full((N, F), math.nan, dtype=draw.dtype, device=draw.device), hidden.clone()
    plain_activations.swiglu_forward(plain, hidden)
    launch = lambda found: activations.swiglu_forward_fp8(found, hidden)  # noqa: E731
    frames.nonlinearity_forward(draw, plain, launch, counting=counting, current=current)
    assert torch.equal(hidden, before)


def swiglu_backward(draw: Draw, N: int, F: int, kind: torch.dtype, *, counting: bool, current: bool) -> None:
    hidden, dout = wide(draw, N, 2 * F), wide(draw, N, F)
    dout[-1, -1], hidden[-1, F - 1], hidden[-1, -1] = 16.0, 3.0, 5.0  # the largest, in the last row of the last quad
    plain = torch.full((N, F), math.nan, dtype=draw.dtype, device=draw.device)
    dplain = torch.full_like(hidden, math.nan)
    plain_activations.swiglu_forward(plain, hidden)
    plain_activations.swiglu_backward(dplain, dout, hidden)
    tensors = draw, dplain, plain, kind
    launch = lambda found, inp: activations.swiglu_backward_fp8(found, inp, dout, hidden)  # noqa: E731
    frames.nonlinearity_backward(*tensors, launch, (hidden, dout), counting=counting, current=current)


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
    width = (H + 2 * K) * D
    dturned, qkv, gains = wide(draw, N, width), draw.normal(N, width), [draw.normal(D) for _ in range(2)]
    rstd = torch.exp2(torch.tanh(draw.normal(N, H + K, dtype=torch.float32)))
    dturned[-1, -1] = 77.0  # the largest, of a value in the last row of the last quad
    frequencies = LlamaShape(head_width=D, rotary_base=500000.0).frequencies
    options = {"length": length, "frequencies": frequencies, "scale": scale}

    def run(dqkv: Form) -> list[Tensor]:
        """The gains' gradients."""
        if turn == "rotary":
            rotary.rotary_backward(dqkv, num_heads=H, **options)
            return []
        sums = [torch.ones(D, device=draw.device) for _ in gains]
        inputs = qkv, rstd, *gains
        rotary.gained_qk_norm_rotary_backward(dqkv, *sums, *inputs, **options, scratch=scratch_of(draw))
        return sums

    turned_columns, terms = (H + K) * D, N * H
    frames.turn_back(draw, dturned, turned_columns, kind, run, counting=counting, columns=columns, terms=terms)


def attention_forward(
    draw: Draw, B: int, T: int, H: int, K: int, D: int, kind: torch.dtype, *, starts: Tensor | None = None
) -> None:
    """Grouped heads: fp8 quantises the output of the kernel that bf16 takes. `starts`: the documents' first tokens."""
    N, C = B * T, H * D
    qkv = wide(draw, N, (H + 2 * K) * D)
    outs = [torch.full((N, C), math.nan, dtype=draw.dtype, device=draw.device) for _ in range(2)]
    lses = [torch.full((B, H, T), math.nan, device=draw.device) for _ in range(2)]
    mask = Mask(None if starts is None else starts.to(draw.device))
    plain_attention.attention_forward(outs[0], lses[0], qkv, scratch=scratch_of(draw), mask=mask)
    config = attention_triton.choose_config("forward", qkv, D, True, starts is not None)
    parts = max(B * H * triton.cdiv(T, rows_of("forward", config)), frames.parts_of(N, C))
    tensor = make(N, C, parts, kind, draw.device, scale=SCALES[kind])
    for form in forms_of(tensor).values():
        found = replace(copy(form), plain=outs[1].fill_(math.nan))
        expected = frames.fresh(form)
        reference.quantize(expected, outs[0])
        attention.attention_forward(found, lses[1].fill_(math.nan), qkv, scratch=scratch_of(draw), mask=mask)
        same(replace(found, plain=None), expected)
        assert torch.equal(outs[0], outs[1]) and torch.equal(lses[0], lses[1])
