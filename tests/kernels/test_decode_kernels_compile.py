"""The kernels of generation compiled for GPUs that are not there: nothing spills, and a product asks for two tiles of the
weight before it waits for the kernel before it."""

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
    command = [sys.executable, "-m", "tests.kernels.decode_kernel_table"]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    return json.loads(process.stdout)


def test_nothing_spills(compiled: list[dict]) -> None:
    assert len(compiled) == 162 and [row for row in compiled if row["stack"]] == []


def test_weights_are_asked_for_before_waiting(compiled: list[dict]) -> None:
    products = [row for row in compiled if row["tile_bytes"] and row["arch"] >= 90]
    assert len(products) == 70
    for row in products:
        assert row["weight_bytes_before_waiting"] >= 2 * row["tile_bytes"], row  # two tiles
