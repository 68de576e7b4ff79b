"""Starts the ranks of one machine and waits for them: `handgrad train --ranks N`.

Ranks get torchrun's environment variables. The launcher forwards each signal to every rank once, prints shared errors
once, and exits with the worst rank's code. Each rank has its own process group, so that a terminal's Ctrl-C reaches it only
through the launcher.

With `--restarts N`, a crashed run starts again. It resumes at its newest checkpoint with the bits of an uninterrupted run,
so a restart costs only time. An error that no restart can fix ends the run at once, and so do two starts without a new
checkpoint.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from handgrad.errors import (
    INTERRUPTED,
    RESUMABLE,
    STOPPING,
    ConfigError,
    DataError,
    HardwareError,
    MemoryShort,
    Preempted,
    UsageError,
    print_message,
)

LAUNCHER = "HANDGRAD_LAUNCHER"  # variable with the launcher's process id, in its ranks' environment
FORWARDED = (signal.SIGINT, *(number for number in STOPPING if number != signal.SIGXCPU))  # CPU time is a rank's own
POLL_SECONDS = 0.05
KILL_SECONDS = 30.0  # between SIGTERM and SIGKILL for a rank, after another one has failed
PARENT_DEATH_SIGNAL = 1  # option of Linux's prctl

# The next start would end the same way; and a machine that computes wrongly must stop.
MENDED_BY_NO_START = (UsageError, DataError, ConfigError, MemoryShort, HardwareError)
FINAL = (0, INTERRUPTED, *(error.exit_code for error in MENDED_BY_NO_START))
IDLE_STARTS = 2  # give up after this many starts without a new checkpoint
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0


def command_line(*words: object) -> list[str]:
    """The command `handgrad WORDS`, run by this Python or, as with torchrun, by PYTHON_EXEC. `-P` ignores a checkout in the
    working directory, so that the command runs the same code as this process."""
    options = ["-m"] if Path.cwd() == Path(__file__).resolve().parents[2] else ["-P", "-m"]
    return [os.environ.get("PYTHON_EXEC", sys.executable), *options, "handgrad", *map(str, words)]


def run_ranks(
    command: Sequence[str],
    size: int,
    environment: Mapping[str, str],
    patience_seconds: float,
    received: list[int] | None = None,
) -> int:
    """Starts `size` processes of a command, waits for all and returns the worst exit code.

    `patience_seconds`: how long the others may take to end by themselves and say why, after a rank has failed. `received`:
    a list that collects the forwarded signals."""
    processes: list[subprocess.Popen[bytes]] = []
    received = [] if received is None else received
    temporary = tempfile.TemporaryDirectory(prefix="handgrad-ranks-", ignore_cleanup_errors=True)
    with noted_signals(received), temporary as folder:
        try:
            shared = rank_environment(size, environment)
            for rank in range(size):
                (Path(folder) / str(rank)).mkdir()
                variables = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {}
                variables["TORCHELASTIC_ERROR_FILE"] = f"{folder}/{rank}/error.json"  # `errors.is_first_to_print`
                start = subprocess.Popen
                if not received:
                    processes.append(start(command, env=shared | variables, stdin=subprocess.DEVNULL, process_group=0))
            wait_for_exits(processes, received, patience_seconds)
        finally:
            send(processes, signal.SIGKILL)
    codes = [process.wait() for process in processes]
    for rank, code in enumerate(codes):
        if code < 0 and not received and code != -signal.SIGTERM:
            print_message(f"{f'rank {rank}' if size > 1 else 'the run'} was ended by {signal.Signals(-code).name}")
    if received and all(code < 0 for code in codes):  # no rank lived to print a message
        print_message("interrupted")
    return worst_code(codes) if codes else INTERRUPTED


@contextlib.contextmanager
def noted_signals(received: list[int]) -> Iterator[None]:
    """Within a `with` block, collects the signals to forward in `received`. A SIGHUP that `nohup` ignores stays ignored."""

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [number for number in FORWARDED if number != signal.SIGHUP or not ignored]
    previous = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def rank_environment(size: int, environment: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables for all ranks of a machine, instead of another launcher's. A single process keeps its own."""
    launcher = {LAUNCHER: str(os.getpid())}
    if size == 1:
        return {**environment, **launcher}
    inherited = {name: value for name, value in environment.items() if not name.startswith("TORCHELASTIC_")}
    inherited.setdefault("OMP_NUM_THREADS", "1")
    variables = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
    variables["MASTER_PORT"] = free_port()
    return {**inherited, **{name: str(value) for name, value in variables.items()}, **launcher}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def send(processes: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        process.send_signal(number)  # no-op if the process has exited


def wait_for_exits(processes: Sequence[subprocess.Popen[bytes]], received: Sequence[int], patience_seconds: float) -> None:
    """Forwards `received` signals until all processes end; after a failure, sends slow ones SIGTERM, then SIGKILL."""
    forwarded, failed = 0, None
    ending = [(patience_seconds + KILL_SECONDS, signal.SIGKILL), (patience_seconds, signal.SIGTERM)]
    while True:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return
        for number in received[forwarded:]:
            send(processes, number)
            forwarded += 1
        if failed is None and any(codes):
            failed = time.monotonic()
        if failed is not None and ending and time.monotonic() - failed >= ending[-1][0]:
            send(processes, ending.pop()[1])
        time.sleep(POLL_SECONDS)


def worst_code(codes: Sequence[int]) -> int:
    """The exit code of a command whose ranks ended with `codes`: an error's, else a lost rank's, else a signal's."""
    worst = max(codes, key=lambda code: {0: 0, RESUMABLE: 2, INTERRUPTED: 3}.get(code, 1 if code < 0 else 4))
    return 128 - worst if worst < 0 else worst


def is_launched() -> bool:
    """True in a rank that `run_ranks` started."""
    return LAUNCHER in os.environ


def end_with_launcher() -> None:
    """Asks the system to send this rank SIGTERM if its launcher dies, where the system offers it."""
    if os.environ.get(LAUNCHER) == str(os.getppid()) and sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)


def supervise(start: Callable[[list[int]], int], saved_step: Callable[[], int], restarts: int) -> int:
    """Calls `start` until it returns 0 or a code in `FINAL`, or `restarts` are used up; returns the last code.

    `start` trains in other processes, forwards signals to them, and appends the signals to its argument. A signal prevents
    restarts. `saved_step`: returns the step of the run's newest checkpoint, or -1."""
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
