"""Checks of the modern network's kernels that write fp8, for the interpreter on a CPU and for a GPU alike."""

import math

import torch
from torch import Tensor

from handgrad.joins.fp8.cuda import activations, mix, rmsnorm, rotary
from handgrad.joins.fp8.formats import Form
from handgrad.ops.cuda import activations as plain_activations
from tests.kernels import fp8_frames as frames
from tests.kernels.fp8_checks import wide
from tests.kernels.memory_checks import Draw
from tests.kernels.modern_checks import absent


def rmsnorm_forward(draw: Draw, N: int, C: int, kind: torch.dtype, *, counting: bool) -> None:
    inp = wide(draw, N, C)

    def run(out: Form) -> list[Tensor]:
        rstd = torch.full((N,), math.nan, device=draw.device)
        rmsnorm.rmsnorm_forward(out, rstd, inp)
        return [rstd]

    frames.norm_forward(draw, (N, C), kind, run, counting=counting)


def rmsnorm_backward(draw: Draw, N: int, C: int, kind: torch.dtype, *, counting: bool) -> None:
    dout, inp, stream = draw.normal(N, C), draw.normal(N, C), wide(draw, N, C)
    rstd = draw.normal(N, dtype=torch.float32).abs()

    def run(dresidual: Form) -> list[Tensor]:
        rmsnorm.rmsnorm_backward(dresidual, None, dout, inp, rstd, None, scratch=inp)
        return []

    frames.norm_backward(draw, stream, kind, run, counting=counting)


def mixture_of(draw: Draw, N: int, C: int, residual: bool, first: bool) -> tuple[Tensor, list[Tensor | None]]:
    """The stream; what it is mixed with, or None: the first block's stream, and the scalars."""
    inputs = draw.arguments("mix_rmsnorm_forward", N=N, C=C) | absent(residual, first)
    return inputs["inp"], [inputs[name] for name in ("first", "residual_scalar", "input_scalar")]


def mix_rmsnorm_forward(
    draw: Draw, N: int, C: int, residual: bool, first: bool, kind: torch.dtype, *, counting: bool
) -> None:
    stream, others = mixture_of(draw, N, C, residual, first)
    stream *= wide(draw, N, C)
    mixed = torch.full_like(stream, math.nan)

    def run(out: Form, into: Tensor | None) -> list[Tensor]:
        rstd = torch.full((N,), math.nan, device=draw.device)
        if into is not None:
            into.fill_(math.nan)
        mix.mix_rmsnorm_forward(into, out, rstd, stream, *others)
        return [rstd, mixed.clone()]

    for into in (mixed, None):  # with the mixture kept, and without: as it was kept before
        frames.norm_forward(draw, (N, C), kind, lambda out, into=into: run(out, into), counting=counting)


def mix_rmsnorm_backward(
    draw: Draw, N: int, C: int, residual: bool, first: bool, kind: torch.dtype, *, counting: bool
) -> None:
    inp, others = mixture_of(draw, N, C, residual, first)
    dout, dstream, dfirst = draw.normal(N, C), wide(draw, N, C), draw.normal(N, C) if first else None
    rstd = draw.normal(N, dtype=torch.float32).abs()
    scratch = torch.empty(1 << 20, dtype=torch.uint8, device=draw.device)

    def run(dstream: Form) -> list[Tensor]:
        """The other gradients."""
        sums = [None if scalar is None else torch.ones(1, device=draw.device) for scalar in others[1:]]
        gradient = None if dfirst is None else dfirst.clone()
        tensors = dout, inp, others[0], rstd, *others[1:]
        mix.mix_rmsnorm_backward(dstream, gradient, *sums, *tensors, scratch=scratch.fill_(0xFF))
        return [tensor for tensor in (gradient, *sums) if tensor is not None]

    frames.norm_backward(draw, dstream, kind, run, counting=counting)


def relu2_forward(draw: Draw, N: int, F: int, *, counting: bool, current: bool) -> None:
    hidden = wide(draw, N, F)
    plain = hidden.clone()
    plain_activations.relu2_forward(plain)
    changes = {"current": current, "plain": hidden}
    frames.nonlinearity_forward(draw, plain, activations.relu2_forward_fp8, counting=counting, **changes)
    assert torch.equal(hidden, plain)


def relu2_backward(draw: Draw, N: int, F: int, kind: torch.dtype, *, counting: bool, current: bool) -> None:
    square, dsquare = wide(draw, N, F).clamp_(min=0), wide(draw, N, F)
    dsquare[-1, -1], square[-1, -1] = 77.0, 9.0  # the largest, in the last row of the last quad
    dplain = dsquare.clone()
    plain_activations.relu2_backward(dplain, square)
    tensors = draw, dplain, square, kind
    launch = lambda found, inp: activations.relu2_backward_fp8(found, inp, dsquare)  # noqa: E731
    options = {"counting": counting, "current": current, "inp_plain": square}
    frames.nonlinearity_backward(*tensors, launch, (square, dsquare), **options)


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
    dturned, qkv = wide(draw, N, 3 * H * D), draw.normal(N, 3 * H * D)
    rstd = torch.exp2(torch.tanh(draw.normal(N, 2 * H, dtype=torch.float32)))
    dturned[-1, 0] = 77.0  # the largest, in the last row of the last quad
    tensors = () if turn == "rotary" else (qkv, rstd)
    options = ({"length": length} if "rotary" in turn else {}) | ({"num_heads": H} if turn == "rotary" else {})

    def run(dqkv: Form) -> list[Tensor]:
        getattr(rotary, f"{turn}_backward")(dqkv, *tensors, **options)
        return []

    frames.turn_back(draw, dturned, 2 * H * D, kind, run, counting=counting, columns=columns)
