"""The memory-bound kernels compiled for GPUs that are not there: nothing spills, and bf16 moves in 16-byte pieces."""

import pytest

pytest.importorskip("triton")

from tests.distributed.runs import Launcher
from tests.kernels.tables import compiled_rows

# What reads or writes less than 16 bytes at a time, because there is no more: single numbers, and a strip's 64 bytes.
NARROW_STORES = {
    "column sums",
    "partial sums",
    "classifier_forward",
    "embedding parts",
    "loss_sum",
    "squared_norms",
    "checksum",
    "digest",
    "adamw_update rounded, moments of bf16",  # four numbers of two bytes to a lane
    "verdict",
}
# 32 KB of so many rows are less than 16 bytes of each for a lane.
MANY_ROWS = {f"tree_sum of {rows}{kind}" for rows in (16, 64) for kind in ("", ", rounded")}
# How many programs' registers fit a multiprocessor decides how many rows are under way.
MULTIPROCESSORS, REGISTER_FILE = 132, 65536  # of an H200
ROWS_UNDER_WAY = {"classifier_forward_backward": 3, "classifier_forward": 3}  # on each


@pytest.fixture(scope="module")
def compiled(launcher: Launcher) -> list[dict]:
    return compiled_rows(launcher, "memory")


def test_nothing_spills(compiled: list[dict]) -> None:
    assert [row for row in compiled if row["stack"] or row["spills"]] == []


def test_accesses_are_wide(compiled: list[dict]) -> None:
    assert {row["kernel"] for row in compiled if row["load"] < 16} <= MANY_ROWS
    narrow = {row["kernel"] for row in compiled if row["store"] < 16}
    assert narrow <= NARROW_STORES | MANY_ROWS, narrow - NARROW_STORES


def test_registers_leave_room(compiled: list[dict]) -> None:
    """All programs of the layer norm's backward run at once; of the classifier, three rows on every multiprocessor of an
    H200."""
    for row in compiled:
        if row["dtype"] != "fp32" and row["arch"] >= 90:
            resident = REGISTER_FILE // (32 * row["warps"] * -(-row["registers"] // 8) * 8)
            if row["kernel"].startswith("layernorm_backward"):
                assert resident * MULTIPROCESSORS >= (512 if row["C"] == 768 else 256), row
            assert resident >= ROWS_UNDER_WAY.get(row["kernel"], 1), row
