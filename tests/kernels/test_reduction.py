"""Sums in a fixed order, by the reference and, in float32, by Triton's interpreter where there is no GPU."""

import os
from types import ModuleType

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("a GPU runs tests/gpu/test_memory_kernels_on_gpu.py", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: it decides what @triton.jit makes of a kernel
pytest.importorskip("triton")

from handgrad.ops import reference
from handgrad.ops.reference import reduction
from tests.kernels import reduction_checks as checks
from tests.kernels.memory_checks import Draw, kernels

DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.int64]


@pytest.fixture(params=[reference, kernels], ids=["reference", "kernels"])
def backend(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


@pytest.fixture
def draw() -> Draw:
    return Draw(torch.float32, "cpu")


@pytest.mark.parametrize("kind", ["exact", "rounded", "sent as bf16"])
@pytest.mark.parametrize("n", checks.SIZES)
@pytest.mark.parametrize("P", checks.ROWS)
def test_tree_sum(backend: ModuleType, draw: Draw, P: int, n: int, kind: str) -> None:
    checks.check_tree(backend, draw, P, n, rounded=kind != "exact", sent=kind == "sent as bf16")


@pytest.mark.parametrize("P", checks.ROWS)
def test_tree_sum_in_float64(P: int) -> None:
    draw = Draw(torch.float64, "cpu")
    checks.check_tree(reference, draw, P, 131, rounded=False)
    pieces = draw.normal(P, 131)
    out = torch.empty(131, dtype=torch.float64)
    reference.tree_sum(out, pieces, rounded=False)
    torch.testing.assert_close(out, pieces.sum(0), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("P", checks.ROWS)
def test_out_may_be_a_row(backend: ModuleType, draw: Draw, P: int, rounded: bool) -> None:
    checks.check_aliasing(backend, draw, P, rounded)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_cut_tree_has_the_same_bits(backend: ModuleType, draw: Draw, world: int, rounded: bool) -> None:
    checks.check_cuts(backend, draw, world, rounded)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of infinity minus infinity
@pytest.mark.parametrize("rounded", [False, True])
def test_what_is_not_finite_stays_so(backend: ModuleType, draw: Draw, rounded: bool) -> None:
    checks.check_not_finite(backend, draw, rounded)


@pytest.mark.parametrize("n", [1, 131, 40_009])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_checksum(backend: ModuleType, draw: Draw, dtype: torch.dtype, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "CHUNK", 1000)
    checks.check_checksum(backend, draw, dtype, n)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_checksum_sees(backend: ModuleType, draw: Draw, dtype: torch.dtype) -> None:
    checks.check_checksum_sees(backend, draw, dtype)


@pytest.mark.parametrize(("n", "first"), [(1, 0), (131, 4090), (40_009, 0), (9001, 70_000)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_digest(backend: ModuleType, draw: Draw, dtype: torch.dtype, n: int, first: int) -> None:
    checks.check_digest(backend, draw, dtype, n, first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_digest_sees(backend: ModuleType, draw: Draw, dtype: torch.dtype) -> None:
    checks.check_digest_sees(backend, draw, dtype)


@pytest.mark.parametrize("lanes", [1, 2, 3, 16])
def test_losses_of_lanes_are_added_in_order(backend: ModuleType, lanes: int) -> None:
    checks.check_losses_in_order(backend, "cpu", lanes)
