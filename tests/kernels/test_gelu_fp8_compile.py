"""The GELU kernels that write fp8, compiled for GPUs that are not there: what an H200 needs of them to be fast."""

import pytest

pytest.importorskip("triton")

from tests.distributed.runs import Launcher
from tests.kernels.tables import compiled_rows

REGISTER_FILE = 65536


@pytest.fixture(scope="module")
def compiled(launcher: Launcher) -> list[dict]:
    return compiled_rows(launcher, "gelu_fp8")


def test_nothing_spills(compiled: list[dict]) -> None:
    assert [row for row in compiled if row["stack"] or row["spills"]] == []


def test_accesses_are_wide(compiled: list[dict]) -> None:
    assert [row for row in compiled if row["kernel"] != "sums" and min(row["load"], row["store"]) < 16] == []


def test_gelu_and_its_derivative_share_exponential_and_reciprocal(compiled: list[dict]) -> None:
    for row in compiled:
        assert row["exponentials"] == row["quotients"] == row["lane_elements"], row


def test_conversions(compiled: list[dict]) -> None:
    """To fp8 they saturate. To bf16 they come in pairs, but for amax and the scales."""
    for row in compiled:
        expected = {"fp8e4nv": ["cvt.rn.satfinite.e4m3x2.f32"], "fp8e5": ["cvt.rn.satfinite.e5m2x2.f32"]}[row["form"]]
        if row["kernel"] == "backward" and row["form"] == "fp8e5":
            expected = ["cvt.rn.satfinite.e4m3x2.f32", *expected]  # GELU's own format
        assert row["conversions"] == (expected if row["kernel"] != "sums" else []), row
        assert row["single_conversions"] <= 3, row


def test_two_programs_fit_a_multiprocessor(compiled: list[dict]) -> None:
    for row in compiled:
        if row["dtype"] == "bf16":
            assert REGISTER_FILE // (32 * row["warps"] * -(-row["registers"] // 8) * 8) >= 2, row
