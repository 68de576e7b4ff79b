"""Quantising to fp8, and the scales."""

import math

import torch
from torch import Tensor

from handgrad.joins.fp8 import formats
from handgrad.joins.fp8.formats import AMAX, CLIPPED, COUNTING, INVERSE, MARGIN, SCALE, VANISHED, Quantized
from handgrad.ops import CONTROL_STEP

# A scale 2^e keeps amax 2^e within the format's largest number 1.75 * 2^E, with `margin` binades of headroom. For
# amax = f 2^a, 1 <= f < 2, this gives e = E - a - margin, and one less if f > 1.75.


def quantize(out: Quantized, inp: Tensor) -> None:
    """Writes the fp8 forms and statistics of inp (N, C); with `current`, sets the scale first."""
    amax = inp.abs().nan_to_num_(nan=0.0, posinf=math.inf).amax().float()
    if out.current:
        rescale_to(out, amax)
    out.statistics[AMAX, 0] = amax
    out.statistics[CLIPPED:, 0] = 0
    if out.scaling[COUNTING]:
        magnitude = (inp.float() * out.scaling[SCALE]).abs_()
        out.statistics[CLIPPED, 0] = (magnitude > formats.largest_number(out.format)).sum()
        out.statistics[VANISHED, 0] = ((magnitude <= formats.VANISHES_AT[out.format]) & (inp != 0)).sum()
    write_forms(out, inp)


def write_forms(out: Quantized, inp: Tensor) -> None:
    """Writes the fp8 forms of inp (N, C) that out has, at the existing scale."""
    scaled = inp.float() * out.scaling[SCALE]
    for form, values in ((out.rows, scaled), (out.columns, scaled.t())):
        if form is not None:
            limit = formats.largest_number(form.dtype)
            form.copy_(values.clamp(-limit, limit))


def transpose(columns: Tensor, rows: Tensor) -> None:
    """columns (C, N) = the transpose of rows (N, C), both fp8."""
    columns.copy_(rows.t())


def rescale_to(tensor: Quantized, amax: Tensor) -> None:
    """Sets the tensor's scale for numbers up to amax (0-dimensional)."""
    scale_rows = tensor.scaling.unsqueeze(0)
    write_scales(scale_rows, amax.view(1), torch.tensor([formats.LARGEST_EXPONENT[tensor.format]], device=amax.device))


def write_scales(scaling: Tensor, amax: Tensor, largest_exponents: Tensor) -> None:
    """Writes scale and inverse for numbers up to amax (n) to the rows of scaling (n, SCALING_PLACES). A row keeps its scale
    if amax is 0 or not finite."""
    mantissa, exponent = torch.frexp(amax.float())  # amax = mantissa 2^exponent, 1/2 <= mantissa < 1
    e = largest_exponents - (exponent - 1) - (mantissa > formats.LARGEST_MANTISSA / 2).int() - scaling[:, MARGIN].int()
    e = e.clamp(-formats.LARGEST_SCALE_EXPONENT, formats.LARGEST_SCALE_EXPONENT)
    usable = (amax > 0) & torch.isfinite(amax)
    one = torch.ones_like(amax, dtype=torch.float32)
    scaling[:, SCALE] = torch.where(usable, torch.ldexp(one, e), scaling[:, SCALE])
    scaling[:, INVERSE] = torch.where(usable, torch.ldexp(one, -e), scaling[:, INVERSE])


def fold_statistics(totals_inout: Tensor, statistics: Tensor) -> None:
    """Joins statistics (n, 3, parts) into totals (n, 3) float64: maximum of amax, sums of counts."""
    totals_inout[:, AMAX] = torch.maximum(totals_inout[:, AMAX], statistics[:, AMAX].amax(-1).double())
    for column in (CLIPPED, VANISHED):
        totals_inout[:, column] += statistics[:, column].sum(-1, dtype=torch.float64)


def update_scaling(
    scaling_inout: Tensor,
    history_inout: Tensor,
    totals_inout: Tensor,
    report: Tensor,
    largest_exponents: Tensor,
    controls: Tensor,
    *,
    count_every: int,
    saturation_steps: int,
    widen: bool,
) -> None:
    """Delayed scaling: sets each tensor's scale for the next step from the largest amax of the last `window` steps.

    Moves this step's totals (n, 3) to history (n, window) and, with the scale in use, to report (n, REPORT_PLACES), then
    zeroes them. With `widen`, a tensor with numbers above the format's largest in `saturation_steps` steps in a row gets
    one more binade of margin. Every `count_every`-th step counts clipped and vanished numbers.
    largest_exponents (n) is int32."""
    step = int(controls[CONTROL_STEP])
    amax, scaling = totals_inout[:, AMAX].float(), scaling_inout
    limit = torch.ldexp(torch.full_like(amax, formats.LARGEST_MANTISSA), largest_exponents)
    saturated = torch.where(amax * scaling[:, SCALE] > limit, scaling[:, formats.SATURATED_STEPS] + 1, 0.0)
    report[:, : formats.STATISTICS_PLACES] = totals_inout
    report[:, formats.USED_SCALE], report[:, formats.SATURATED] = scaling[:, SCALE], saturated
    if widen:
        due = saturated >= saturation_steps
        scaling[:, MARGIN] += due.float()
        saturated = torch.where(due, 0.0, saturated)
    scaling[:, formats.SATURATED_STEPS] = saturated
    history_inout[:, step % history_inout.shape[1]] = torch.where(torch.isfinite(amax), amax, 0.0)
    write_scales(scaling, history_inout.amax(1), largest_exponents)
    scaling[:, COUNTING] = float((step + 1) % count_every == 0)
    totals_inout.zero_()
