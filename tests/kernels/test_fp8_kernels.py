"""The kernels that quantise, in float16 by Triton's interpreter, where there is no GPU (tests/gpu has the same on one)."""

import os
from itertools import product

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("a GPU runs tests/gpu/test_fp8_kernels_on_gpu.py", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: it decides what @triton.jit makes of a kernel
pytest.importorskip("triton")

from handgrad.joins.fp8.cuda import linear
from handgrad.joins.fp8.formats import E4M3, E5M2
from handgrad.ops import sizes
from tests.kernels import fp8_checks as checks, fp8_stand_ins, layernorm_fp8_checks
from tests.kernels.memory_checks import Draw
from tests.kernels.pairs import every_pair


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8_stand_ins.install(monkeypatch)


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
    layernorm_fp8_checks.layernorm_forward(draw, *shape, kind, counting=counting)


@shapes((33, 80), (5, 768), (7, 100))
def test_layernorm_backward(
    draw: Draw, shape: tuple[int, int], kind: torch.dtype, counting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "NORM_PROGRAMS", 3)
    layernorm_fp8_checks.layernorm_backward(draw, *shape, kind, counting=counting)


@pytest.mark.parametrize(("N", "V", "Vp", "kind"), [(5, 57, 128, E4M3), (5, 57, 128, E5M2), (3, 16384, 16384, E5M2)])
def test_classifier(draw: Draw, N: int, V: int, Vp: int, kind: torch.dtype) -> None:
    checks.classifier_forward_backward(draw, N, V, Vp, kind)
