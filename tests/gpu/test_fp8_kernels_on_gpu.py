"""The kernels that quantise on a CUDA GPU, real sizes and odd ones: bit for bit what the reference makes of 16 bits."""

import math
from types import ModuleType
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs a GPU that computes in fp8", allow_module_level=True)

from handgrad.joins.fp8 import formats as fp8, reference
from handgrad.joins.fp8.cuda import quantizing as kernels
from handgrad.joins.fp8.formats import E4M3, E5M2
from handgrad.joins.fp8.sizes import QUANTIZE_TILE, tiles
from handgrad.ops import CONTROL_STEP, CONTROLS
from tests.kernels import fp8_checks as checks, layernorm_fp8_checks
from tests.kernels.memory_checks import Draw

formats = pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)
counting = pytest.mark.parametrize("counting", [True, False])
ODD = [(208, 80), (65, 130), (1, 8), (333, 100)]


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def draw(request: pytest.FixtureRequest) -> Draw:
    return Draw(request.param, "cuda")


@formats
@counting
@pytest.mark.parametrize(("N", "C"), [*ODD, (65536, 768), (2304, 768), (6400, 1600)])
def test_quantize(draw: Draw, N: int, C: int, kind: torch.dtype, counting: bool) -> None:
    checks.quantize(draw, N, C, kind, counting=counting)


@formats
def test_every_16_bit_number(draw: Draw, kind: torch.dtype) -> None:
    """Infinities become the largest number; NaN, whose sign does not matter, stays NaN and counts nowhere."""
    inp = torch.arange(1 << 16, device="cuda").to(torch.int16).view(draw.dtype).view(512, 128)
    for scale in (2.0**-20, 1.0, 2.0**9):
        found = checks.make(512, 128, tiles(512, 128, QUANTIZE_TILE), kind, "cuda", scale=scale)
        expected = checks.copy(found)
        kernels.quantize(found, inp)
        reference.quantize(expected, inp)
        assert found.rows is not None and expected.rows is not None
        torch.testing.assert_close(found.rows.float(), expected.rows.float(), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(checks.totals(found), checks.totals(expected))


@formats
@pytest.mark.parametrize(("N", "C"), [*ODD, (65536, 768), (4096, 50304)])
def test_transpose(N: int, C: int, kind: torch.dtype) -> None:
    checks.transpose(Draw(torch.bfloat16, "cuda"), N, C, kind)


@formats
@pytest.mark.parametrize(("N", "C", "tail"), [(208, 80, 16), (65, 130, 64), (4096, 50304, 1008)])
def test_transpose_of_a_tail(N: int, C: int, tail: int, kind: torch.dtype) -> None:
    checks.transpose_tail(Draw(torch.bfloat16, "cuda"), N, C, tail, kind)


@formats
def test_rescale(kind: torch.dtype) -> None:
    checks.rescale("cuda", kind)


@pytest.mark.parametrize("widen", [True, False])
@pytest.mark.parametrize(("tensors", "parts", "window"), [(5, 5001, 6), (700, 4096, 16), (8, 50_000, 100)])
def test_scaling_over_steps(tensors: int, parts: int, window: int, widen: bool) -> None:
    checks.scaling_over_steps("cuda", tensors=tensors, parts=parts, window=window, widen=widen)


@formats
@counting
@pytest.mark.parametrize(("N", "C"), [*ODD, (65536, 768), (16384, 1600)])
def test_layernorm_forward(draw: Draw, N: int, C: int, kind: torch.dtype, counting: bool) -> None:
    layernorm_fp8_checks.layernorm_forward(draw, N, C, kind, counting=counting)


@formats
@counting
@pytest.mark.parametrize(("N", "C"), [*ODD, (65536, 768), (16384, 1600)])
def test_layernorm_backward(draw: Draw, N: int, C: int, kind: torch.dtype, counting: bool) -> None:
    layernorm_fp8_checks.layernorm_backward(draw, N, C, kind, counting=counting)


@formats
@pytest.mark.parametrize(("N", "V", "Vp"), [(1024, 50257, 50304), (5, 57, 128), (3, 16384, 16384)])
def test_classifier(draw: Draw, N: int, V: int, Vp: int, kind: torch.dtype) -> None:
    checks.classifier_forward_backward(draw, N, V, Vp, kind)


def test_a_captured_step_follows_its_buffers() -> None:
    """Quantising, folding and rescaling, recorded once, read the data and the step that stand there when replayed."""
    N, C = 256, 384
    inp = torch.empty(N, C, dtype=torch.bfloat16, device="cuda")
    start = checks.make(N, C, tiles(N, C, QUANTIZE_TILE), E4M3, "cuda", counting=False)

    def fresh() -> dict[str, Any]:
        report = torch.full((1, fp8.REPORT_PLACES), math.nan, dtype=torch.float64, device="cuda")
        tables = {"history": torch.zeros(1, 4, device="cuda"), "totals": torch.zeros(1, 3, device="cuda").double()}
        return {"tensor": checks.copy(start), "report": report, **tables}

    ours, theirs = fresh(), fresh()
    exponents = torch.tensor([fp8.LARGEST_EXPONENT[E4M3]], dtype=torch.int32, device="cuda")
    controls = torch.zeros(CONTROLS, dtype=torch.float64, device="cuda")

    def step(backend: ModuleType, state: dict[str, Any]) -> None:
        tensor = state["tensor"]
        backend.quantize(tensor, inp)
        backend.fold_statistics(state["totals"], tensor.statistics.unsqueeze(0))
        tables = tensor.scaling.unsqueeze(0), state["history"], state["totals"], state["report"]
        backend.update_scaling(*tables, exponents, controls, count_every=2, saturation_steps=2, widen=True)

    inp.zero_()
    step(kernels, fresh())  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(kernels, ours)
    draw = Draw(torch.bfloat16, "cuda")
    for number in range(1, 9):
        inp.copy_(checks.wide(draw, N, C) * 2.0 ** (number * 3 % 7))
        controls[CONTROL_STEP] = number
        graph.replay()
        step(reference, theirs)
        checks.same(ours["tensor"], theirs["tensor"])
        assert torch.equal(ours["report"], theirs["report"]) and torch.equal(ours["history"], theirs["history"])
