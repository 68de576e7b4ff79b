"""fp8 tensors for GEMMs, and their scales.

fp8(x) = x * scale, rounded to the nearest number of the format (ties to even). Larger numbers and infinities saturate
to the format's largest; NaN stays NaN. x is first rounded to the activations' 16-bit dtype, so that every kernel quantises
to the same bits. A scale is a power of two: it changes only the exponent.

The formats (Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433): e4m3 with 3 bits of mantissa, magnitudes from
2^-9 to 448; e5m2 with 2 bits, from 2^-16 to 57344.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# Formats of (the blocks' gradients, the columns of `wide` gradients in `networks.network.Fp8`). A wide gradient's two forms
# share one scale, so columns in e5m2 reach 2^7 below rows in e4m3.
GradientFormats = tuple[torch.dtype, torch.dtype]
GRADIENT_FORMATS: dict[str, GradientFormats] = {"e4m3": (E4M3, E4M3), "e5m2": (E5M2, E5M2), "mixed": (E4M3, E5M2)}

# Both formats' largest number is 1.75 * 2^e.
LARGEST_MANTISSA = 1.75
LARGEST_EXPONENT = {E4M3: 8, E5M2: 15}
# Numbers up to half of the format's smallest round to zero.
VANISHES_AT = {E4M3: 2.0**-10, E5M2: 2.0**-17}
# Limits scales so that they and their inverses are normal float32 numbers.
LARGEST_SCALE_EXPONENT = 100

# Indices in a row of `scaling` (float32), one row per quantised tensor. The inverse scale comes first and rows are 32 bytes
# apart, because cuBLASLt requires its address to be a multiple of 16.
INVERSE, SCALE, COUNTING, MARGIN, SATURATED_STEPS = range(5)
SCALING_PLACES = 8

# Indices in `statistics` (places, parts) and in a row of `totals` and `report`: the largest |x| and, if `scaling` turns
# counting on, how many numbers exceeded the format's largest and how many vanished.
AMAX, CLIPPED, VANISHED = range(3)
STATISTICS_PLACES = 3
# Further indices in the report: the scale in use, and for how many steps in a row some numbers were too large for it.
USED_SCALE, SATURATED = 3, 4
REPORT_PLACES = 5


def largest_number(kind: torch.dtype) -> float:
    """The largest number of an fp8 format."""
    return LARGEST_MANTISSA * 2.0 ** LARGEST_EXPONENT[kind]


def largest_scale(amax: float, kind: torch.dtype, margin: int) -> float:
    """The scale for numbers up to `amax` (finite, above 0), as in the reference's `write_scales`: the largest power of two
    that clips none of them, reduced by `margin` binades."""
    mantissa, exponent = math.frexp(amax)  # amax = mantissa 2^exponent, 1/2 <= mantissa < 1
    e = LARGEST_EXPONENT[kind] - (exponent - 1) - (mantissa > LARGEST_MANTISSA / 2) - margin
    return 2.0 ** max(-LARGEST_SCALE_EXPONENT, min(LARGEST_SCALE_EXPONENT, e))


# Lookup table for e4m3, because torch on a CPU widens this format without vector instructions.
NUMBERS_OF_E4M3 = torch.arange(256, dtype=torch.uint8).view(E4M3).float()


def widened(form: Tensor) -> Tensor:
    """An fp8 tensor in float32."""
    if form.dtype != E4M3 or form.device.type != "cpu":
        return form.float()
    return NUMBERS_OF_E4M3.index_select(0, form.view(torch.uint8).reshape(-1).int()).view(form.shape)


@dataclass(frozen=True)
class Quantized:
    """An activation, a gradient or a weight (N, C) in the forms that its readers need; other forms are None.

    A GEMM runs in fp8 if both operands have the right form. The forward reads `rows` of input and weight; the input
    gradient reads `rows` of the output gradient and `columns` of the weight; the weight gradient reads `columns` of both.
    Otherwise the GEMM reads `plain` of both."""

    rows: Tensor | None  # (N, C) fp8
    columns: Tensor | None  # (C, N) fp8: transposed
    scaling: Tensor  # (SCALING_PLACES) float32
    statistics: Tensor  # (STATISTICS_PLACES, parts) float32, one part per program; unused parts are 0
    plain: Tensor | None = None  # (N, C) in 16 bits
    current: bool = False  # current scaling: this tensor sets its own scale, not earlier steps
    workspace: Tensor | None = None  # (N, C) in 16 bits: the gradient from which this one is computed

    def __getitem__(self, rows: slice) -> "Quantized":
        """A slice of rows. `columns` keeps its stride."""
        assert self.workspace is None
        part = {name: None if (form := getattr(self, name)) is None else form[rows] for name in ("rows", "plain")}
        return replace(self, columns=None if self.columns is None else self.columns[:, rows], **part)

    @property
    def shape(self) -> torch.Size:
        """(N, C)"""
        form = self.plain if self.rows is None else self.rows
        if form is not None:
            return form.shape
        assert self.columns is not None
        return self.columns.shape[::-1]

    @property
    def format(self) -> torch.dtype:
        form = self.rows if self.rows is not None else self.columns
        assert form is not None
        return form.dtype

    @property
    def inverse_scale(self) -> Tensor:
        """(1): the value of an fp8 1."""
        return self.scaling[INVERSE : INVERSE + 1]


Form = Tensor | Quantized  # of an activation, a gradient or a weight, for the operations of the fp8 backends


def plain(form: Form) -> Tensor:
    """The 16-bit form."""
    if isinstance(form, Tensor):
        return form
    assert form.plain is not None, "this tensor has no 16-bit form"
    return form.plain


def on_plain(operation: Callable[..., Any], in_16_bits: Callable[[Form], Tensor] = plain) -> Callable[..., Any]:
    """Wraps an operation so that it reads the 16-bit form of each tensor argument."""

    @wraps(operation)
    def call(*arguments: Any, **options: Any) -> Any:
        return operation(*(in_16_bits(x) if isinstance(x, Quantized) else x for x in arguments), **options)

    return call


def plain_or_workspace(form: Form) -> Tensor:
    """The 16-bit form, or dqkv's `workspace`, which holds the same gradient of the values."""
    return plain(form) if isinstance(form, Tensor) or form.workspace is None else form.workspace


Operands = tuple[Tensor, Tensor, tuple[Tensor, Tensor]]  # two fp8 tensors, and the inverse scale (1) of each


def fp8_operands(left: Form, left_form: str, right: Form, right_form: str) -> Operands | None:
    """Both operands in the forms ("rows" or "columns") that a GEMM reads, or None if it must read 16 bits."""
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return None
    a, b = getattr(left, left_form), getattr(right, right_form)
    return None if a is None or b is None else (a, b, (left.inverse_scale, right.inverse_scale))
