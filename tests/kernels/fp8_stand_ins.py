"""Stand-ins for what Triton's interpreter lacks: PTX, and the hardware's rounding to fp8."""

import numpy as np
import pytest
import triton
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from handgrad.joins.fp8.cuda import activations, attention, classifier, elementwise, layernorm, quantizing, rotary
from handgrad.ops.cuda.activations import gelu, gelu_derivative

MODULES = (activations, attention, classifier, elementwise, layernorm, quantizing, rotary)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every module that has them. The interpreter's exact quotient is not the GPU's, so that bits are compared with the
    plain GELU in the place of the fp8 kernels' own."""
    for module in MODULES:
        for name, function in (("rounded", rounded), ("word", word)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, function)
    monkeypatch.setattr(activations, "gelu_and_derivative", separately)


def rounded(x, scale, TYPE):
    """x * scale as the hardware rounds it; the interpreter's own conversion to fp8 rounds wrongly. In NumPy, on the numbers
    that the interpreter holds: in Triton's language it takes a hundred times as long."""
    mantissa, bias, largest_code = (2, 15, 0x7B) if tl.float8e5 == TYPE else (3, 7, 0x7E)
    y = x * scale
    assert y.dtype == tl.float32
    bits = y.handle.data.view(np.int32)
    sign, magnitude = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    even = (magnitude >> (23 - mantissa)) & 1
    normal = ((magnitude + (1 << (22 - mantissa)) - 1 + even) >> (23 - mantissa)) - ((127 - bias) << mantissa)
    adding = np.float32(2.0 ** (24 - bias - mantissa))  # a sum with it is rounded at the format's smallest number
    small = (np.abs(y.handle.data) + adding).view(np.int32) - ((127 + 24 - bias - mantissa) << 23)
    code = np.where(magnitude < ((128 - bias) << 23), small, np.minimum(normal, largest_code))
    code = np.where(magnitude > 0x7F800000, 0x7F, code)
    return tl.tensor(TensorHandle((code | sign).astype(np.uint8), tl.uint8), y.type.with_element_ty(tl.uint8)).to(
        TYPE, bitcast=True
    )


@triton.jit
def word(a, b, c, d, TYPE: tl.constexpr):
    low = byte(a, TYPE) | (byte(b, TYPE) << 8)
    return low | (byte(c, TYPE) << 16) | (byte(d, TYPE) << 24)


@triton.jit
def byte(x, TYPE: tl.constexpr):
    return rounded(x, 1.0, TYPE).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def separately(x):
    return gelu(x), gelu_derivative(x)
