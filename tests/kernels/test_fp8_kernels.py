"""The kernels that quantise, in float16 by Triton's interpreter, where there is no GPU (tests/gpu has the same on one)."""

import os
from itertools import product

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("a GPU runs tests/gpu/test_fp8_kernels_on_gpu.py", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: it decides what @triton.jit makes of a kernel
pytest.importorskip("triton")
import triton
import triton.language as tl

from handgrad.fp8.cuda import classifier, layernorm, linear, quantizing
from handgrad.fp8.formats import E4M3, E5M2
from handgrad.ops.cuda import layernorm as plain_layernorm
from tests.kernels import fp8_checks as checks
from tests.kernels.memory_checks import Draw
from tests.kernels.pairs import every_pair


@triton.jit
def rounded(x, scale, TYPE: tl.constexpr):
    """x * scale as the hardware rounds it; the interpreter's own conversion to fp8 rounds wrongly."""
    if tl.float8e5 == TYPE:
        MANTISSA, BIAS, LARGEST_CODE = 2, 15, 0x7B
    else:
        MANTISSA, BIAS, LARGEST_CODE = 3, 7, 0x7E
    y = x * scale
    bits = y.to(tl.int32, bitcast=True)
    sign, magnitude = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    even = (magnitude >> (23 - MANTISSA)) & 1
    normal = ((magnitude + (1 << (22 - MANTISSA)) - 1 + even) >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA)
    adding = 2.0 ** (24 - BIAS - MANTISSA)  # a sum with it is rounded at the format's smallest number
    small = (tl.abs(y) + adding).to(tl.int32, bitcast=True) - ((127 + 24 - BIAS - MANTISSA) << 23)
    code = tl.where(magnitude < ((128 - BIAS) << 23), small, tl.minimum(normal, LARGEST_CODE))
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | sign).to(tl.uint8).to(TYPE, bitcast=True)


@pytest.fixture(autouse=True)
def exact_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (quantizing, layernorm, classifier):
        monkeypatch.setattr(module, "rounded", rounded)


@pytest.fixture
def draw() -> Draw:
    return Draw(torch.float16, "cpu")


formats = pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)


def shapes(*of: tuple[int, int]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("shape", "kind", "counting"), every_pair(product(of, (E4M3, E5M2), (True, False))))


@shapes((208, 80), (65, 130), (1, 8))
def test_quantize(draw: Draw, shape: tuple[int, int], kind: torch.dtype, counting: bool) -> None:
    checks.quantize(draw, *shape, kind, counting=counting)


@formats
@pytest.mark.parametrize(("N", "C"), [(208, 80), (65, 130), (1, 8)])
def test_transpose(draw: Draw, N: int, C: int, kind: torch.dtype) -> None:
    checks.transpose(draw, N, C, kind)


@pytest.mark.parametrize(("N", "C", "tail"), [(208, 80, 16), (65, 130, 64), (16, 8, 1)])
def test_transpose_of_a_tail(draw: Draw, N: int, C: int, tail: int) -> None:
    checks.transpose_tail(draw, N, C, tail, E5M2)


@formats
def test_rescale(kind: torch.dtype) -> None:
    checks.rescale("cpu", kind)


@pytest.mark.parametrize("widen", [True, False])
def test_scaling_over_steps(widen: bool) -> None:
    checks.scaling_over_steps("cpu", tensors=5, parts=5001, window=6, widen=widen)


def test_fast_sums_are_for_short_sums_and_16_bit_results() -> None:
    """As docs/operations/fp8.md has them: up to 8192 terms, as in a block. Never for the head's input gradient over the
    vocabulary, nor a weight gradient."""
    taken = {(dtype, terms): linear.has_fast_sums(torch.empty(1, dtype=dtype), terms)
             for dtype in (torch.bfloat16, torch.float32) for terms in (768, 8192, 8208, 50304)}  # fmt: skip
    assert [key for key, fast in taken.items() if fast] == [(torch.bfloat16, 768), (torch.bfloat16, 8192)]


@shapes((33, 80), (5, 768), (3, 100))
def test_layernorm_forward(draw: Draw, shape: tuple[int, int], kind: torch.dtype, counting: bool) -> None:
    checks.layernorm_forward(draw, *shape, kind, counting=counting)


@shapes((33, 80), (5, 768), (7, 100))
def test_layernorm_backward(
    draw: Draw, shape: tuple[int, int], kind: torch.dtype, counting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_layernorm, "BACKWARD_PROGRAMS", 3)
    checks.layernorm_backward(draw, *shape, kind, counting=counting)


@pytest.mark.parametrize(("N", "V", "Vp", "kind"), [(5, 57, 128, E4M3), (5, 57, 128, E5M2), (3, 16384, 16384, E5M2)])
def test_classifier(draw: Draw, N: int, V: int, Vp: int, kind: torch.dtype) -> None:
    checks.classifier_forward_backward(draw, N, V, Vp, kind)
