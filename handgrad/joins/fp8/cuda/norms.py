"""The norms' kernels that also write fp8: the rows beside the 16-bit ones or instead of them, their transpose by a kernel
of its own."""

from collections.abc import Callable
from typing import Any, TypeGuard

import triton
from torch import Tensor

from handgrad.joins.fp8.cuda.quantizing import at_own_scale, limits, quantize, target, transpose_rows
from handgrad.joins.fp8.formats import Form, Quantized, plain
from handgrad.ops.cuda.launch import launch
from handgrad.ops.sizes import forward_tile


def norm_forward(
    out: Form, in_16_bits: Callable[[Tensor], None], kernel: Any, *tensors: Any, mixed: tuple[Tensor | None, ...] = ()
) -> None:
    """Fills out (N, C) with `in_16_bits`, which quantises nothing, if it has no rows; else with `kernel`, which takes
    `mixed`, the forms of out and `tensors`."""
    if isinstance(out, Tensor) or out.rows is None:
        in_16_bits(plain(out))
        quantize_plain(out)
        return
    N, C = out.shape
    block, rows, warps = forward_tile(C)
    forms = out.plain, out.rows, *target(out, triton.cdiv(N, rows))
    arguments = *mixed, *forms, *tensors, N, C, block, rows, *limits(out)
    at_own_scale(out, lambda: launch(kernel, (triton.cdiv(N, rows),), *arguments, num_warps=warps))
    transpose_rows(out)


def updated_in_fp8(dresidual: Form) -> TypeGuard[Quantized]:
    """True if the kernel that updates the stream's gradient also quantises it. Without rows, or with a scale that is made
    from the result, another kernel reads it once more: it cannot be updated twice."""
    return isinstance(dresidual, Quantized) and not dresidual.current and dresidual.rows is not None


def quantize_plain(tensor: Form) -> None:
    """Quantises the 16-bit form, of a tensor with others."""
    if isinstance(tensor, Quantized):
        quantize(tensor, plain(tensor))
