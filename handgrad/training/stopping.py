"""How a run that makes steps is told to stop: by a signal, or by the exception of whoever looks on."""

import signal
import threading
from types import FrameType
from typing import Any

from handgrad.errors import Preempted

STOPPING = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Within a `with` block SIGTERM and SIGINT do nothing but be noted in `told`, so that a step can be finished first. The
    same signal again ends the process at once (saves are atomic), or with `keeps_process` does what it did before the
    block. Outside of the main thread, where Python takes no handlers, signals are left alone."""

    def __init__(self, *, keeps_process: bool):
        self.keeps_process = keeps_process
        self.told: int | None = None
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self.previous = {number: signal.signal(number, self.note) for number in STOPPING}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def note(self, number: int, frame: FrameType | None) -> None:
        self.told = number
        signal.signal(number, self.previous[number] if self.keeps_process else signal.SIG_DFL)


def preempted(told: int, completed: int, last_saved: int) -> Preempted:
    """The error of a run that was told to stop by signal `told`; `last_saved` is the newest checkpoint's step, or -1."""
    saved = f"saved step {last_saved}" if last_saved >= 0 else "nothing saved yet"
    name = signal.Signals(told).name
    return Preempted(f"stopped by {name} after step {completed}, {saved}; run the same command to go on")
