"""Stops a run between steps by a signal."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from handgrad.errors import STOPPING, Preempted, end_interrupted, end_stopped, forget_signals, is_repeat
from handgrad.training.step import StepResult

OnStep = Callable[[int, StepResult], None]  # a step's number, counted from 1, and its result


class StopSignals:
    """Within a `with` block SIGINT and the signals of `STOPPING` are only noted in `received`: the step finishes first.

    The same signal again ends the process at once (saves are atomic), or with `keeps_process` acts as it did before the
    block. Within a second it counts as the same one: a launcher and its ranks may both get it, and the launcher passes it
    on. SIGXCPU never ends the process: the kernel repeats it every second. Signals are left alone outside of the main
    thread, where Python takes no handlers, and so is a signal of `STOPPING` that is ignored (`nohup`) or has a handler of
    the program's own.
    """

    def __init__(self, *, keeps_process: bool):
        self.keeps_process = keeps_process
        self.received: int | None = None
        self.noted: set[int] = set()
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        forget_signals()
        if threading.current_thread() is threading.main_thread():
            free = [number for number in STOPPING if signal.getsignal(number) in (signal.SIG_DFL, end_stopped)]
            numbers = {signal.SIGTERM, signal.SIGINT, *free}
            self.previous = {number: signal.signal(number, self.note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def note(self, number: int, frame: FrameType | None) -> None:
        if is_repeat(number):
            return
        self.received = number
        if number in self.noted and number != signal.SIGXCPU:
            self.act(number)
        self.noted.add(number)

    def act(self, number: int) -> None:
        """Ends the process, or with `keeps_process` does what the signal did before the block."""
        if number == signal.SIGINT and not self.keeps_process:
            end_interrupted(
                "interrupted before the step was saved; run the same command to resume from the last checkpoint"
            )
        signal.signal(number, self.previous[number] if self.keeps_process else signal.SIG_DFL)
        signal.raise_signal(number)


def preempted(received: int, completed: int, last_saved: int) -> Preempted:
    """The error of a run that signal `received` stopped; `last_saved` is the newest checkpoint's step, or -1."""
    saved = f"saved step {last_saved}" if last_saved >= 0 else "nothing saved yet"
    name = signal.Signals(received).name
    return Preempted(f"stopped by {name} after step {completed}, {saved}; run the same command to resume")
