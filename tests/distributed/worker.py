"""One rank of a run, with a fault built into its own process: `python -m tests.distributed.worker FAULT COMMAND...`.

A fault is NAME:RANK or NAME:RANK:STEP (steps counted from 0, as `TrainStep.begin` does) and hits that rank alone, in
torchrun's first start and not in a restart; several are joined by "+". It says `fault fired` on stderr when it does.

`python -m tests.distributed.worker serve FOLDER` imports everything once and then forks a process for every order in the
folder: the seconds that an import takes would else be most of a test's time.
"""

import contextlib
import datetime
import functools
import gc
import importlib
import importlib.util
import json
import os
import runpy
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import handgrad.commands.train
from benchmarks import network
from handgrad.cli import main
from handgrad.joins.parallel import heartbeat, rendezvous
from handgrad.joins.parallel.ranks import Ranks
from handgrad.joins.parallel.step import ParallelStep
from handgrad.training.step import TrainStep
from tests.distributed import bit_flips, save_faults
from tests.faults import moments, work
from tests.faults.firing import before, fired, send

LANE_SECONDS, SLOW_SECONDS, WAIT_SECONDS = 0.0625, 0.25, 1024.0  # sums of these are exact
HOURS = 1e5  # seconds
POLL_SECONDS = 0.01
# Modules that a run imports when it needs them: a server imports them before its forks do.
LATE = (
    *("encodings.idna", "encodings.utf_8_sig", "rich._emoji_codes", "handgrad.api.reports", "handgrad.reports.page"),
    *("handgrad.joins.dropout.reference", "handgrad.models.llama", "handgrad.models.modern", "handgrad.ops.cpu"),
)


def in_exchange(number: int) -> Callable[[int], None]:
    """A signal while a block's gradients are on their way."""

    def install(step: int) -> None:
        due = lambda ranks, work, operation: ranks.step == step and operation.startswith("gradients of blocks.")  # noqa: E731
        before(Ranks, "wait", due, send(number))

    return install


def told_to_stop(step: int) -> None:
    before(TrainStep, "begin", lambda training, now: now == step, send(signal.SIGTERM))


def killed_in_step(step: int) -> None:
    before(TrainStep, "finish", lambda training, now: now == step, send(signal.SIGKILL))


class Finished:
    """The handle of an exchange that never takes place."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def skipped(step: int) -> None:
    """Leaves out the exchange of the upper block's gradients; the lower block's has the same shape."""
    original = Ranks.all_to_all

    def all_to_all(
        ranks: Ranks, received: torch.Tensor, sent: torch.Tensor, operation: str, *more: Any, **named: Any
    ) -> Any:
        if ranks.step == step and operation == "gradients of blocks.1":
            fired()
            return Finished()
        return original(ranks, received, sent, operation, *more, **named)

    Ranks.all_to_all = all_to_all


def timed_by_hand(*, slow: bool) -> None:
    """Gives this rank a clock that stands still but for a wait for others, 1024 s, and a step's lane: 62.5 ms, and 250 ms
    more on the `slow` one."""
    now, run_lane_of, waiting_of = [0.0], ParallelStep.run_lane, Ranks.waiting

    def run_lane(training: ParallelStep, step: int, lane: int) -> None:
        if slow and step == 0:
            fired()
        now[0] += LANE_SECONDS + (SLOW_SECONDS if slow else 0.0)
        run_lane_of(training, step, lane)

    @contextlib.contextmanager
    def waiting(ranks: Ranks, operation: str) -> Iterator[None]:
        with waiting_of(ranks, operation):
            now[0] += WAIT_SECONDS
            yield

    ParallelStep.run_lane, Ranks.waiting = run_lane, waiting
    rendezvous.Ranks = functools.partial(Ranks, clock=lambda: now[0])


def impatient_heartbeat(*given: Any, **named: Any) -> heartbeat.Heartbeat:
    """A heartbeat with short limits from when the test has seen the fault and this rank waits for others. Until then the
    machine may be as slow as it likes."""
    beating, told = heartbeat.Heartbeat(*given, **named), Path(os.environ["TEST_FOLDER"]) / "impatient"

    def shorten() -> None:
        while not (told.exists() and beating.status[2]):
            time.sleep(POLL_SECONDS)
        beating.limit_seconds, beating.stall_seconds = 2.0, 1.0

    threading.Thread(target=shorten, daemon=True).start()
    return beating


def slow_link(peer: int) -> None:
    """Hours for a few megabytes: no load on the machine makes another link as slow."""
    original = network.time_pair

    def time_pair(ranks: Ranks, sent: torch.Tensor, received: torch.Tensor, other: int) -> float:
        seconds = original(ranks, sent, received, other)
        if other != peer:
            return seconds
        fired()
        return HOURS + seconds

    network.time_pair = time_pair


def resized(step: int) -> None:
    """Half of the upper block's gradients."""
    original = Ranks.all_to_all

    def all_to_all(
        ranks: Ranks, received: torch.Tensor, sent: torch.Tensor, operation: str, *more: Any, **named: Any
    ) -> Any:
        if ranks.step == step and operation == "gradients of blocks.1":
            fired()
            received, sent = received[: len(received) // 2], sent[: len(sent) // 2]
        return original(ranks, received, sent, operation, *more, **named)

    Ranks.all_to_all = all_to_all


class SlowToEnd:
    """A module that Python takes apart at its end, when the threads that are left may no longer take its lock."""

    def __del__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        sleep(6.0)


def still_connecting(step: int) -> None:
    """The connection to rank 0 hangs in C++ for 10 s: longer than the rank waits, but not than Python takes to end."""

    def connect(*given: Any, **named: Any) -> None:
        fired()
        dist.HashStore().wait(["never set"], datetime.timedelta(seconds=10))

    dist.TCPStore = connect
    sys.modules["slow to end"] = SlowToEnd()


def fails(error: BaseException) -> Callable[[int], None]:
    """An error in a rank's own work on a step."""

    def act() -> None:
        raise error

    return lambda step: before(ParallelStep, "run_lane", lambda training, now, lane: now == step, act)


def out_of_memory(step: int) -> None:
    """The device's memory is full when the host waits for the collective."""

    def wait(work: Any) -> None:
        fired()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    original = Ranks.wait

    def patched(ranks: Ranks, work: Any, operation: str) -> None:
        full = ranks.step == step and operation.startswith("gradients of blocks.")
        original(ranks, SimpleNamespace(wait=lambda: wait(work)) if full else work, operation)

    Ranks.wait = patched


def other_code(step: int) -> None:
    """This rank's package is a copy in which a comment differs; its version number is the same."""
    copy = Path(os.environ["TEST_FOLDER"]) / f"handgrad-{os.getpid()}"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(handgrad.__file__).parent, copy, ignore=ignored)
    with (copy / "ops" / "reference" / "activations.py").open("a") as file:
        file.write("# as before\n")
    handgrad.__file__ = str(copy / "__init__.py")
    os.chdir(copy)  # in a checkout, a command says which code it runs
    fired()


FAULTS: dict[str, Callable[[int], None]] = {
    "signal": told_to_stop,
    "kill": in_exchange(signal.SIGKILL),
    "freeze": in_exchange(signal.SIGSTOP),
    "kill-step": killed_in_step,
    "kill-save": save_faults.killed_in_save,
    "kill-record": save_faults.killed_before_record,
    "kill-write": save_faults.killed_in_write,
    "slow-disk": save_faults.slow_disk,
    "disk": save_faults.full_disk,
    "disk-for-good": save_faults.full_for_good,
    "skip": skipped,
    "slow-link": slow_link,
    **bit_flips.FAULTS,
    "flip-save": save_faults.flipped_in_save,
    "resize": resized,
    "break": fails(AssertionError("a mistake of our own")),
    "break-silent": fails(KeyError()),
    "memory": out_of_memory,
    "other-code": other_code,
    "connecting": still_connecting,
    **moments.FAULTS,
    **work.FAULTS,
}


def is_first_start() -> bool:
    """By torchrun's count, or, where its agents do not agree on one, by a file that the first start leaves."""
    if not (path := os.environ.get("TEST_STARTED")):
        return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    first = not Path(path).exists()
    Path(path).touch()
    return first


def build_in(name: str, *numbers: str) -> None:
    if name != "none":
        rank, step = (int(number) for number in (*numbers, "0")[:2])
        if name == "freeze":
            rendezvous.Heartbeat = impatient_heartbeat
        if name in ("skip", "resize"):  # rank 0 has the store in which the others read of it
            heartbeat.GRACE_SECONDS = 2.0
        mine = int(os.environ.get("RANK", "0")) == rank
        if name == "slow":
            timed_by_hand(slow=mine)
        elif mine and is_first_start():
            FAULTS[name](step)


def run(fault: str, command: list[str]) -> int:
    handgrad.commands.train.write_report = lambda runs, out: out  # plots take longer than these runs
    rendezvous.RETRY_SECONDS = 0.02
    heartbeat.GRACE_SECONDS, heartbeat.SUSPECT_SECONDS, heartbeat.INTERVAL_SECONDS = 0.5, 2.0, 0.2
    for one in fault.split("+"):
        build_in(*one.split(":"))
    if command[0].endswith(".py"):
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")
        return 0
    if command[0] == "-m":
        return importlib.import_module(command[1]).main(command[2:])
    return main(command)


def serve(orders: Path) -> None:
    """Forks a process for every `*.order` in the folder, a JSON object: fault, command, environment, cwd, and a folder that
    gets the process's `output`, `errors`, `pid` and, in the end, its exit `code`. Ends with its stdin."""
    for name in LATE:
        importlib.import_module(name)
    gc.freeze()  # what was imported is not looked at again, so a fork need not copy it
    folders: dict[int, Path] = {}
    while not select.select([0], [], [], POLL_SECONDS)[0]:
        for path in sorted(orders.glob("*.order")):
            order = json.loads(path.read_text())
            path.unlink()
            if not (pid := os.fork()):
                become(order)
            folders[pid] = Path(order["folder"])
            put(folders[pid] / "pid", pid)
        for pid in list(folders):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                put(folders.pop(pid) / "code", os.waitstatus_to_exitcode(status))


def become(order: dict[str, Any]) -> None:
    """The process that was ordered."""
    for number, name in ((0, os.devnull), (1, "output"), (2, "errors")):
        handle = os.open(Path(order["folder"]) / name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT)
        os.dup2(handle, number)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environment"])
    # As `python -m handgrad` has it: processes that a run spawns would else import this module, and torch with it.
    sys.modules["__main__"] = ModuleType("__main__")
    sys.modules["__main__"].__spec__ = importlib.util.find_spec("handgrad.__main__")
    try:
        code = run(order["fault"], order["command"])
    except SystemExit as left:
        code = left.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if code == 0:  # what is left is to take down the interpreter, for a fork a copy of its whole memory
        sys.stdout.flush()
        os._exit(0)
    sys.exit(code)


def put(path: Path, number: int) -> None:
    """Written whole, or not there."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(str(number))
    partial.rename(path)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(Path(sys.argv[2]))
    else:
        sys.exit(run(sys.argv[1], sys.argv[2:]))
