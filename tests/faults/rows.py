"""The rows of rows.toml, the tests that are marked with them, and the record of these tests.

`@pytest.mark.fault(6, 7)` ties a test to its rows. `@pytest.mark.soak(4, 20)` gives a test the argument `seeds`: the
numbers 0 to 3 for as many random faults, one after another (0: the test is `make soak`'s alone). `--seeds COUNT
--first-seed NUMBER`, which `make soak` gives, repeats the test with groups of 20 others. A group makes its faults again.
"""

import re
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
TABLE = Path(__file__).with_name("rows.toml")
MARK = re.compile(r"\bmark\.fault\(([\d, ]+)\)")
STARTED = time.monotonic()


@dataclass(frozen=True)
class Row:
    """A fault and its required outcome."""

    number: int
    fault: str
    then: str
    runs_on: list[str]  # cpu, gpu
    guard: tuple[str, str, str] | tuple[()] = ()  # module, its text, the text without the guard


def read_rows() -> dict[int, Row]:
    rows = [Row(**{**row, "guard": tuple(row.get("guard", ()))}) for row in tomllib.loads(TABLE.read_text())["row"]]
    return {row.number: row for row in rows}


def marked() -> dict[int, list[Path]]:
    """The files of tests that are marked with each row."""
    found: dict[int, list[Path]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        numbers = {int(number) for given in MARK.findall(path.read_text()) for number in given.split(",") if number.strip()}
        for number in numbers:
            found.setdefault(number, []).append(path)
    return found


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--fault-record", metavar="FILE", help="write the outcome of each row's tests as JSON")
    parser.addoption("--fault-row", type=int, metavar="NUMBER", help="only the tests of this row")
    parser.addoption("--seeds", type=int, metavar="COUNT", help="random faults of each test that is marked soak")
    parser.addoption("--first-seed", type=int, default=0, metavar="NUMBER", help="the first of --seeds")


def give_seeds(metafunc: pytest.Metafunc) -> None:
    if (mark := metafunc.definition.get_closest_marker("soak")) is None:
        return
    count, first = metafunc.config.getoption("--seeds"), metafunc.config.getoption("--first-seed")
    usual, size = mark.args
    groups = [range(usual)]
    if count is not None:
        groups = [range(start, min(start + size, first + count)) for start in range(first, first + count, size)]
    skip = pytest.mark.skip(reason="in `make soak` alone")
    given = [pytest.param(group, id=f"{group.start} to {group.stop - 1}", marks=[] if group else skip) for group in groups]
    metafunc.parametrize("seeds", given)


def note_rows(items: list[pytest.Item], config: pytest.Config) -> None:
    """Notes a test's rows in its reports; leaves out the tests of other rows than the one that was asked for."""
    only = config.getoption("--fault-row")
    for item in items[:]:
        numbers = {number for mark in item.iter_markers("fault") for number in mark.args}
        item.user_properties += [("fault", number) for number in sorted(numbers)]
        if only is not None and only not in numbers:
            items.remove(item)


def outcomes(stats: dict[str, list[Any]]) -> dict[str, dict[str, Any]]:
    """For each row: the tests that passed, those that did not, seconds. `stats`: pytest's reports by their outcome."""
    found: dict[str, dict[str, Any]] = {}
    for outcome, reports in stats.items():
        for report in reports:
            for name, number in getattr(report, "user_properties", ()):
                if name == "fault":
                    row = found.setdefault(str(number), {"passed": 0, "not_passed": [], "skipped": 0, "seconds": 0.0})
                    row["seconds"] += report.duration
                    row["passed"] += outcome == "passed"
                    row["skipped"] += outcome == "skipped"
                    row["not_passed"] += [report.nodeid] * (outcome in ("failed", "error"))
    for row in found.values():
        row["seconds"] = round(row["seconds"], 1)
    return dict(sorted(found.items(), key=lambda entry: int(entry[0])))


def elapsed_seconds() -> float:
    """Since the tests' start."""
    return round(time.monotonic() - STARTED, 1)


def all_passed(row: dict[str, Any]) -> bool:
    return row["passed"] > 0 and not row["not_passed"]


def without_tests(rows: Iterable[Row]) -> list[int]:
    """The numbers of the CPU's rows that no test is marked with."""
    found = marked()
    return [row.number for row in rows if "cpu" in row.runs_on and row.number not in found]
