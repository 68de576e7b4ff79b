"""Checks of the kernels that quantise, for the interpreter on a CPU and for a GPU alike.

What a kernel writes in fp8 must be, bit for bit, what the reference's `quantize` makes of the 16-bit output of the same
kernel. Outputs and unused statistics hold what must be overwritten, or must stay.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from handgrad.joins.fp8 import formats, reference
from handgrad.joins.fp8.cuda import classifier, quantizing as kernels
from handgrad.joins.fp8.formats import AMAX, CLIPPED, COUNTING, INVERSE, MARGIN, SCALE, VANISHED, Quantized
from handgrad.joins.fp8.reference import quantizing
from handgrad.joins.fp8.sizes import QUANTIZE_TILE, tiles
from handgrad.ops import CONTROL_STEP, CONTROLS
from tests.kernels.memory_checks import Draw

# Scales at which some numbers of `wide` are too large for a format; in e4m3 some vanish at the same scale.
SCALES = {formats.E4M3: 64.0, formats.E5M2: 8192.0}
SPARE = 5  # parts that nothing writes
NAN = 0x7F  # NaN in both formats


def make(
    N: int,
    C: int,
    parts: int,
    kind: torch.dtype,
    device: str,
    *,
    scale: float = 1.0,
    counting: bool = True,
    columns_kind: torch.dtype | None = None,
) -> Quantized:
    """Both forms full of NaN, and room for statistics, full of zeros."""
    shapes = ((N, C), kind), ((C, N), columns_kind or kind)
    rows, columns = (torch.full(shape, NAN, dtype=torch.uint8, device=device).view(form) for shape, form in shapes)
    scaling = torch.zeros(formats.SCALING_PLACES, device=device)
    scaling[SCALE], scaling[INVERSE], scaling[COUNTING] = scale, 1 / scale, float(counting)
    return Quantized(rows, columns, scaling, torch.zeros(formats.STATISTICS_PLACES, parts + SPARE, device=device))


def copy(tensor: Quantized) -> Quantized:
    forms: dict[str, Any] = {
        name: None if (form := getattr(tensor, name)) is None else form.clone() for name in ("rows", "columns", "plain")
    }
    return replace(tensor, scaling=tensor.scaling.clone(), statistics=tensor.statistics.clone(), **forms)


def wide(draw: Draw, *shape: int) -> Tensor:
    """Magnitudes from 2^-14 to 2^4, and zeros."""
    x = draw.normal(*shape, dtype=torch.float32) * torch.exp2(draw.integers(16, *shape).float() - 13)
    return (x * (draw.integers(20, *shape) > 0)).to(draw.dtype)


def codes(form: Tensor | None) -> Tensor | None:
    return None if form is None else form.view(torch.uint8)


def same(found: Quantized, expected: Quantized) -> None:
    """The same forms, scale and statistics; these are in other parts."""
    for name in ("rows", "columns"):
        ours, theirs = codes(getattr(found, name)), codes(getattr(expected, name))
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert torch.equal(ours, theirs), f"{name}: {(ours != theirs).sum()} of {ours.numel()} differ"
            assert (ours & 0x7F).max() > 8, "all zero shows nothing"
    assert torch.equal(found.scaling, expected.scaling)
    ours, theirs = totals(found), totals(expected)
    # The reference's counts come in one part, whose float32 is exact up to 2^24 numbers.
    exact = torch.equal(ours, theirs.to(ours)) or torch.equal(ours.float(), theirs.float())
    assert exact, f"statistics {ours.tolist()}, {theirs.tolist()} expected"


def totals(tensor: Quantized) -> Tensor:
    sums = tensor.statistics.double().sum(1)
    sums[AMAX] = tensor.statistics[AMAX].max()
    return sums


def forms_of(tensor: Quantized) -> dict[str, Quantized]:
    """The forms of a tensor that readers may want."""
    only = {"rows": replace(tensor, columns=None), "columns": replace(tensor, rows=None)}
    return {"both": tensor, **only, "current": replace(tensor, current=True)}


def quantize(draw: Draw, N: int, C: int, kind: torch.dtype, *, counting: bool) -> None:
    inp = wide(draw, N, C)
    inp[0, 0], inp[-1, -1] = math.inf if N == 1 else 3.0, -17.0
    parts = tiles(N, C, QUANTIZE_TILE)
    tensor = make(N, C, parts, kind, draw.device, scale=SCALES[kind], counting=counting)
    tensor.statistics[:, parts:] = 1e-3  # of an operation with more parts
    for found in map(copy, forms_of(tensor).values()):
        expected = replace(copy(found), statistics=torch.zeros_like(found.statistics))
        reference.quantize(expected, inp)
        kernels.quantize(found, inp)
        same(found, expected)
        if counting and not found.current and N * C > 1000:
            assert totals(found)[CLIPPED] > 0 and (totals(found)[VANISHED] > 0 or kind == formats.E5M2)
        written = copy(tensor)
        kernels.write_forms(written, inp)
        assert torch.equal(written.statistics, tensor.statistics) and torch.equal(written.scaling, tensor.scaling)


def transpose(draw: Draw, N: int, C: int, kind: torch.dtype) -> None:
    tensor = make(N, C, 0, kind, draw.device)
    rows = draw.integers(256, N, C).to(torch.uint8).view(kind)
    assert tensor.columns is not None
    kernels.transpose(tensor.columns, rows)
    assert torch.equal(tensor.columns.view(torch.uint8), rows.view(torch.uint8).t())


def transpose_tail(draw: Draw, N: int, C: int, tail: int, kind: torch.dtype) -> None:
    """The first `tail` rows of a buffer of N, which is transposed as a whole."""
    tensor = replace(make(N, C, 0, kind, draw.device), rows=draw.integers(256, N, C).to(torch.uint8).view(kind))
    part = tensor[:tail]
    assert part.rows is not None and part.columns is not None
    kernels.transpose_rows(part)
    assert torch.equal(part.columns.view(torch.uint8), part.rows.view(torch.uint8).t())


AMAXES = (0.0, math.inf, 1e-45, 2.0**-127, 2.0**-126, 1.0, 1.75, math.nextafter(1.75, 2), 448.0, 449.0, 3e38, 0.3)


def rescale(device: str, kind: torch.dtype) -> None:
    for margin in (0, 1, 3):
        for amax in AMAXES:
            tensor = make(1, 1, 700, kind, device, scale=8.0)
            tensor.scaling[MARGIN], tensor.statistics[AMAX, 333] = margin, amax
            expected = copy(tensor)
            quantizing.rescale_to(expected, expected.statistics[AMAX].max())
            kernels.rescale(tensor)
            assert torch.equal(tensor.scaling, expected.scaling), (amax, tensor.scaling, expected.scaling)


def scaling_over_steps(device: str, *, tensors: int, parts: int, window: int, widen: bool, steps: int = 12) -> None:
    """Delayed scaling: a tensor that stays zero, one that grows, one with an infinity, one that saturates for long."""
    draw = Draw(torch.float32, device)
    kinds = [formats.E4M3 if i % 2 else formats.E5M2 for i in range(tensors)]
    exponents = torch.tensor([formats.LARGEST_EXPONENT[k] for k in kinds], dtype=torch.int32, device=device)
    scaling = torch.zeros(tensors, formats.SCALING_PLACES, device=device)
    scaling[:, SCALE] = scaling[:, INVERSE] = 1.0
    history = torch.zeros(tensors, window, device=device)
    sums = torch.zeros(tensors, formats.STATISTICS_PLACES, dtype=torch.float64, device=device)
    report = torch.full((tensors, formats.REPORT_PLACES), math.nan, dtype=torch.float64, device=device)
    controls = torch.zeros(CONTROLS, dtype=torch.float64, device=device)
    ours, theirs = ([t.clone() for t in (scaling, history, sums, report)] for _ in range(2))
    settings = {"count_every": 3, "saturation_steps": 2, "widen": widen}
    for step in range(1, steps + 1):
        controls[CONTROL_STEP] = step
        for _ in range(2):  # micro-steps
            statistics = draw.integers(1 << 24, tensors, formats.STATISTICS_PLACES, parts).float()
            statistics[:, AMAX] *= torch.exp2(draw.integers(40, tensors, 1).float() - 40)
            statistics[0] = 0
            statistics[2, AMAX] = 1024.0**step  # more than the last step's scale takes
            if step == 5:
                statistics[-1, AMAX, parts // 2] = math.inf
            kernels.fold_statistics(ours[2], statistics)
            reference.fold_statistics(theirs[2], statistics)
            assert torch.equal(ours[2], theirs[2])
        if step == 9:
            ours[2][1, AMAX] = theirs[2][1, AMAX] = 0
        for backend, (rows, past, found, told) in ((kernels, ours), (reference, theirs)):
            backend.update_scaling(rows, past, found, told, exponents, controls, **settings)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b), (step, a, b)
    saturated, margin = theirs[3][2, formats.SATURATED], theirs[0][2, MARGIN]
    assert (saturated, margin) == ((1, (steps - 1) // 2) if widen else (steps - 1, 0))


def classifier_forward_backward(draw: Draw, N: int, V: int, Vp: int, kind: torch.dtype) -> None:
    logits = draw.normal(N, Vp) * 4
    logits[:, V:] = math.nan
    targets = draw.integers(V, N)
    scale = torch.tensor([0.37], device=draw.device)
    losses = [torch.full((N,), math.nan, device=draw.device) for _ in range(2)]
    plain = logits.clone()
    classifier.classifier_forward_backward(losses[0], plain, targets, scale, vocab_size=V)
    tensor = make(N, Vp, 0, kind, draw.device, scale=512.0)
    tensor.statistics.fill_(7.0)
    for name, form in forms_of(tensor).items():
        found, gradient = copy(form), logits.clone()
        expected = copy(found)
        quantizing.write_forms(expected, plain)
        out = replace(found, plain=gradient)
        classifier.classifier_forward_backward(losses[1], out, targets, scale, vocab_size=V)
        same(found, expected)
        if found.rows is not None:
            assert (found.rows.view(torch.uint8)[:, V:] == 0).all()
        assert torch.equal(gradient, plain) or name in ("both", "current")
        assert torch.equal(losses[0], losses[1])
