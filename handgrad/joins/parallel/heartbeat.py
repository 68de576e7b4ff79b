"""The ranks' heartbeat: ends a run within bounded time if a process is lost or all ranks are stuck.

A collective waits forever for a dead, stopped or stuck rank, or until a library's timeout that names no rank. So a thread
of each rank writes heartbeats to the rendezvous store and reads others: rank 0 reads all, the rest read rank 0's. The first
rank to find a fault writes it under one key that all ranks read. The ranks never compare clocks of different machines, and
a pause of all ranks together counts as silence of none (`RunningClock`).

A call to a store whose host is stopped never returns, whatever its timeout. So a second thread, the guard, which never
calls the store, watches the first and ends the process.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from handgrad.errors import RESUMABLE, NumericsError
from handgrad.joins.parallel.order import Entry, difference_text, first_difference, named_ranks

INTERVAL_SECONDS = 1.0  # between heartbeats
WORK_FACTOR = 6  # limit of one rank's work, as a multiple of the limit for waiting
SUSPECT_SECONDS = 5.0  # of silence suffice after a failed collective
READ_SECONDS = 0.05  # between checks whether the others know of an error
GRACE_SECONDS = 3.0  # between finding a fault and ending the process, which may be about to end by itself


class RunningClock:
    """Seconds for which this process was running. Counts at most `most_seconds` between reads, so read it more often.

    `scontrol suspend`, `docker pause` and a frozen virtual machine stop all processes of a run together. By the machine's
    clock, the first process to continue would mistake the pause for silence of the others."""

    def __init__(self, most_seconds: float, clock: Callable[[], float] = time.monotonic):
        self.most_seconds, self.clock = most_seconds, clock
        self.seconds, self.looked, self.lock = 0.0, clock(), threading.Lock()

    def __call__(self) -> float:
        with self.lock:
            now = self.clock()
            self.seconds += min(now - self.looked, self.most_seconds)
            self.looked = now
            return self.seconds


class Beat(NamedTuple):
    """A rank's status. A rank that leaves sends a last beat, with its error's text, or "" for an orderly end."""

    count: int
    step: int
    operation: str
    waiting: bool
    seconds: float  # in this status
    left: str | None = None
    exit_code: int = RESUMABLE
    recent: Sequence[Entry] = ()  # its last collectives, sent after a long wait


class Fault(NamedTuple):
    """A reason to end the run, and the exit code for the ranks that did not cause it."""

    text: str
    exit_code: int = RESUMABLE


@dataclass
class Seen:
    """A rank's last heartbeat, and when this process first saw it."""

    beat: Beat
    since: float


class Heartbeat:
    """Publishes this rank's status. Ends the process if another rank is lost or fails, or if all wait too long."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        timeout_seconds: float,
        stall_seconds: float,
        stacks: Path | None,
        end: Callable[[int], None] = os._exit,
        clock: Callable[[], float] | None = None,
    ):
        """Writes the first heartbeat; call `start` once all ranks have written theirs. `store`: a connection of its own,
        whose calls take at most `timeout_seconds`. `stacks`: folder for the thread stacks of a process that this ends."""
        self.store, self.rank, self.size, self.stacks = store, rank, size, stacks
        self.timeout_seconds, self.stall_seconds = timeout_seconds, stall_seconds
        self.limit_seconds = timeout_seconds
        self.interval = min(INTERVAL_SECONDS, timeout_seconds / 4)
        self.end, self.clock = end, clock or RunningClock(2 * self.interval)
        self.status: tuple[int, str, bool, float] = (0, "the start", True, self.clock())
        self.pending: Callable[[], str] = str  # names the device's unfinished collective
        self.recent: Iterable[Entry] = ()  # this rank's last collectives
        self.beats = 0
        self.closing = threading.Event()
        self.seen: dict[int, Seen] = {}
        self.rounds = 0  # of heartbeats written and read
        self.fault: Fault | None = None
        self.thread = threading.Thread(target=self.run, name="heartbeat", daemon=True)
        self.guard = threading.Thread(target=self.guard_thread, name="guard", daemon=True)
        self.write(self.beat())

    def start(self) -> None:
        self.thread.start()
        self.guard.start()

    def set_status(self, step: int, operation: str, *, waiting: bool = True) -> None:
        """Sets this rank's status: waiting for others, or working."""
        self.status = step, operation, waiting, self.clock()

    def leave(self, text: str, exit_code: int = RESUMABLE) -> None:
        """Tells the others the error that ends this rank or, with text "", its orderly end. Returns within
        `timeout_seconds`; rank 0, which hosts the store, gives the others a few seconds more to read its error."""
        if self.closing.is_set():
            return
        self.closing.set()
        if self.thread.is_alive():  # the thread must not write another heartbeat after this one
            self.thread.join(self.timeout_seconds)
        if not self.thread.is_alive():  # else the store hangs, and no rank could read the message
            with contextlib.suppress(dist.DistError, RuntimeError):  # the store is gone, and with it the readers
                self.write(self.beat(text, exit_code))
                if text and self.rank == 0:
                    self.await_readers()

    def await_readers(self) -> None:
        """Waits until all others know of a fault, for at most `SUSPECT_SECONDS`."""
        readers = [self.knows(rank) for rank in range(1, self.size)]
        for _ in range(int(SUSPECT_SECONDS / READ_SECONDS)):
            if self.store.check(readers):
                return
            time.sleep(READ_SECONDS)

    def await_verdict(self) -> None:
        """Call it after a failed collective. Gives the threads time to find the rank at fault and to end the process.
        Counts their rounds instead of seconds, because they run late on a busy machine."""
        self.limit_seconds = min(self.timeout_seconds, SUSPECT_SECONDS)
        last = self.rounds + int(self.timeout_seconds / self.interval) + 3
        while self.thread.is_alive() and self.rounds < last and not self.closing.wait(self.interval):
            pass
        if self.fault is not None and not self.closing.is_set():
            self.guard.join()  # it ends the process

    # The threads.

    def run(self) -> None:
        while self.fault is None and not self.closing.wait(self.interval):
            try:
                self.write(self.beat())
                self.fault = self.read()
                if self.fault is not None:
                    self.store.set(self.knows(self.rank), "")
            except (dist.DistError, RuntimeError) as error:
                self.fault = no_contact(str(error))
            self.rounds += 1

    def guard_thread(self) -> None:
        """Ends the process if `run` has found a fault or is itself stuck. Counts its own turns instead of seconds, because
        this process may have been stopped; then the others report it."""
        rounds, turns = -1, 0
        while not self.closing.wait(self.interval):
            turns = 0 if self.rounds != rounds else turns + 1
            rounds = self.rounds
            if self.fault is None and turns * self.interval > self.limit_seconds:
                self.fault = no_contact(f"no answer for {turns * self.interval:.0f} s")
            if self.fault is not None and not self.closing.wait(GRACE_SECONDS):
                self.stop(self.fault)
                return

    def beat(self, left: str | None = None, exit_code: int = RESUMABLE) -> Beat:
        step, operation, waiting, since = self.status
        seconds = self.clock() - since
        recent = list(self.recent) if waiting and seconds > self.interval else ()
        return Beat(self.beats, step, operation, waiting, seconds, left, exit_code, recent)

    def write(self, beat: Beat) -> None:
        self.beats += 1
        self.store.set(self.key(self.rank), json.dumps(beat))

    def key(self, rank: int) -> str:
        return f"beat/{rank}"

    def knows(self, rank: int) -> str:
        return f"knows/{rank}"

    def read(self) -> Fault | None:
        """The fault that ends this run, if any, found by this rank or another."""
        if self.store.check(["fault"]):
            return Fault(*json.loads(self.store.get("fault")))
        others = [rank for rank in (range(self.size) if self.rank == 0 else range(1)) if rank != self.rank]
        now = self.clock()
        for rank, text in zip(others, self.store.multi_get([self.key(rank) for rank in others]), strict=True):
            beat = Beat(*json.loads(text))
            if rank not in self.seen or self.seen[rank].beat != beat:
                self.seen[rank] = Seen(beat, now)
        fault = self.out_of_order() or self.lost_rank() or self.stalled_ranks()
        if fault is not None:
            self.store.set("fault", json.dumps(fault))
        return fault

    def out_of_order(self) -> Fault | None:
        """On rank 0: a fault if ranks wait for each other at different collectives."""
        if self.rank != 0:
            return None
        sides = first_difference({0: list(self.recent), **{rank: seen.beat.recent for rank, seen in self.seen.items()}})
        return Fault(difference_text(sides), NumericsError.exit_code) if sides else None

    def lost_rank(self) -> Fault | None:
        """A fault if a rank has left with an error, or its heartbeat has not changed for too long."""
        for rank, seen in self.seen.items():
            if seen.beat.left:
                return Fault(f"rank {rank} ended by an error: {seen.beat.left}", seen.beat.exit_code)
            silence = self.clock() - seen.since
            if seen.beat.left is None and silence > self.limit_seconds:
                return Fault(
                    f"lost rank {rank}: no heartbeat for {silence:.0f} s, last seen at step {seen.beat.step},"
                    f" {seen.beat.operation}; it was killed or stopped, or its machine is gone"
                )
        return None

    def stalled_ranks(self) -> Fault | None:
        """On rank 0: a fault if all ranks wait for each other for too long, or one works for much longer."""
        if self.rank != 0:
            return None
        beats = {0: self.beat(), **{rank: seen.beat for rank, seen in self.seen.items() if seen.beat.left is None}}
        all_wait = all(beat.waiting for beat in beats.values())
        shortest = min(beat.seconds for beat in beats.values())
        longest = max((beat.seconds for beat in beats.values() if not beat.waiting), default=0.0)
        if not (all_wait and shortest > self.stall_seconds) and longest <= WORK_FACTOR * self.stall_seconds:
            return None
        groups: dict[tuple[int, str], list[int]] = {}
        for rank, beat in sorted(beats.items()):
            groups.setdefault((beat.step, beat.operation), []).append(rank)
        where = "; ".join(
            f"{named_ranks(ranks)} at step {step}, {operation}"
            for (step, operation), ranks in sorted(groups.items(), key=lambda group: len(group[1]))
        )
        return Fault(f"nothing has moved for {max(shortest, longest):.0f} s: {where}")

    def stop(self, fault: Fault) -> None:
        """Prints the fault and this rank's status in one line, writes its thread stacks, and ends the process."""
        step, operation, _, _ = self.status
        try:
            device = self.pending()
        except RuntimeError:  # the device has failed too
            device = ""
        where = f"step {step}, {operation}" + (f" (on the device: {device})" if device else "")
        advice = "; relaunch the same command to resume from the last checkpoint" if fault.exit_code == RESUMABLE else ""
        line = f"handgrad: rank {self.rank}, at {where}: {fault.text}{advice}"
        try:
            with contextlib.suppress(OSError):  # the launcher that reads this is gone
                print(line, file=sys.stderr, flush=True)
            self.write_stacks(line)
        finally:  # even if a write failed
            self.end(fault.exit_code)

    def write_stacks(self, line: str) -> None:
        """Writes to the folder, or to stderr if there is none or it is not writable."""
        try:
            if self.stacks is None or not self.stacks.parent.is_dir():
                raise OSError
            self.stacks.mkdir(exist_ok=True)
            with (self.stacks / f"rank_{self.rank:04d}.txt").open("w") as file:
                print(line, file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError:
            faulthandler.dump_traceback(all_threads=True)


def no_contact(reason: str) -> Fault:
    return Fault(
        f"lost contact to the rendezvous, so to rank 0's machine or the launcher ({' '.join(reason.split()):.120})"
    )
