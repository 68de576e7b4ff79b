"""The kernels of generation compiled for GPUs that are not there: nothing spills, and a product asks for two tiles of the
weight before it waits for the kernel before it."""

import pytest

pytest.importorskip("triton")

from tests.kernels.tables import compiled_rows


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    return compiled_rows("decode_kernel_table")


def test_nothing_spills(compiled: list[dict]) -> None:
    assert len(compiled) == 156 and [row for row in compiled if row["stack"]] == []


def test_weights_are_asked_for_before_waiting(compiled: list[dict]) -> None:
    products = [row for row in compiled if row["tile_bytes"] and row["arch"] >= 90]
    assert len(products) == 70
    for row in products:
        assert row["weight_bytes_before_waiting"] >= 2 * row["tile_bytes"], row  # two tiles
