"""Every rank's sign of life: what ends a run within bounded time when one of its processes is lost or nothing moves.

A collective that waits for a dead, stopped or stuck rank waits for ever, or until a library's limit without a name. So each
rank has a thread that writes a beat into the store that the ranks met at, and reads: rank 0 all beats, the others rank 0's.
Whoever finds something wrong says so under one key, which all read. Clocks of machines are never compared.

A call to a store whose host is stopped does not return, whatever its time limit. So a second thread, which never calls the
store, watches the first and ends the process.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

EXIT_CODE = 75  # relaunch the same command
WORK_FACTOR = 6  # a rank may be busy so many times as long as all may wait for each other
SUSPECT_SECONDS = 5.0  # of silence are enough once a collective has failed
GRACE_SECONDS = 3.0  # between finding something wrong and ending: this rank may be about to end by itself


class Beat(NamedTuple):
    """Where a rank stands; with `left`, it has ended, by an error of these words if there are any."""

    count: int
    step: int
    operation: str
    waiting: bool
    seconds: float  # for which it has been at that
    left: str | None = None


@dataclass
class Seen:
    """A rank's last beat, and when this process first saw it."""

    beat: Beat
    since: float


class Heartbeat:
    """Tells the other ranks that this one lives and where it stands; ends the process when one of them is lost, has left
    with an error, or all of them wait for each other for `stall_seconds`."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        silence_seconds: float,
        stall_seconds: float,
        stacks: Path | None,
        end: Callable[[int], None] = os._exit,
    ):
        """`store`: a connection of its own, whose calls take at most `silence_seconds`. Writes the first beat: once all
        ranks have made theirs, `start` may be called. `stacks`: a folder for the stacks of what ends."""
        self.store, self.rank, self.size, self.stacks, self.end = store, rank, size, stacks, end
        self.silence_seconds, self.stall_seconds = silence_seconds, stall_seconds
        self.limit_seconds = silence_seconds
        self.interval = min(1.0, silence_seconds / 4)
        self.status: tuple[int, str, bool, float] = (0, "the start", True, time.monotonic())
        self.pending: Callable[[], str] = str  # names what the device is at
        self.beats = 0
        self.closing = threading.Event()
        self.seen: dict[int, Seen] = {}
        self.rounds = 0  # of beats written and read
        self.trouble = ""
        self.thread = threading.Thread(target=self.run, name="heartbeat", daemon=True)
        self.guard = threading.Thread(target=self.watch_thread, name="guard", daemon=True)
        self.write()

    def start(self) -> None:
        self.thread.start()
        self.guard.start()

    def set_status(self, step: int, operation: str, *, waiting: bool = True) -> None:
        """Notes what this rank does now: waits for others, or works."""
        self.status = step, operation, waiting, time.monotonic()

    def leave(self, words: str) -> None:
        """The last words of a rank that ends by an error which the others do not have. Returns within `silence_seconds`."""
        self.closing.set()
        if self.thread.is_alive():  # a beat on its way must not come after these words: it would be waited for
            self.thread.join(self.silence_seconds)
        if not self.thread.is_alive():  # else the store does not answer: nobody would read them
            self.say(self.beat(left=words))

    def close(self) -> None:
        """An orderly end: the others will not miss this rank."""
        if not self.closing.is_set():
            self.leave("")

    def await_verdict(self) -> None:
        """A collective failed: gives the threads the time to find out whose fault it was, and to end the process."""
        self.limit_seconds = min(self.silence_seconds, SUSPECT_SECONDS)
        self.closing.wait(self.silence_seconds + 2 * GRACE_SECONDS)

    # The threads.

    def run(self) -> None:
        while not self.trouble and not self.closing.wait(self.interval):
            try:
                self.write()
                self.trouble = self.read()
            except (dist.DistError, RuntimeError) as error:
                self.trouble = no_contact(str(error))
            self.rounds += 1

    def watch_thread(self) -> None:
        """Ends the process when `run` has found trouble, or has come to a halt itself. Counts its own turns instead of
        reading a clock: this process may have been stopped, too, and that is the others' to tell."""
        rounds, turns = -1, 0
        while not self.closing.wait(self.interval):
            turns = 0 if self.rounds != rounds else turns + 1
            rounds = self.rounds
            if not self.trouble and turns * self.interval > self.limit_seconds:
                self.trouble = no_contact(f"no answer for {turns * self.interval:.0f} s")
            if self.trouble and not self.closing.wait(GRACE_SECONDS):
                self.stop(self.trouble)
                return

    def write(self) -> None:
        self.beats += 1
        self.store.set(self.key(self.rank), json.dumps(self.beat()))

    def beat(self, left: str | None = None) -> Beat:
        step, operation, waiting, since = self.status
        return Beat(self.beats, step, operation, waiting, time.monotonic() - since, left)

    def say(self, last: Beat) -> None:
        with contextlib.suppress(dist.DistError, RuntimeError):  # the store is gone, and with it whoever would read this
            self.store.set(self.key(self.rank), json.dumps(last))

    def key(self, rank: int) -> str:
        return f"beat/{rank}"

    def read(self) -> str:
        """What is wrong, in words; empty if nothing is."""
        if self.store.check(["trouble"]):
            return self.store.get("trouble").decode()
        others = [rank for rank in (range(self.size) if self.rank == 0 else range(1)) if rank != self.rank]
        now = time.monotonic()
        for rank, text in zip(others, self.store.multi_get([self.key(rank) for rank in others]), strict=True):
            beat = Beat(*json.loads(text))
            if rank not in self.seen or self.seen[rank].beat != beat:
                self.seen[rank] = Seen(beat, now)
        trouble = self.lost_rank() or self.stalled_ranks()
        if trouble:
            self.store.set("trouble", trouble)
        return trouble

    def lost_rank(self) -> str:
        """A rank that has left with words, or whose beat has not changed for too long."""
        for rank, seen in self.seen.items():
            if seen.beat.left:
                return f"rank {rank} ended by an error: {seen.beat.left}"
            silence = time.monotonic() - seen.since
            if seen.beat.left is None and silence > self.limit_seconds:
                return (
                    f"lost rank {rank}: no sign of life for {silence:.0f} s, last seen at step {seen.beat.step},"
                    f" {seen.beat.operation}; it was killed or stopped, or its machine is gone"
                )
        return ""

    def stalled_ranks(self) -> str:
        """Ranks that all wait for each other for too long, or one that works for much longer."""
        if self.rank != 0:
            return ""
        beats = {0: self.beat(), **{rank: seen.beat for rank, seen in self.seen.items() if seen.beat.left is None}}
        all_wait = all(beat.waiting for beat in beats.values())
        shortest = min(beat.seconds for beat in beats.values())
        longest = max((beat.seconds for beat in beats.values() if not beat.waiting), default=0.0)
        if not (all_wait and shortest > self.stall_seconds) and longest <= WORK_FACTOR * self.stall_seconds:
            return ""
        groups: dict[tuple[int, str], list[int]] = {}
        for rank, beat in sorted(beats.items()):
            groups.setdefault((beat.step, beat.operation), []).append(rank)
        told = "; ".join(
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} at step {step}, {operation}"
            for (step, operation), ranks in sorted(groups.items(), key=lambda group: len(group[1]))
        )
        return f"nothing has moved for {max(shortest, longest):.0f} s: {told}"

    def stop(self, trouble: str) -> None:
        """Says in one line what is wrong and where this rank stood, writes the stacks of its threads, ends the process."""
        step, operation, _, _ = self.status
        try:
            device = self.pending()
        except RuntimeError:  # the device has failed as well
            device = ""
        where = f"step {step}, {operation}" + (f" (on the device: {device})" if device else "")
        advice = "relaunch the same command to go on from the last checkpoint"
        line = f"handgrad: rank {self.rank}, at {where}: {trouble}; {advice}"
        try:
            with contextlib.suppress(OSError):  # the launcher that read this is gone
                print(line, file=sys.stderr, flush=True)
            self.write_stacks(line)
        finally:  # whatever could not be said
            self.end(EXIT_CODE)

    def write_stacks(self, line: str) -> None:
        """Into the folder, or to stderr where there is none or it cannot be written."""
        try:
            if self.stacks is None or not self.stacks.parent.is_dir():
                raise OSError
            self.stacks.mkdir(exist_ok=True)
            with (self.stacks / f"rank_{self.rank:04d}.txt").open("w") as file:
                print(line, file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError:
            faulthandler.dump_traceback(all_threads=True)


def no_contact(told: str) -> str:
    return f"lost contact to the rendezvous, so to rank 0's machine or the launcher ({' '.join(told.split()):.120})"
