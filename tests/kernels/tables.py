"""Runs a table of kernels, `tests/kernels/*_kernel_table.py`, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
USE = "HANDGRAD_KERNEL_COSTS"  # set: costs come from the record of `compiled_record`


def compiled_rows(table: str) -> list[dict]:
    """The rows that the module `table` prints, with the recorded costs of kernels that have not changed. One process makes
    all: the interpreter's environment variable must not be in it."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {USE: "1"}
    command = [sys.executable, "-m", f"tests.kernels.{table}"]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    return json.loads(process.stdout)
