"""The table of faults: every row has its tests, every record is of them, and the page is made from both."""

import argparse
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import faults
from tests.faults import guards, rows
from tests.figure_values import RECORDS

ROWS = rows.read_rows()


def test_every_row_has_a_test() -> None:
    assert list(ROWS) == list(range(1, 55))
    assert set(rows.marked()) <= set(ROWS), "a test is marked with a row that does not exist"
    assert not rows.without_tests(ROWS.values()), "a row has no test"
    assert all(set(row.runs_on) <= {"cpu", "gpu"} and row.runs_on for row in ROWS.values())


@pytest.mark.parametrize("number", [number for number, row in ROWS.items() if row.guard])
def test_every_guard_is_there(number: int) -> None:
    guards.source_of(ROWS[number])


def test_the_page_is_made_from_the_records() -> None:
    """`python -m benchmarks.faults` writes it anew."""
    text = faults.PAGE.read_text()
    assert faults.page(text) == text


GOOD: dict[str, Callable[[dict], bool]] = {
    "cpu-faults": rows.all_passed,
    "h200-faults": lambda row: row["outcome"] == "passed",
    "cpu-fault-guards": lambda row: row["tests"] == guards.FAILS,
}


@pytest.mark.parametrize("name", GOOD)
def test_no_row_of_a_record_fails(name: str) -> None:
    found = RECORDS.get(name, {"rows": {}})["rows"]
    assert {int(number) for number in found} <= set(ROWS)
    assert not {number: row for number, row in found.items() if not GOOD[name](row)}


def test_the_record_has_every_row_that_has_tests() -> None:
    assert {int(number) for number in RECORDS["cpu-faults"]["rows"]} == set(rows.marked())


def report(*numbers: int, seconds: float = 0.5) -> SimpleNamespace:
    properties = [("fault", number) for number in numbers]
    return SimpleNamespace(user_properties=properties, duration=seconds, nodeid="a test")


def test_the_outcome_of_a_row() -> None:
    """Set-up and tear-down take time and are no tests; a test may belong to several rows; one failure is enough."""
    stats = {"": [report(1)] * 2, "passed": [report(1), report(1, 2)], "failed": [report(2)], "skipped": [report(7)]}
    found = rows.outcomes({**stats, "warnings": [object()]})
    assert found["1"] == {"passed": 2, "not_passed": [], "skipped": 0, "seconds": 2.0}
    assert [rows.all_passed(found[number]) for number in ("1", "2", "7")] == [True, False, False]
    assert list(found) == ["1", "2", "7"]


def groups(usual: int, size: int, *arguments: str) -> list[range]:
    """The seeds that a test with these numbers gets from pytest's arguments."""
    parser, given = argparse.ArgumentParser(), list[range]()
    pytests: Any = SimpleNamespace(addoption=parser.add_argument)
    rows.add_options(pytests)
    options = parser.parse_args(arguments)
    mark = SimpleNamespace(args=(usual, size))
    metafunc: Any = SimpleNamespace(
        definition=SimpleNamespace(get_closest_marker=lambda name: mark),
        config=SimpleNamespace(getoption=lambda name: getattr(options, name.removeprefix("--").replace("-", "_"))),
        parametrize=lambda name, values: given.extend(value.values[0] for value in values),
    )
    rows.give_seeds(metafunc)
    return given


def test_the_seeds_of_a_test() -> None:
    assert groups(4, 20) == [range(4)] and groups(0, 10) == [range(0)]
    assert groups(4, 20, "--seeds", "50", "--first-seed", "7") == [range(7, 27), range(27, 47), range(47, 57)]
    assert groups(4, 20, "--seeds", "1", "--first-seed", "31") == [range(31, 32)]
