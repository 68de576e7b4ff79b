"""Finds the rank that the others wait for.

On a busy machine, one rank or another is late for a step or for a second. So a rank counts as slow only if its median step
and even its fastest step in a window are slow, in several windows in a row.
"""

import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

SLOW_FACTOR = 1.1  # a slow rank's own work takes this multiple of the median rank's
SLOW_SECONDS = 0.005  # and at least this much longer
WINDOW_STEPS, WINDOWS = 8, 3  # steps of a window; windows in a row

Times = Sequence[float]  # seconds of each rank's own work in one step, in rank order


class Stragglers:
    """Tracks the ranks' own work since the last report and in the current window."""

    def __init__(self) -> None:
        self.seconds: list[Times] = []
        self.window: list[Times] = []
        self.found: deque[int | None] = deque(maxlen=WINDOWS)  # the slow rank of each of the last windows
        self.named: int | None = None

    def add(self, seconds: Times) -> None:
        """Adds one step's times."""
        if all(value > 0 for value in seconds):
            self.seconds.append(seconds)
            self.window.append(seconds)
        if len(self.window) == WINDOW_STEPS:
            self.found.append(slow_rank(self.window))
            self.window.clear()

    def report(self) -> tuple[dict[str, Any], str | None] | None:
        """(slowest rank and its time over the steps since the last report, a line if a rank has become slow)."""
        if not self.seconds:
            return None
        rank, slowest, usual = slowest_rank(self.seconds)
        figures = {"slowest": rank, "slowest_ms": slowest * 1e3, "median_ms": usual * 1e3, "steps": len(self.seconds)}
        always = len(self.found) == WINDOWS and len(set(self.found)) == 1
        slow, line = self.found[0] if always else None, None
        if slow is not None and slow != self.named:
            own = statistics.median(times[slow] for times in self.seconds)
            line = (
                f"rank {slow} is slow: {own * 1e3:.0f} ms of its own work a step, the median rank {usual * 1e3:.0f} ms; all"
                " ranks wait for it"
            )
        self.named = slow
        self.seconds.clear()
        return figures, line


def slowest_rank(steps: Sequence[Times]) -> tuple[int, float, float]:
    """(slowest rank, its median step time, the median rank's)."""
    medians = [statistics.median(times) for times in zip(*steps, strict=True)]
    slowest = max(medians)
    return medians.index(slowest), slowest, statistics.median_low(medians)


def slow_rank(window: Sequence[Times]) -> int | None:
    """The rank that is slower than the median rank in its median step and, as noise only adds time, its fastest step."""
    rank, slowest, usual = slowest_rank(window)
    fastest = [min(times) for times in zip(*window, strict=True)]
    slow = slowest > usual * SLOW_FACTOR and slowest - usual > SLOW_SECONDS
    return rank if slow and fastest[rank] > statistics.median_low(fastest) * SLOW_FACTOR else None
