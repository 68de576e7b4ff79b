"""Muon's kernels in float32 by Triton's interpreter, where there is no GPU (tests/gpu has the same on one), and compiled
for GPUs that are not there."""

import os

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("a GPU runs tests/gpu/test_muon_on_gpu.py", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: it decides what @triton.jit makes of a kernel
pytest.importorskip("triton")

from handgrad.ops import sizes
from handgrad.ops.cuda import muon
from tests.distributed.runs import Launcher
from tests.kernels import muon_checks as checks
from tests.kernels.memory_checks import Draw, check
from tests.kernels.tables import compiled_rows

SHAPES = [(1, 5), (24, 8), (40, 100), (96, 32), (45, 45)]


@pytest.fixture
def draw() -> Draw:
    return Draw(torch.float32, "cpu")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product has several tiles, every sum several parts and turns, as at real sizes."""
    monkeypatch.setattr(muon, "SIDE", 32)
    monkeypatch.setattr(muon, "DEPTH", 32)
    monkeypatch.setattr(sizes, "SUM_ELEMENTS", 2048)
    monkeypatch.setattr(muon, "FLAT_ELEMENTS", 1024)
    monkeypatch.setattr(muon, "MOMENT_COLUMNS", 32)
    monkeypatch.setattr(muon, "WEIGHT_COLUMNS", 32)
    monkeypatch.setattr(muon, "PARTIALS", 2)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("step", [1, 150, 900])
@pytest.mark.parametrize("shape", SHAPES)
def test_momentum(draw: Draw, shape: tuple[int, int], step: int) -> None:
    check(checks.momentum(draw, *shape, step))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("shape", SHAPES[1:])  # of one singular value the error is a matter of luck
def test_polar(draw: Draw, shape: tuple[int, int]) -> None:
    check(checks.polar(draw, 2, *shape))


def test_polar_with_its_own_tiles(draw: Draw) -> None:
    check(checks.polar(draw, 1, 140, 200))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("shape", SHAPES)
def test_update(draw: Draw, shape: tuple[int, int]) -> None:
    check(checks.update(draw, *shape))


@pytest.mark.usefixtures("small_tiles")
def test_a_matrix_has_the_same_bits_in_any_batch(draw: Draw) -> None:
    checks.check_batches(draw, 3, 24, 8)


def test_a_matrix_of_zeros_stays(draw: Draw) -> None:
    inputs, run = checks.polar(draw, 1, 8, 24)
    assert not run(checks.kernels, {"x": torch.zeros_like(inputs["x"])})["polar"].any()


def test_a_step_that_is_skipped_moves_nothing(draw: Draw) -> None:
    checks.check_no_update(draw)


def test_the_whole_update(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over matrices of two shapes, one after the other, in batches of up to two."""
    monkeypatch.setattr("handgrad.optimizers.muon.BATCH_ELEMENTS", 2 * 24 * 8)
    checks.check_optimizer(draw, [(24, 8), (8, 24), (24, 8), (24, 8)], floor=1e-5)


@pytest.fixture(scope="module")
def compiled(launcher: Launcher) -> list[dict]:
    return compiled_rows(launcher, "muon")


def test_nothing_spills(compiled: list[dict]) -> None:
    assert [row for row in compiled if row["stack"] or row["spills"] or row["serialized"]] == []


def test_accesses_are_wide(compiled: list[dict]) -> None:
    """16 bytes at a time, or 16-byte copies to shared memory; sums are written one by one."""
    assert {row["kernel"] for row in compiled if row["load"] < 16 and not row["wide_copies"]} == set()
    assert {row["kernel"] for row in compiled if row["store"] < 16} == {"squares", "moments"}


def test_two_programs_of_a_product_fit_a_multiprocessor_of_hopper(compiled: list[dict]) -> None:
    """On the tensor cores, from copies under way: 227 KB and 65,536 registers."""
    products = [row for row in compiled if row["arch"] == 90 and row["wide_copies"]]
    assert len(products) == 5 and all(row["wgmma"] for row in products)
    for row in products:
        assert 2 * (row["shared"] + 1024) <= 227 << 10, row
        assert 2 * 32 * row["warps"] * -(-row["registers"] // 8) * 8 <= 65536, row
