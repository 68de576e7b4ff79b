"""The record of kernels' costs: a kernel that changes in any way is compiled, and a false record is found."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.kernels.tables import ROOT

SOURCE = """
import triton
import triton.language as tl

SHIFT = tl.constexpr(3)

@triton.jit
def doubled(x):
    return x * 2 + SHIFT

@triton.jit
def kernel(out, x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, doubled(tl.load(x + at, at < n)), at < n)
"""
USUAL = {"dtype": "fp32", "divisor": ":16", "block": 256, "warps": 4, "arch": 80, "options": {}}
OTHER_CALLS: list[dict[str, object]] = [
    {"dtype": "fp16"},
    {"divisor": ""},
    {"block": 512},
    {"warps": 8},
    {"arch": 90},
    {"options": {"maxnreg": 64}},
]
OTHER_KERNELS = [("x * 2", "x * 3"), ("constexpr(3)", "constexpr(4)"), ("at < n)), at < n", "at < n)), at <= n")]


@pytest.mark.nightly  # of the tests' own record
def test_a_changed_kernel_is_compiled_and_a_false_record_is_found(tmp_path: Path) -> None:
    """In a process of its own: the interpreter's environment variable must not be in it."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.test_compiled_record", str(tmp_path)]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]


def test_the_record_has_every_table() -> None:
    from tests.kernels.compiled_record import TABLES

    tables = {path.stem.removesuffix("_kernel_table") for path in Path(__file__).parent.glob("*_kernel_table.py")}
    assert tables == set(TABLES)


def main(folder: Path) -> None:
    from tests.kernels import compiled_record
    from tests.kernels.compiling import compile_kernel

    def costs(source: str, **changes: object) -> dict:
        path = folder / f"kernel{len(list(folder.iterdir()))}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("kernels", path)  # functions carry its name
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        call = USUAL | changes
        pointer = f"*{call['dtype']}{call['divisor']}"
        signature = {"out": pointer, "x": pointer, "n": "i32"}
        block = {"BLOCK": call["block"]}
        return compile_kernel(module.kernel, signature, block, call["warps"], 3, call["arch"], **call["options"])

    found = costs(SOURCE)
    ((key, made),) = compiled_record.made.items()
    assert made == found and found["registers"] > 0, found

    record = {key: {**found, "registers": -1}}
    compiled_record.recorded = lambda: record
    compiled_record.DAYS = int(key, 16) * 2  # its day is none of ours
    for same in (SOURCE, "# a line more\n" + SOURCE.replace("return", "# a comment\n    return")):
        assert costs(same)["registers"] == -1, "the same kernel comes from the record"
    for changes in OTHER_CALLS:
        assert costs(SOURCE, **changes)["registers"] > 0, changes
    for old, new in OTHER_KERNELS:
        assert SOURCE.count(old) == 1 and costs(SOURCE.replace(old, new))["registers"] > 0, new

    compiled_record.DAYS = 1  # every day is its day
    try:
        costs(SOURCE)
    except AssertionError as error:
        assert "kernel-costs.json" in str(error) and "'registers': -1" in str(error)
    else:
        raise AssertionError("a false record passes")
    record[key] = found
    assert costs(SOURCE) == found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
