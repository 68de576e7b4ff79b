"""Runs a table of kernels, `tests/kernels/*_kernel_table.py`, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def compiled_rows(table: str) -> list[dict]:
    """The rows that the module `table` prints. One process compiles all: the interpreter's environment variable must not
    be in it."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"tests.kernels.{table}"]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    return json.loads(process.stdout)
