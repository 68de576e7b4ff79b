"""Every row's guard seen to matter: `python -m tests.faults.guards [--row NUMBER] [--record FILE]`.

The guard that rows.toml names is taken out of a copy of the tree, where the row's tests must fail: a test that passes
without the guard shows nothing. Some seconds a row; no part of CI.
"""

import argparse
import importlib
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.record import ROOT, keep_commit, write_record
from tests import mutants
from tests.faults.rows import Row, marked, read_rows

FAILS, PASSES = "fails", "passes"


def source_of(row: Row) -> str:
    """The text of the guard's module, which has the guard exactly once."""
    module, guard, without = row.guard
    text = (ROOT / "handgrad" / module).read_text(encoding="utf-8")
    if (count := text.count(guard)) != 1 or guard == without:
        raise SystemExit(f"row {row.number}: expected {guard!r} once in handgrad/{module}, found it {count} times")
    return text


def without_guard(row: Row, folder: Path, tests: list[Path]) -> str:
    """The outcome of a row's tests, which are in these files, in the copy of the tree without the guard."""
    module, guard, without = row.guard
    text, path = source_of(row), folder / "handgrad" / module
    arguments = [str(test.relative_to(ROOT)) for test in tests] + ["-m", "fault", "--fault-row", str(row.number)]
    if not mutants.tests_pass(folder, arguments):
        raise SystemExit(f"row {row.number}: its tests fail with the guard")
    mutants.plant(path, text.replace(guard, without))
    try:
        return PASSES if mutants.tests_pass(folder, arguments) else FAILS
    finally:
        mutants.plant(path, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", type=int, action="append", metavar="NUMBER", help="only this row")
    parser.add_argument("--record", metavar="FILE", help="write the outcomes as JSON, with machine, versions and commit")
    arguments = parser.parse_args()
    rows = [row for row in read_rows().values() if row.guard and (not arguments.row or row.number in arguments.row)]
    for row in rows:
        source_of(row)
    for name in mutants.PRELOADED:
        importlib.import_module(name)
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        mutants.copy_tree(Path(folder))
        keep_commit()
        tests = marked()
        for row in rows:
            outcome = without_guard(row, Path(folder), tests[row.number])
            found[str(row.number)] = dict(zip(("module", "guard", "without"), row.guard, strict=True), tests=outcome)
            print(f"row {row.number:>2} {outcome:<6} without {row.guard[1]!r} in {row.guard[0]}", flush=True)
    if arguments.record:
        write_record(arguments.record, torch.device("cpu"), rows=found)
    sys.exit(any(row["tests"] == PASSES for row in found.values()))


if __name__ == "__main__":
    main()
