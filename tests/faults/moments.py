"""Faults at a moment of a run that a number chooses: a byte of a save, an operation on the checkpoints' folders and files,
a call, a wait for other ranks. They count from the start of their process, so the same number is the same moment again."""

import errno
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import handgrad
from handgrad import errors
from handgrad.joins.parallel.ranks import Ranks
from handgrad.run.checkpointing import GatheredBucket
from handgrad.storage import checkpoint
from handgrad.storage.manifest import MANIFEST
from handgrad.storage.run_files import CHECKPOINTS
from handgrad.training.step import TrainStep
from tests.faults.firing import before, fired, nth, send

PACKAGE = str(Path(handgrad.__file__).parent)
OPERATIONS = 16  # of a save and of the removal of an old checkpoint, about
GATHERS = 60  # of a save on two ranks, at least
PATIENCE_SECONDS = 60.0
CALLS, WAITS = 3000, 40  # of the first steps, at least


def fail(code: int) -> Callable[[], NoReturn]:
    def act() -> NoReturn:
        raise OSError(code, os.strerror(code))

    return act


def at_byte(number: int, act: Callable[[], Any]) -> None:
    """`act` when so many bytes of checkpoints are written. It does not return."""
    original, left = checkpoint.write_file, [number]

    def cut(chunks: Any) -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            if len(chunk) > left[0]:
                yield chunk[: left[0]]
                fired()
                act()
                time.sleep(PATIENCE_SECONDS)  # a signal's handler may run on another thread
                raise AssertionError("the fault let the save go on")
            left[0] -= len(chunk)
            yield chunk

    checkpoint.write_file = lambda path, chunks: original(path, cut(chunks))


def operations(seen: Callable[[str, str], Any]) -> None:
    """Calls `seen(operation, path)` before each fsync, and each operation that changes a folder, among the checkpoints."""
    sync = os.fsync

    def see(operation: str, path: Any, folder: int = -1) -> None:
        name = os.fspath(path) if not isinstance(path, int) else Path(f"/proc/self/fd/{path}").readlink()
        whole = Path(f"/proc/self/fd/{folder}").readlink() / name if folder >= 0 else name
        if CHECKPOINTS in Path(whole).parts:
            seen(operation, str(whole))

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if event == "open" and given[2] & os.O_CREAT:
            see(event, given[0])
        elif event in ("os.mkdir", "os.remove", "os.rmdir"):
            see(event, given[0], given[-1])
        elif event == "os.rename":
            see(event, given[1])

    def fsync(descriptor: int) -> None:
        see("fsync", descriptor)
        sync(descriptor)

    sys.addaudithook(hook)
    os.fsync = fsync


def at_operation(number: int, act: Callable[[], Any], due: Callable[[str, str], bool] = lambda *_: True) -> None:
    """`act` before operation `number` of those that are `due`."""
    here = nth(number)

    def seen(operation: str, path: str) -> None:
        if due(operation, path) and here():
            fired()
            act()

    operations(seen)


def removes(operation: str, path: str) -> bool:
    return operation in ("os.remove", "os.rmdir") or (operation == "os.rename" and path.endswith(checkpoint.REMOVED))


def opens_manifest(operation: str, path: str) -> bool:
    return operation == "open" and path.endswith(MANIFEST)


def at_call(number: int, act: Callable[[], Any]) -> None:
    """`act` at a call of a function of handgrad, counted from the first step on."""
    here = nth(number)

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE) and here():
            sys.setprofile(None)
            fired()
            act()

    def begin(original: Callable[..., Any]) -> Callable[..., Any]:
        def patched(training: TrainStep, step: int) -> None:
            if not installed:
                installed.append(True)
                sys.setprofile(watch)
            original(training, step)

        return patched

    installed: list[bool] = []
    TrainStep.begin = begin(TrainStep.begin)


def twice(install: Callable[[int, Callable[[], Any]], None]) -> Callable[[int], None]:
    """SIGTERM in the first step, and at a moment of the save that follows."""

    def installed(number: int) -> None:
        errors.REPEAT_SECONDS = 0.0
        before(TrainStep, "begin", nth(0), send(signal.SIGTERM))
        install(number, send(signal.SIGTERM))

    return installed


KILL = send(signal.SIGKILL)
FAULTS: dict[str, Callable[[int], None]] = {
    "kill-byte": lambda number: at_byte(number, KILL),
    "kill-operation": lambda number: at_operation(number, KILL),
    "kill-removal": lambda number: at_operation(number, KILL, removes),
    "kill-manifest": lambda number: at_operation(number, KILL, opens_manifest),
    "kill-gather": lambda number: before(GatheredBucket, "__call__", nth(number), KILL),
    "kill-wait": lambda number: before(Ranks, "wait", nth(number), KILL),
    "full-byte": lambda number: at_byte(number, fail(errno.ENOSPC)),
    "full-operation": lambda number: at_operation(number, fail(errno.ENOSPC)),
    "fail-operation": lambda number: at_operation(number, fail(errno.EIO)),
    "signal-call": lambda number: at_call(number, send(signal.SIGTERM)),
    "signal-byte": twice(at_byte),
    "signal-operation": twice(at_operation),
}


def in_save(seed: int, kind: str, size_bytes: int) -> str:
    """A fault of a `kind` at a random moment of rank 0's next save of `size_bytes`."""
    dice = random.Random(seed)
    number = dice.randrange(size_bytes)
    return f"{kind}-operation:0:{number % OPERATIONS}" if dice.random() < 0.25 else f"{kind}-byte:0:{number}"


def in_gathering(seed: int, size_bytes: int) -> str:
    """A kill of one of two ranks at a random moment of the next save."""
    dice = random.Random(seed)
    rank = dice.randrange(2)
    if rank == 0 and dice.random() < 0.5:
        return in_save(seed, "kill", size_bytes)
    return f"kill-gather:{rank}:{dice.randrange(GATHERS)}"


def in_steps(seed: int) -> str:
    """SIGTERM at a random moment of the next steps."""
    return f"signal-call:0:{random.Random(seed).randrange(CALLS)}"


def in_exchange(seed: int) -> str:
    """A kill of one of two ranks before a random wait for the other one."""
    dice = random.Random(seed)
    return f"kill-wait:{dice.randrange(2)}:{dice.randrange(WAITS)}"
