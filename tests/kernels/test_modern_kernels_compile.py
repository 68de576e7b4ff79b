"""The kernels of `modern_kernel_table` compiled for a GPU that is not there: nothing spills, and 16-bit numbers move in
16-byte pieces."""

import pytest

pytest.importorskip("triton")

from tests.distributed.runs import Launcher
from tests.kernels.tables import compiled_rows


@pytest.fixture(scope="module")
def compiled(launcher: Launcher) -> list[dict]:
    return compiled_rows(launcher, "modern")


def test_nothing_spills(compiled: list[dict]) -> None:
    assert [row for row in compiled if row["stack"] or row["spills"]] == []


def test_accesses_are_wide(compiled: list[dict]) -> None:
    """But of heads of 100 channels, whose halves begin at multiples of 4 bytes. In 16 bits the backward of mixed streams
    copies its rows ahead of the loop."""
    wide = [row for row in compiled if "heads of 100" not in row["kernel"]]
    narrow = {"classifier_forward"}  # which writes single numbers
    copied = [row["kernel"].startswith("mix_rmsnorm_backward") and row["dtype"] != "fp32" for row in wide]
    loads = [row["copy"] if ahead else row["load"] for row, ahead in zip(wide, copied, strict=True)]
    stores = [16 if row["kernel"] in narrow else row["store"] for row in wide]
    assert [row for row, *widths in zip(wide, loads, stores, strict=True) if min(widths) < 16] == []
