"""Quantised tensors drawn and compared, for `fp8`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.joins.fp8 import reference
from handgrad.joins.fp8.formats import (
    AMAX,
    CLIPPED,
    COUNTING,
    E4M3,
    INVERSE,
    SCALE,
    SCALING_PLACES,
    STATISTICS_PLACES,
    Quantized,
)
from handgrad.ops.cases import B, C, Draw, F, H, N, T, Vp
from handgrad.tools.kernel_checks.checking import Compared

# The tensor cores add fp8 products up in fewer bits than float32 has: the error that a GEMM may have beyond the rounding of
# its result.
FP8_SUMS = 2.0**-10


class Fp8Draw(Draw):
    """Draws quantised tensors as well, with room for the statistics of a backend."""

    def __init__(self, ops: ModuleType, device: torch.device):
        super().__init__(torch.bfloat16, device)
        sizes = {"batch": B, "length": T, "channels": C, "feed_forward": F, "widest": 2 * F, "padded_vocab_size": Vp}
        self.parts = max(ops.statistics_parts(num_heads=n, head_width=C // n, **sizes) for n in (1, H))

    def output(self, shape: Sequence[int], form: torch.dtype, exponent: int, **changes: Any) -> Quantized:
        """Forms of a tensor of this shape, full of NaN, at a scale of 2^exponent."""
        rows, columns = (
            torch.full(sides, 0x7F, dtype=torch.uint8, device=self.device).view(form)
            for sides in (tuple(shape), tuple(shape)[::-1])
        )
        scaling = torch.zeros(SCALING_PLACES, device=self.device)
        scaling[SCALE], scaling[INVERSE], scaling[COUNTING] = 2.0**exponent, 2.0**-exponent, 1.0
        statistics = torch.zeros(STATISTICS_PLACES, self.parts, device=self.device)
        return replace(Quantized(rows, columns, scaling, statistics), **changes)

    def product(self, O: int, I: int) -> tuple[Quantized, Quantized]:
        """Input and weight of a GEMM, scaled so that its result keeps the size of its input."""
        return self.operand(self(N, I)), self.operand(self(O, I, scale=I**-0.5))

    def operand(self, x: Tensor, form: torch.dtype = E4M3) -> Quantized:
        """x in fp8, at the scale that suits it."""
        made = self.output(x.shape, form, 0, current=True)
        reference.quantize(made, x)
        return made


Fp8Case = Callable[[ModuleType, Fp8Draw], Compared]


def numbers(tensor: Quantized) -> Tensor:
    """The numbers that a tensor in fp8 stands for, in float64."""
    if tensor.rows is not None:
        return tensor.rows.double() * tensor.inverse_scale
    assert tensor.columns is not None
    return tensor.columns.t().double() * tensor.inverse_scale


def requantized(found: Quantized, scaling: Tensor, plain: Tensor, *, counted: bool = True) -> Compared:
    """Compares a quantised tensor with the reference's, made from the 16-bit `plain` at the `scaling` from before."""
    rows, columns = (None if form is None else torch.empty_like(form) for form in (found.rows, found.columns))
    right = Quantized(rows, columns, scaling, torch.zeros_like(found.statistics), current=found.current)
    reference.quantize(right, plain)
    for made, wanted in ((found.rows, right.rows), (found.columns, right.columns)):
        if made is not None and wanted is not None:
            yield made.float(), wanted.float(), 0
    if counted:
        yield found.scaling, right.scaling, 0
        yield found.statistics[AMAX].amax(), right.statistics[AMAX].amax(), 0
        yield found.statistics[CLIPPED:].sum(1), right.statistics[CLIPPED:].sum(1), 0


def product(found: Tensor, exact: Tensor) -> tuple[Tensor, Tensor, float]:
    return found, exact, torch.finfo(found.dtype).eps / 2 + FP8_SUMS
