"""Stops a run between steps: by a signal, or by an exception of its observer."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from handgrad.errors import Preempted, end_interrupted
from handgrad.training.step import StepResult

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the last where a terminal or its connection goes

OnStep = Callable[[int, StepResult], None]  # a step's number, counted from 1, and its result


class Observer:
    """Calls `on_step`. An exception that it raises is kept until the run pauses: the next step may be under way, and is
    finished first."""

    def __init__(self, on_step: OnStep | None):
        self.on_step = on_step
        self.raised: BaseException | None = None

    def show(self, step: int, result: StepResult) -> None:
        if self.on_step is not None and self.raised is None:
            try:
                self.on_step(step, result)
            except BaseException as error:
                self.raised = error

    def raise_kept(self) -> None:
        if self.raised is not None:
            raise self.raised


class StopSignals:
    """Within a `with` block SIGTERM, SIGINT and SIGHUP are only noted in `received`: a step is finished first.

    The same signal again ends the process at once (saves are atomic), or with `keeps_process` acts as it did before the
    block. Signals are left alone outside of the main thread, where Python takes no handlers, and so is a SIGHUP that
    `nohup` has ignored.
    """

    def __init__(self, *, keeps_process: bool):
        self.keeps_process = keeps_process
        self.received: int | None = None
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            numbers = [number for number in STOPPING if number != signal.SIGHUP or not ignored]
            self.previous = {number: signal.signal(number, self.note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        again = end_now if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, self.previous[number] if self.keeps_process else again)


def end_now(number: int, frame: FrameType | None) -> NoReturn:
    """Handles the second Ctrl-C."""
    end_interrupted("interrupted before the step was saved; run the same command to go on from the last checkpoint")


def preempted(received: int, completed: int, last_saved: int) -> Preempted:
    """The error of a run that signal `received` stopped; `last_saved` is the newest checkpoint's step, or -1."""
    saved = f"saved step {last_saved}" if last_saved >= 0 else "nothing saved yet"
    name = signal.Signals(received).name
    return Preempted(f"stopped by {name} after step {completed}, {saved}; run the same command to go on")
