"""Checks of the GELU kernels that write fp8, for the interpreter on a CPU and for a GPU alike.

What they write must be, bit for bit, what the reference's `quantize` makes of the results of the 16-bit kernels.
"""

from dataclasses import replace

import torch
from torch import Tensor

from handgrad.fp8 import reference
from handgrad.fp8.cuda import column_sums, elementwise, gelu as gelu_fp8
from handgrad.fp8.formats import CLIPPED, E4M3, INVERSE, VANISHED, Quantized
from handgrad.fp8.reference.quantizing import write_forms
from handgrad.ops.cuda import gelu
from tests.kernels.fp8_checks import NAN, codes, copy, make, same, totals, wide
from tests.kernels.memory_checks import SENTINEL, Draw

# At which, of the numbers here, some are too large and some vanish; 7 is a format's largest number.
SCALES = {torch.float8_e4m3fn: 64.0, torch.float8_e5m2: 2.0**13}
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


def fresh(tensor: Quantized) -> Quantized:
    return replace(copy(tensor), statistics=torch.zeros_like(tensor.statistics))


def forward(draw: Draw, N: int, F: int, *, counting: bool, current: bool) -> None:
    hidden = hidden_of(draw, N, F)
    plain = torch.empty_like(hidden)
    gelu.gelu_forward(plain, hidden)
    found = make(N, F, gelu_fp8.forward_parts(N, F), E4M3, draw.device, scale=SCALES[E4M3], counting=counting)
    found = replace(found, current=current)
    expected = fresh(found)
    reference.quantize(replace(expected, columns=None), plain)
    gelu_fp8.gelu_forward_fp8(found, hidden)
    same(replace(found, columns=None), replace(expected, columns=None))
    columns = codes(found.columns)
    assert columns is not None and (columns == NAN).all(), "the forward writes no columns"
    check_counts(found, counting and not current and N * F > 1000)


def check_counts(tensor: Quantized, some: bool) -> None:
    if some:
        assert totals(tensor)[CLIPPED] > 0 and totals(tensor)[VANISHED] > 0


def backward(draw: Draw, N: int, F: int, kind: torch.dtype, *, counting: bool, current: bool) -> None:
    hidden, dgelu = hidden_of(draw, N, F), wide(draw, N, F)
    dgelu.view(-1)[: len(EXTREMES)] = 7.0
    dgelu[-1, -1], hidden[-1, -1] = 77.0, 3.0  # the largest, in the last row of the last quad
    plain, dplain = torch.empty_like(hidden), dgelu.clone()
    gelu.gelu_forward(plain, hidden)
    gelu.gelu_backward(dplain, hidden)
    parts = elementwise.backward_parts(N, F)
    found = make(N, F, parts, kind, draw.device, scale=SCALES[kind], counting=counting)
    found, inp = replace(found, current=current), make(N, F, 3, E4M3, draw.device, scale=SCALES[E4M3])
    inp.statistics.fill_(7.0)
    expected, expected_inp, before = fresh(found), copy(inp), (hidden.clone(), dgelu.clone())
    reference.quantize(expected, dplain)
    write_forms(replace(expected_inp, rows=None), plain)
    gelu_fp8.gelu_backward_fp8(found, inp, dgelu, hidden)
    same(found, expected)
    same(inp, expected_inp)  # its rows and statistics as they were
    assert torch.equal(hidden, before[0]) and torch.equal(dgelu, before[1])
    check_counts(found, counting and not current and N * F > 1000 and kind == E4M3)


def bias_backward(draw: Draw, N: int, O: int, kind: torch.dtype) -> None:
    dout = make(N, O, 0, kind, draw.device, scale=0.125)
    write_forms(dout, draw.normal(N, O))
    assert dout.columns is not None
    if dout.rows is not None:
        dout.rows.view(torch.uint8).fill_(0x7F)  # not what is summed
    found = torch.full((O,), SENTINEL, device=draw.device)
    column_sums.bias_backward(found, dout, scratch=torch.empty(0, dtype=torch.uint8, device=draw.device))
    numbers = dout.columns.double() * dout.scaling[INVERSE]
    error = (found.double() - numbers.sum(1) - SENTINEL).abs()
    assert (error <= 1e-6 * (numbers.abs().sum(1) + SENTINEL)).all(), error.max()
