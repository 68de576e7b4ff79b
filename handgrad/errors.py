"""Errors for users: one line that says what was expected, what was found, where, and what to do next.

`print_message` prints the line and `cli.main` exits with the class's code. A bug is an `assert` or any other exception, and
shows its traceback.
"""

import contextlib
import errno
import json
import math
import os
import re
import signal
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

RESUMABLE = 75  # exit code: the same command resumes the run; EX_TEMPFAIL of sysexits.h
INTERRUPTED = 130  # exit code after Ctrl-C, by shell convention

# C0 except newline and tab, DEL, C1, and the characters that change the direction of text.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def shown(text: str) -> str:
    r"""`text` with its control characters escaped, like \x1b, so that a terminal shows them instead of obeying them."""
    return CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)


class ShownOutput:
    """Standard output on a terminal: passes all text through `shown`. Our own escape sequences go to `terminal`."""

    def __init__(self, terminal: TextIO):
        self.terminal = terminal

    def write(self, text: str) -> int:
        return self.terminal.write(shown(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)


class HandgradError(ValueError):
    """Base class of the errors for users. `exit_code`: exit status of the command that raises it."""

    exit_code = 64
    shared = False  # all ranks of the run raise it together

    def __init__(self, message: str):
        # One line, whatever was interpolated: messages end up in logs as often as on a terminal.
        super().__init__(shown(re.sub(r"\s*\n\s*", " ", message.strip())))


class UsageError(HandgradError):
    """The command line names something that does not exist, or settings that contradict each other."""


class DataError(HandgradError):
    """An input file is missing, damaged, or not of the kind that its name says."""

    exit_code = 65


class StorageError(HandgradError):
    """Reading or writing failed: no space, no permission, a broken device."""

    exit_code = 74


class Preempted(HandgradError):
    """A signal stopped the run after it saved its state; the same command resumes it."""

    exit_code = RESUMABLE
    shared = True


class LostRank(HandgradError):
    """Another process of the run is gone; the same command resumes from the last checkpoint."""

    exit_code = RESUMABLE


class MemoryShort(HandgradError):
    """An allocation failed during the work; the same run would fail there again."""

    exit_code = 71


class NumericsError(HandgradError):
    """Training diverged: losses or gradients stayed non-finite, or ranks that should agree do not."""

    exit_code = 76
    shared = True


class AuditError(HandgradError):
    """A replay, or another run, does not reproduce the bits that a run recorded."""

    exit_code = 77
    shared = True


class HardwareError(HandgradError):
    """The same work gave different bits each time: memory or a processor is faulty."""

    exit_code = 79
    shared = True


class ConfigError(HandgradError):
    """A run folder or checkpoint belongs to another configuration, or is in use; or a package is missing."""

    exit_code = 78


HINTS = {
    errno.ENOSPC: "; free some space, or write elsewhere",
    errno.EDQUOT: "; your quota is used up, write elsewhere",
    errno.EACCES: "; check its permissions",
    errno.EPERM: "; check its permissions",
    errno.EROFS: "; the file system is read-only, write elsewhere",
    errno.ENOENT: "; check the name, or give another",
    errno.ENOTDIR: "; a part of the path is a file, give another name",
    errno.EISDIR: "; it is a folder, name a file",
    errno.ENAMETOOLONG: "; give a shorter name",
    errno.ELOOP: "; a symbolic link leads back to itself, remove it or give another name",
}

# Modules of other packages that handgrad imports, and what `pip install` takes for them.
PACKAGES = {name: name for name in ("torch", "numpy", "tiktoken", "tokenizers", "safetensors")}
PACKAGES |= {name: name for name in ("huggingface_hub", "pyarrow", "rich", "jinja2", "matplotlib")}
PACKAGES |= {"PIL": "pillow", **dict.fromkeys(("triton", "nvmath", "cudnn", "pynvml"), "'handgrad[gpu]'")}


def storage_error(error: OSError, doing: str) -> StorageError:
    """The one-line error for an `OSError`. `doing`: what failed, like "writing shards/train_000000.bin"."""
    return StorageError(f"{doing} failed: {error.strerror or error}{HINTS.get(error.errno or 0, '')}")


def user_error(error: BaseException) -> HandgradError | None:
    """The error to show: a `HandgradError`, or one made of an `OSError`, short memory, a missing package; None: a bug."""
    if isinstance(error, HandgradError):
        return error
    if isinstance(error, ImportError):
        return missing_package(error)
    if isinstance(error, OSError):
        return storage_error(error, f"using {error.filename}" if error.filename else "input or output")
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):  # `Path.resolve` before Python 3.13
        return storage_error(OSError(errno.ELOOP, str(error)), "following links")
    if type(error).__name__ in ("MemoryError", "OutOfMemoryError"):  # Python's, torch's
        asked = (str(error).splitlines() or ["Python found no memory"])[0].removesuffix(".")
        return MemoryShort(f"out of memory: {asked}. Try half the --micro-batch; `handgrad plan` shows what takes memory")
    return None


def missing_package(error: ImportError) -> HandgradError | None:
    """The error to show for a package that is absent, or that Python cannot load; None for a module of ours, a bug."""
    name = (error.name or "").partition(".")[0]
    if name not in PACKAGES:
        return None
    if isinstance(error, ModuleNotFoundError) and error.name == name:
        return ConfigError(f"handgrad needs {name}, which is not installed: `pip install {PACKAGES[name]}`")
    return ConfigError(f"handgrad cannot load {name} ({error}): `pip install --upgrade {PACKAGES[name]}`")


@contextlib.contextmanager
def storage_errors(doing: str) -> Iterator[None]:
    """Turns an `OSError` in the block into the `storage_error` for `doing`."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, doing) from None


# Signals that stop a training run, besides SIGINT: the job is terminated, its terminal or connection is gone, a scheduler
# warns it (SLURM's --signal), it reaches a limit of CPU time.
STOPPING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
REPEAT_SECONDS = 1.0  # a signal that arrives again sooner is the same one, by another route


def print_message(message: object, *, ends: bool = True) -> None:
    """Prints an error or text as one line on stderr; of the processes that one launcher started on a machine, only the
    first prints it. `ends`: the message ends this process."""
    line = f"handgrad: {shown(str(message))}"
    if is_first_to_print(line, ends=ends):
        try:
            print(line, file=sys.stderr, flush=True)
        except OSError:  # the terminal is gone
            send_to_devnull(sys.stderr)


def send_to_devnull(stream: TextIO) -> None:
    """Redirects a stream whose reader is gone to /dev/null: a failure to flush it at exit would change the code to 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def is_first_to_print(text: str, *, ends: bool = True, of_all: bool = False) -> bool:
    """True unless another process that the same torchrun or `--ranks` started on this machine has asked for this text
    before. `of_all`: or for any text, because a launcher stops the others when one has failed.

    `ends`: the text ends the process; every process also hands it to torchrun, whose own report ends with it."""
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # attempt_0/RANK/error.json, in a folder of this launch
        try:
            if ends:
                extra = {"timestamp": str(int(time.time()))}
                Path(report).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
            folder = Path(report).parents[1]
            if of_all and any(folder.glob("handgrad_*")):
                return False
            (folder / f"handgrad_{zlib.crc32(text.encode()):08x}").touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:  # no such folder, or a full disk: each process prints its own
            pass
    return True


def end_interrupted(text: str = "interrupted", code: int = INTERRUPTED) -> NoReturn:
    """Prints one line and ends the process at once. Raises no exception: a library could swallow it, or abort on it."""
    cursor = "\r\x1b[K\x1b[?25h" if os.isatty(2) else ""  # a live line hides the cursor
    line = f"handgrad: {text}\n" if is_first_to_print(f"handgrad: {text}", of_all=True) else ""
    with contextlib.suppress(OSError):
        os.write(2, (cursor + line).encode())
    os._exit(code)


_first_came: dict[int, float] = {}  # signal: time


def is_repeat(number: int) -> bool:
    """True if the same signal arrived within the last second: a launcher forwards its own signals to its ranks."""
    now = time.monotonic()
    if now - _first_came.get(number, -math.inf) < REPEAT_SECONDS:
        return True
    _first_came[number] = now
    return False


def forget_signals() -> None:
    """Makes the next signal count, even if it repeats one."""
    _first_came.clear()


def end_stopped(number: int, frame: FrameType | None) -> None:
    """Handles the `STOPPING` signals while a training run makes no steps: before the first, or after the last."""
    if not is_repeat(number):
        name = signal.Signals(number).name
        end_interrupted(
            f"stopped by {name} while no step was under way, nothing to save; run the same command to resume",
            Preempted.exit_code,
        )


@contextlib.contextmanager
def stoppable(*, training: bool) -> Iterator[None]:
    """Installs `end_stopped` during a training run, for the signals that would otherwise end it silently."""
    numbers = [number for number in STOPPING if training and signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in numbers:
            signal.signal(number, end_stopped)
        yield
    finally:
        for number in numbers:
            # The run has obeyed this signal: a repeat must not change the exit code.
            signal.signal(number, signal.SIG_IGN if number in _first_came else signal.SIG_DFL)


def end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """Handles SIGINT while there is nothing to clean up, mainly during imports."""
    end_interrupted()


def interrupt_once(number: int, frame: FrameType | None) -> None:
    """Handles SIGINT: raises `KeyboardInterrupt`. A second one, or one during a late import, ends the process at once."""
    if is_repeat(number):  # the first has stopped a training run
        return
    signal.signal(signal.SIGINT, end_at_once)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            end_interrupted()
        frame = frame.f_back
    raise KeyboardInterrupt


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Installs `interrupt_once` for the block, in a program that handles SIGINT with `end_at_once`."""
    ours = signal.getsignal(signal.SIGINT) is end_at_once
    if ours:
        signal.signal(signal.SIGINT, interrupt_once)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, end_at_once)
