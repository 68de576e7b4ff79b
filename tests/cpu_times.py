"""CPU seconds of each test file, with those of every process that its tests start, as a record.

    python -m pytest -n auto --dist loadfile --cpu-times benchmarks/results/cpu-test-times.json

Wall times of parallel tests measure their neighbours as well; CPU seconds say what a change of the tests saves.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.record import write_record

TICKS = os.sysconf("SC_CLK_TCK")


class CpuTimes:
    """Adds to each phase's report the CPU seconds since the one before it; writes the record at the end."""

    def __init__(self) -> None:
        self.before = self.collection = 0.0

    def pytest_collection_finish(self) -> None:
        self.before = self.collection = used_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Any:
        report = yield
        now = used_seconds()
        report.cpu_seconds, self.before = now - self.before, now
        report.collection_seconds, self.collection = self.collection, 0.0
        return report

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        phases = session.config.pluginmanager.get_plugin("terminalreporter").stats
        files, tests, collections = Counter[str](), Counter[str](), list[float]()
        for report in (report for reports in phases.values() for report in reports if hasattr(report, "cpu_seconds")):
            collections += [round(report.collection_seconds, 1)] if report.collection_seconds else []
            files[report.location[0]] += report.cpu_seconds
            tests[report.location[0]] += report.when == "setup"
        figures = {path: {"tests": tests[path], "cpu_seconds": round(files[path], 1)} for path, _ in files.most_common()}
        total: dict[str, Any] = {"tests": sum(tests.values()), "cpu_seconds": round(sum(files.values()), 1)}
        total["collection_cpu_seconds"] = collections  # of each process: every one imports all files
        write_record(session.config.getoption("--cpu-times"), torch.device("cpu"), total=total, files=figures)


def used_seconds() -> float:
    """CPU seconds of this process, of its children that have ended, and of all its descendants that have not."""
    own = os.times()
    return sum(own[:4]) + sum(map(seconds_of, children_of("self")))


def seconds_of(process: str) -> float:
    times = text_of(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()[11:15]
    return sum(map(int, times)) / TICKS + sum(map(seconds_of, children_of(process)))


def children_of(process: str) -> list[str]:
    return [child for task in Path(f"/proc/{process}/task").glob("*/children") for child in text_of(task).split()]


def text_of(path: Path) -> str:
    """Empty if the process or thread has just ended."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
