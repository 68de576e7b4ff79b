"""The Llama family's kernels that write fp8, compiled for GPUs that are not there: what an H200 needs of them."""

import pytest

pytest.importorskip("triton")

from handgrad.ops.sizes import attention_tile
from tests.distributed.runs import Launcher
from tests.kernels.compiling import SHARED_LIMIT
from tests.kernels.tables import compiled_rows

REGISTER_FILE = 65536
CONVERSIONS = {"fp8e4nv": ["cvt.rn.satfinite.e4m3x2.f32"], "fp8e5": ["cvt.rn.satfinite.e5m2x2.f32"]}


@pytest.fixture(scope="module")
def compiled(launcher: Launcher) -> list[dict]:
    return compiled_rows(launcher, "llama_fp8")


def test_nothing_spills(compiled: list[dict]) -> None:
    """But two registers of attention where three heads share keys: a cap on them lets a fourth program run beside."""
    capped = attention_tile("forward", 64, narrow=True, newer=True, grouped=True).registers
    for row in compiled:
        most = 8 if row["kernel"] == "attention_forward of 9 heads of 64" and capped else 0
        assert row["stack"] <= most and not row["spills"], row


def test_attention_fits_and_overlaps(compiled: list[dict]) -> None:
    """Its tiles fit the shared memory, and ptxas serializes no tensor-core instructions."""
    for row in compiled:
        assert row["shared"] <= SHARED_LIMIT[row["arch"]] and not row["serialized"], row


def test_accesses_are_wide(compiled: list[dict]) -> None:
    """Halves of heads are read in pieces of 8 bytes, and the transposed form written in 16; a norm's forward writes a
    lane's eight numbers, and its backward copies its rows ahead of the loop."""
    for row in compiled:
        turned = row["kernel"].startswith(("rotary", "gained_qk_norm"))
        assert max(row["load"], row["copy"]) >= (8 if turned else 16), row
        assert row["store"] >= (8 if row["kernel"].startswith("gained_rmsnorm_forward") else 16), row


def test_one_instruction_rounds(compiled: list[dict]) -> None:
    """From float32, and once: not by way of float16."""
    assert [row for row in compiled if row["conversions"] != CONVERSIONS[row["form"]]] == []


def test_enough_programs_fit_a_multiprocessor(compiled: list[dict]) -> None:
    """On Hopper. Attention and the norm's backward at more than 1024 channels hold as many as without fp8."""
    for row in compiled:
        if row["arch"] == 90:
            wide = row["kernel"].startswith("gained_rmsnorm_backward") and int(row["kernel"].split()[-1]) > 1024
            least = 8 if wide or row["kernel"].startswith("attention") else 12
            resident = REGISTER_FILE // (32 * row["warps"] * -(-row["registers"] // 8) * 8)
            assert resident * row["warps"] >= least, row
