"""Loss spikes: how far a value lies above the last 128, in standard deviations."""

import math
from collections import deque
from collections.abc import Iterable

WINDOW = 128  # steps


class SpikeWindow:
    """The last values of one series. Its state is the window, which travels with the checkpoint."""

    def __init__(self, values: Iterable[float] = ()):
        self.values = deque(values, maxlen=WINDOW)

    def z_score(self, value: float) -> float | None:
        """(value - mean) / deviation of the window *before* this value; None until the window is full.

        Judged against a window that contains it, a value can never exceed sqrt(127) = 11.3 deviations, and a second spike
        in a row hides behind the first.
        """
        if len(self.values) < WINDOW or not math.isfinite(value):
            return None
        mean, deviation = self.statistics()
        if deviation == 0:
            return 0.0 if value == mean else math.copysign(math.inf, value - mean)
        return (value - mean) / deviation

    def limit(self, z: float) -> float:
        """The value above which a z-score exceeds `z`: infinite while the window is not full, or where `z` is 0."""
        if not z or len(self.values) < WINDOW:
            return math.inf
        mean, deviation = self.statistics()
        return mean + z * deviation

    def statistics(self) -> tuple[float, float]:
        """Mean and standard deviation of a full window."""
        mean = math.fsum(self.values) / WINDOW
        return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in self.values) / WINDOW)

    def add(self, value: float) -> None:
        """Takes a value into the window. Non-finite ones stay out: they would blind the detector for 128 steps."""
        if math.isfinite(value):
            self.values.append(value)
