"""The kernels of `modern_kernel_table` compiled for a GPU that is not there: nothing spills, and 16-bit numbers move in
16-byte pieces."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    """One process for all: the interpreter's environment variable must not be in it."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.modern_kernel_table"]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    return json.loads(process.stdout)


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
