"""The rank that the others wait for."""

import statistics
from collections.abc import Sequence
from typing import Any

SLOW_FACTOR = 1.1  # above the median rank's time for its own work
SLOW_SECONDS = 0.005  # and by at least so much: less is noise


class Stragglers:
    """The ranks' own work, in seconds a step, since the last report."""

    def __init__(self) -> None:
        self.seconds: list[Sequence[float]] = []
        self.named: int | None = None

    def add(self, seconds: Sequence[float]) -> None:
        """Adds one step's times, in the order of ranks."""
        if all(value > 0 for value in seconds):
            self.seconds.append(seconds)

    def report(self) -> tuple[dict[str, Any], str | None] | None:
        """(the slowest rank and its time, a line if it is newly slow) over the steps since the last report.

        Noise only adds time. So a rank is slow if its fastest step is slower than the others' as well.
        """
        if not self.seconds:
            return None
        by_rank, steps = list(zip(*self.seconds, strict=True)), len(self.seconds)
        self.seconds.clear()
        medians, fastest = [statistics.median(times) for times in by_rank], [min(times) for times in by_rank]
        usual, slowest = statistics.median_low(medians), max(medians)
        rank = medians.index(slowest)
        slow = slowest > usual * SLOW_FACTOR and slowest - usual > SLOW_SECONDS
        slow = slow and fastest[rank] > statistics.median_low(fastest) * SLOW_FACTOR
        line = None
        if slow and self.named != rank:
            line = (
                f"rank {rank} is slow: {slowest * 1e3:.0f} ms of its own work a step, the median rank {usual * 1e3:.0f} ms;"
                " all ranks wait for it"
            )
        self.named = rank if slow else None
        return {"slowest": rank, "slowest_ms": slowest * 1e3, "median_ms": usual * 1e3, "steps": steps}, line
