"""A clock that stops while its process is stopped.

`scontrol suspend`, `docker pause` and a frozen virtual machine stop all processes of a run together. Once they
continue, none has been silent, but the first one to read a clock of the machine would take the pause for the others'
silence.
"""

import threading
import time
from collections.abc import Callable


class RunningClock:
    """Seconds in which this process ran. Between two looks at it at most `most_seconds` count, so it has to be looked at
    more often than that."""

    def __init__(self, most_seconds: float, clock: Callable[[], float] = time.monotonic):
        self.most_seconds, self.clock = most_seconds, clock
        self.seconds, self.looked, self.lock = 0.0, clock(), threading.Lock()

    def __call__(self) -> float:
        with self.lock:
            now = self.clock()
            self.seconds += min(now - self.looked, self.most_seconds)
            self.looked = now
            return self.seconds
