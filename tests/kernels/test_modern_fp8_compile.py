"""The modern network's kernels that write fp8, compiled for GPUs that are not there: what an H200 needs of them."""

import pytest

pytest.importorskip("triton")

from tests.distributed.runs import Launcher
from tests.kernels.tables import compiled_rows

REGISTER_FILE = 65536
CONVERSIONS = {"fp8e4nv": ["cvt.rn.satfinite.e4m3x2.f32"], "fp8e5": ["cvt.rn.satfinite.e5m2x2.f32"]}


@pytest.fixture(scope="module")
def compiled(launcher: Launcher) -> list[dict]:
    return compiled_rows(launcher, "modern_fp8")


def test_nothing_spills(compiled: list[dict]) -> None:
    assert [row for row in compiled if row["stack"] or row["spills"]] == []


def test_accesses_are_wide(compiled: list[dict]) -> None:
    """Halves of heads are read in pieces of 8 bytes (of 100 channels they begin at multiples of 4), and the transposed form
    written in 16; a norm's forward writes a lane's eight numbers. The backward of mixed streams may copy its rows ahead
    of the loop."""
    for row in compiled:
        heads, ahead = "heads of" in row["kernel"], row["kernel"].startswith("mix_rmsnorm_backward")
        assert max(row["load"], row["copy"] if ahead else 0) >= (4 if "of 100" in row["kernel"] else 8 if heads else 16), (
            row
        )
        assert row["store"] >= (8 if row["kernel"].startswith("rmsnorm_forward") else 16), row


def test_one_instruction_rounds(compiled: list[dict]) -> None:
    """From float32, and once: not by way of float16."""
    assert [row for row in compiled if row["conversions"] != CONVERSIONS[row["form"]]] == []


def test_enough_programs_fit_a_multiprocessor(compiled: list[dict]) -> None:
    """The backward of mixed streams holds five rows, and fetches the next ones meanwhile."""
    for row in compiled:
        least = 8 if row["kernel"].startswith("mix_rmsnorm_backward") else 12 if "heads of" in row["kernel"] else 14
        resident = REGISTER_FILE // (32 * row["warps"] * -(-row["registers"] // 8) * 8)
        assert resident * row["warps"] >= least, row
