"""Runs a table of kernels, `tests/kernels/*_kernel_table.py`, in a process of its own.

TRITON_INTERPRET=0 python -m tests.kernels.tables muon [all]      prints as JSON what its kernels cost
"""

import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.distributed.runs import Launcher

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 1500.0  # in which a busy machine compiles a whole table
USE = "HANDGRAD_KERNEL_COSTS"  # set: costs come from the record of `compiled_record`


def compiled_rows(launcher: "Launcher", table: str) -> list[dict]:
    """The rows that the module `table` prints, with the recorded costs of kernels that have not changed. One process makes
    all: the interpreter's environment variable must not be in it."""
    environment = {k: v for k, v in launcher.environment.items() if k != "TRITON_INTERPRET"} | {USE: "1"}
    started = launcher.start(1, [__file__, table], environment=environment)
    assert started.wait(LIMIT_SECONDS) == [0], started.errors[-2000:]
    return json.loads(started.ranks[0].output)


def main(table: str, *options: str) -> None:
    """`all`: also the kernels that no test compiles, of a table that has some."""
    from tests.kernels.compiling import compile_all

    more = {"everything": True} if "all" in options else {}
    module = importlib.import_module(f"tests.kernels.{table}_kernel_table")
    rows = compile_all(module.compile_one, module.jobs_of_tests(**more))
    print(json.dumps(rows))
    if hasattr(module, "check"):
        module.check(rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
