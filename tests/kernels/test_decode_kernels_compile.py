"""The kernels of generation compiled for GPUs that are not there: nothing spills. A product asks for its tile of the weight
(of a program with many tiles for the first two) before it waits for the kernel before it, and for nothing of that
kernel's.
"""

import pytest

pytest.importorskip("triton")

from tests.distributed.runs import Launcher
from tests.kernels.tables import compiled_rows


@pytest.fixture(scope="module")
def compiled(launcher: Launcher) -> list[dict]:
    return compiled_rows(launcher, "decode")


def test_nothing_spills(compiled: list[dict]) -> None:
    assert len(compiled) == 153 and [row for row in compiled if row["stack"]] == []


def test_weights_are_asked_for_before_waiting(compiled: list[dict]) -> None:
    products = [row for row in compiled if row["tile_bytes"] and row["arch"] >= 90]
    assert len(products) == 48
    for row in products:
        assert row["weight_bytes_before_waiting"] >= row["tiles"] * row["tile_bytes"], row
    ahead = {row["kernel"] for row in products if row["tiles"] == 2}
    assert ahead == {"head of 768", "head of 1600"}


def test_a_residual_is_read_after_waiting(compiled: list[dict]) -> None:
    """Two numbers of it are a copy that the compiler would take out of the loop."""
    rows = [row for row in compiled if row["kernel"] == "proj of 4096" and row["arch"] >= 90]
    assert [(row["shared"] > 1 << 14, row["small_copies_before_waiting"]) for row in rows] == [(True, 0)] * 2
