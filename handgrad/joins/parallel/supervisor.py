"""Starts a run again after it has crashed: `handgrad train --restarts N`.

A run resumes at its newest checkpoint with the bits of an unbroken run, so a restart costs nothing but time. An error that
no restart can fix ends the run at once; so do two starts without a new checkpoint.
"""

import signal
import time
from collections.abc import Callable

from handgrad.errors import (
    INTERRUPTED,
    ConfigError,
    DataError,
    HardwareError,
    MemoryShort,
    Preempted,
    UsageError,
    print_message,
)
from handgrad.joins.parallel.local import POLL_SECONDS, noted_signals

# A mistake, damaged input, a folder of another run, a run that does not fit: the next start ends the same way. A machine
# that computes wrongly must stop.
MENDED_BY_NO_START = (UsageError, DataError, ConfigError, MemoryShort, HardwareError)
FINAL = (0, INTERRUPTED, *(error.exit_code for error in MENDED_BY_NO_START))
IDLE_STARTS = 2  # without a new checkpoint, after which the run is given up
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0


def supervise(start: Callable[[list[int]], int], saved_step: Callable[[], int], restarts: int) -> int:
    """Calls `start` until it returns 0, a code of `FINAL`, or has failed `restarts` times more; returns the last code.

    `start` trains in other processes, passes signals on to them, and appends those to the list that it is given. After a
    signal nothing starts again. `saved_step`: the step of the run's newest checkpoint, -1 without any.
    """
    received: list[int] = []
    idle = 0
    with noted_signals(received):
        for restart in range(1, restarts + 2):
            before = saved_step()
            code = start(received)
            if code in FINAL or received:
                return code
            idle = 0 if saved_step() > before else idle + 1
            if idle == IDLE_STARTS:
                print_message(f"gave up: {idle} starts without a new checkpoint, the last with exit code {code}")
                return code
            if restart > restarts:
                if restarts:
                    print_message(f"gave up after {restarts} restart{'s' * (restarts > 1)}, the last with exit code {code}")
                return code
            pause = min(FIRST_PAUSE_SECONDS * 2 ** (restart - 1), LONGEST_PAUSE_SECONDS)
            where = f"step {saved_step()}" if saved_step() >= 0 else "its first step"
            print_message(f"exit code {code}: restart {restart} of {restarts} in {pause:.0f} s, from {where}")
            until = time.monotonic() + pause
            while time.monotonic() < until and not received:
                time.sleep(POLL_SECONDS)
            if received:
                print_message(f"stopped by {signal.Signals(received[0]).name} before restart {restart}")
                return INTERRUPTED if received[0] == signal.SIGINT else Preempted.exit_code
        raise AssertionError("the loop returns")
