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
    """But of heads of 100 channels, whose halves begin at multiples of 4 bytes."""
    wide = [row for row in compiled if "heads of 100" not in row["kernel"]]
    narrow = {"classifier_forward"}  # which writes single numbers
    assert [row for row in wide if row["load"] < 16 or (row["store"] < 16 and row["kernel"] not in narrow)] == []
