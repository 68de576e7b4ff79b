"""The kernels that quantise compiled for GPUs that are not there: nothing spills, accesses are wide, enough run at once."""

import pytest

pytest.importorskip("triton")

from tests.distributed.runs import Launcher
from tests.kernels.tables import compiled_rows

MULTIPROCESSORS, REGISTER_FILE = 132, 65536  # of an H200

# What has single numbers to read or write.
NARROW = {"count_numbers", "quantize, amax", "rescale", "fold_statistics", "update_scaling"}
# Stores of a lane's eight numbers, as they lie in the lane.
EIGHT_BYTES = {"layernorm_forward", "classifier_forward_backward"}
CONVERSIONS = {"fp8e4nv": ["cvt.rn.satfinite.e4m3x2.f32"], "fp8e5": ["cvt.rn.satfinite.e5m2x2.f32"]}
# Programs that fit a multiprocessor, as in 16 bits alone; the classifier's hold 80 registers of a lane, three of them fit.
AT_ONCE = {"layernorm_forward": 16, "classifier_forward_backward": 3, "classifier_forward_backward, both": 3}


@pytest.fixture(scope="module")
def compiled(launcher: Launcher) -> list[dict]:
    return compiled_rows(launcher, "fp8")


def test_nothing_spills(compiled: list[dict]) -> None:
    """On sm_100 ptxas saves four registers, in bf16 six, to fit three programs of the classifier, outside of its loops."""
    saved = {"bf16": 24, "fp16": 16}
    for row in compiled:
        allowed = saved[row["dtype"]] if row["arch"] != 90 and row["kernel"] == "classifier_forward_backward" else 0
        assert row["stack"] <= allowed and not row["spills"], row


def test_accesses_are_wide(compiled: list[dict]) -> None:
    for row in compiled:
        if row["kernel"] not in NARROW:
            assert row["load"] == 16 and row["store"] == (8 if row["kernel"] in EIGHT_BYTES else 16), row


def test_one_instruction_rounds(compiled: list[dict]) -> None:
    """From float32, and once: not by way of float16."""
    for row in compiled:
        expected = [] if row["kernel"] in {*NARROW, "transpose"} else CONVERSIONS[row["form"]]
        assert row["conversions"] == expected, row


def test_registers_leave_room(compiled: list[dict]) -> None:
    """All programs of the layer norm's backward run at once, with their loads ahead."""
    for row in compiled:
        if row["arch"] == 90:
            resident = REGISTER_FILE // (32 * row["warps"] * -(-row["registers"] // 8) * 8)
            if row["kernel"] == "layernorm_backward":
                assert resident * MULTIPROCESSORS >= (512 if row["C"] == 768 else 256) and row["copies"] >= 24, row
            assert resident >= AT_ONCE.get(row["kernel"], 1), row
