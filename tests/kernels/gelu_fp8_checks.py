"""Checks of the GELU kernels that write fp8, for the interpreter on a CPU and for a GPU alike."""

import torch
from torch import Tensor

from handgrad.joins.fp8.cuda import activations as kernels, linear
from handgrad.joins.fp8.formats import INVERSE
from handgrad.joins.fp8.reference.quantizing import write_forms
from handgrad.ops.cuda import activations
from tests.kernels import fp8_frames as frames
from tests.kernels.fp8_checks import make, wide
from tests.kernels.memory_checks import SENTINEL, Draw

# Numbers at which a careless GELU overflows or cancels; the first scales of a run meet anything.
EXTREMES = (-3e4, -100.0, -9.0, -5.5, -0.0, 0.0, 5.5, 7.0, 9.0, 100.0, 3e4)


def hidden_of(draw: Draw, N: int, F: int) -> Tensor:
    """With extremes, or up to 2: then the largest GELU is no 16-bit number before its rounding."""
    hidden = wide(draw, N, F)
    if N * F < 1000:
        hidden[0, 0] = 2.0
        return hidden.clamp_(-2, 2)
    hidden.view(-1)[: len(EXTREMES)] = torch.tensor(EXTREMES, device=draw.device)
    return hidden


def forward(draw: Draw, N: int, F: int, *, counting: bool, current: bool) -> None:
    hidden = hidden_of(draw, N, F)
    plain = torch.empty_like(hidden)
    activations.gelu_forward(plain, hidden)
    launch = lambda found: kernels.gelu_forward_fp8(found, hidden)  # noqa: E731
    frames.nonlinearity_forward(draw, plain, launch, counting=counting, current=current)


def backward(draw: Draw, N: int, F: int, kind: torch.dtype, *, counting: bool, current: bool) -> None:
    hidden, dgelu = hidden_of(draw, N, F), wide(draw, N, F)
    dgelu.view(-1)[: len(EXTREMES)] = 7.0
    dgelu[-1, -1], hidden[-1, -1] = 77.0, 3.0  # the largest, in the last row of the last quad
    plain, dplain = torch.empty_like(hidden), dgelu.clone()
    activations.gelu_forward(plain, hidden)
    activations.gelu_backward(dplain, hidden)
    tensors = draw, dplain, plain, kind
    launch = lambda found, inp: kernels.gelu_backward_fp8(found, inp, dgelu, hidden)  # noqa: E731
    frames.nonlinearity_backward(*tensors, launch, (hidden, dgelu), counting=counting, current=current)


def bias_backward(draw: Draw, N: int, O: int, kind: torch.dtype) -> None:
    dout = make(N, O, 0, kind, draw.device, scale=0.125)
    write_forms(dout, draw.normal(N, O))
    assert dout.columns is not None
    if dout.rows is not None:
        dout.rows.view(torch.uint8).fill_(0x7F)  # not what is summed
    found = torch.full((O,), SENTINEL, device=draw.device)
    linear.bias_backward(found, dout, scratch=torch.empty(0, dtype=torch.uint8, device=draw.device))
    numbers = dout.columns.double() * dout.scaling[INVERSE]
    error = (found.double() - numbers.sum(1) - SENTINEL).abs()
    assert (error <= 1e-6 * (numbers.abs().sum(1) + SENTINEL)).all(), error.max()
