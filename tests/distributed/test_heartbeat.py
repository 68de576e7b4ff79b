"""Ranks that are killed, stopped, stuck or end by an error: the others say so and end."""

import datetime
import functools
import json
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from handgrad.errors import DataError
from handgrad.joins.parallel import heartbeat
from handgrad.joins.parallel.heartbeat import Beat, Fault, Heartbeat
from handgrad.joins.parallel.ranks import error_text

TIMEOUT = PATIENCE = 60.0  # seconds, of the ranks by the clock that a test turns, of the tests: reached only on a hang
STALL = 20.0
GRACE = 0.3
INTERVAL = 0.05  # between beats
STEP, OPERATION = 12, "exchange of blocks.3"
ENDED = "shards/train_000003.bin: expected 100 bytes, found 99"

# Ranks as processes: forks of one that has imported torch, so that each starts in milliseconds.

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["handgrad.joins.parallel.heartbeat", "tests.distributed.test_heartbeat"])


# What a rank does. The name of the function must be found in its stacks.


def rank_that_works(rank: int, beating: Heartbeat, folder: Path) -> None:
    """Goes from step to step, until the test says that it is enough."""
    step = 0
    while not (folder / "enough").exists():
        beating.set_status(step, OPERATION, waiting=bool(step % 2))
        step += 1
        time.sleep(0.02)
    beating.leave("")
    (folder / f"left_{rank}").touch()
    wait_until(lambda: all((folder / f"left_{other}").exists() for other in (0, 2)), "end of the others")


def rank_that_closes(rank: int, beating: Heartbeat, folder: Path) -> None:
    beating.leave("")


def rank_that_waits(rank: int, beating: Heartbeat, folder: Path) -> None:
    """Is in a collective that never ends."""
    wait_for_ever(rank, beating, folder, OPERATION)


def rank_that_waits_elsewhere(rank: int, beating: Heartbeat, folder: Path) -> None:
    wait_for_ever(rank, beating, folder, "exchange of blocks.2")


def wait_for_ever(rank: int, beating: Heartbeat, folder: Path, operation: str) -> None:
    """Writes where it waits once a beat has gone out with this status; loses patience when the test says so."""
    beating.set_status(STEP, operation)
    rounds = beating.rounds
    wait_until(lambda: beating.rounds > rounds + 1, "beat with this status")
    (folder / f"waits_{rank}").touch()
    wait_until((folder / "impatient").exists, "end", seconds=10 * PATIENCE)
    beating.limit_seconds = 10 * INTERVAL
    time.sleep(10 * PATIENCE)


def rank_that_fails(rank: int, beating: Heartbeat, folder: Path) -> None:
    beating.set_status(STEP, OPERATION)
    wait_until(lambda: all((folder / f"waits_{other}").exists() for other in range(3) if other != rank), "others")
    beating.leave(ENDED, 65)
    sys.exit(65)


Role = Callable[[int, Heartbeat, Path], None]


def be_rank(rank: int, roles: list[Role], port: int, hosts: bool, stall: float, folder: Path, clock: Any) -> None:
    """The process. With `hosts`, rank 0 has the store. `clock`: the group's, in shared memory."""
    os.dup2(os.open(folder / f"said_{rank}", os.O_CREAT | os.O_WRONLY), 2)
    heartbeat.GRACE_SECONDS = GRACE
    limit, patience = datetime.timedelta(seconds=TIMEOUT), datetime.timedelta(seconds=PATIENCE)
    host = dist.TCPStore("127.0.0.1", port, None, True, limit, wait_for_workers=False) if hosts and rank == 0 else None
    if host is not None:
        (folder / "port.part").write_text(str(host.port))
        (folder / "port.part").rename(folder / "port")
    elif hosts:
        wait_until((folder / "port").exists, "the store of rank 0")
    port = int((folder / "port").read_text()) if hosts else port
    store = dist.TCPStore("127.0.0.1", port, None, False, patience, wait_for_workers=False)
    size = len(roles)
    limits = {"timeout_seconds": TIMEOUT, "stall_seconds": stall}
    beating = Heartbeat(store, rank, size, **limits, stacks=folder / "stacks", clock=lambda: clock.value)
    beating.interval = INTERVAL
    store.wait([f"beat/{other}" for other in range(size)])
    store.set_timeout(limit)
    beating.start()
    roles[rank](rank, beating, folder)


class Group:
    """The processes of one test, and their clock, which stands still until the test turns it."""

    def __init__(self, folder: Path, *roles: Role, hosts: bool = False, stall: float = 10 * TIMEOUT):
        folder.mkdir()
        self.folder, self.size = folder, len(roles)
        limit = datetime.timedelta(seconds=PATIENCE)
        self.store = None if hosts else dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
        port = self.store.port if self.store is not None else 0
        self.clock = FORKS.Value("d", 1000.0, lock=False)
        place = port, hosts, stall, folder, self.clock
        self.ranks = [FORKS.Process(target=be_rank, args=(rank, list(roles), *place)) for rank in range(self.size)]
        for process in self.ranks:
            process.start()

    def send(self, rank: int, number: int) -> None:
        """Sends a signal once all ranks wait and have written where."""
        self.all_wait()
        pid = self.ranks[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def all_wait(self) -> None:
        wait_until(lambda: all((self.folder / f"waits_{other}").exists() for other in range(self.size)), "ranks")

    def running(self, *ranks: int) -> list[int]:
        """Those of `ranks` that have not ended."""
        return [rank for rank in ranks if self.ranks[rank].exitcode is None]

    def beat(self, rank: int) -> Beat:
        """The last beat of a rank."""
        if self.store is None:
            port, limit = int((self.folder / "port").read_text()), datetime.timedelta(seconds=PATIENCE)
            self.store = dist.TCPStore("127.0.0.1", port, None, False, limit, wait_for_workers=False)
        return Beat(*json.loads(self.store.get(f"beat/{rank}")))

    def settle(self, *ranks: int) -> None:
        """Waits until each of `ranks` that still runs has read what the others wrote by the present time."""
        for _ in range(2):  # all have written, all have read
            later = {rank: self.beat(rank).count + 2 for rank in ranks}
            wait_until(functools.partial(self.have_beaten, later), "beats")

    def have_beaten(self, counts: dict[int, int]) -> bool:
        """True if the ranks that still run have reached these counts of beats."""
        return all(self.beat(rank).count >= counts[rank] for rank in self.running(*counts))

    def turn(self, seconds: float, *ranks: int) -> None:
        """Turns the clock; `ranks` settle."""
        self.clock.value += seconds
        self.settle(*ranks)

    def codes(self, *ranks: int) -> list[int | None]:
        for rank in ranks:
            self.ranks[rank].join(PATIENCE)
        return [self.ranks[rank].exitcode for rank in ranks]

    def line(self, rank: int) -> str:
        """The single line of the rank; warnings of torch's network layer set aside."""
        said = (self.folder / f"said_{rank}").read_text()
        (line,) = [line for line in said.splitlines() if line.startswith("handgrad:")]
        return line

    def check(self, *ranks: int, expected: str, function: str = "rank_that_waits", relaunch: bool = True) -> None:
        """All of `ranks` printed the `expected` and where they stood, and left stacks that name the function."""
        for rank in ranks:
            line, stacks = self.line(rank), (self.folder / "stacks" / f"rank_{rank:04d}.txt").read_text()
            assert re.search(expected, line) and line.startswith(f"handgrad: rank {rank}, at step {STEP}, "), line
            assert line.endswith("; relaunch the same command to resume from the last checkpoint") == relaunch
            assert f"in {function}" in stacks and line in stacks


def wait_until(holds: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"no {what} in {seconds:g} s"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Group]]:
    """The groups of all tests at once, and their signals."""
    folder, three = tmp_path_factory.mktemp("groups"), [rank_that_waits] * 3
    started = {
        "well": Group(folder / "well", rank_that_works, rank_that_closes, rank_that_works, hosts=True, stall=STALL),
        "killed": Group(folder / "killed", *three),
        "stopped": Group(folder / "stopped", *three),
        "host stopped": Group(folder / "host-stopped", *three, hosts=True),
        "host killed": Group(folder / "host-killed", *three, hosts=True),
        "failed": Group(folder / "failed", rank_that_waits, rank_that_fails, rank_that_waits),
        "stalled": Group(folder / "stalled", rank_that_waits, rank_that_waits_elsewhere, rank_that_waits, stall=STALL),
    }
    started["killed"].send(1, signal.SIGKILL)
    started["stopped"].send(1, signal.SIGSTOP)
    started["host stopped"].send(0, signal.SIGSTOP)
    started["host killed"].send(0, signal.SIGKILL)
    yield started
    for process in [process for group in started.values() for process in group.ranks]:
        process.kill()
        process.join()


def lose(group: Group, *others: int) -> None:
    """Lets time pass in pieces shorter than the limit until `others` miss a rank and have ended."""
    for _ in range(4):
        if group.running(*others):
            group.turn(0.9 * TIMEOUT, *others)
    assert group.codes(*others) == [75] * len(others)


def test_killed(groups: dict[str, Group]) -> None:
    group = groups["killed"]
    assert group.codes(1) == [-signal.SIGKILL]
    group.settle(0, 2)
    group.turn(0.9 * TIMEOUT, 0, 2)
    assert group.running(0, 2) == [0, 2], "not yet"
    lose(group, 0, 2)
    group.check(0, 2, expected=f"lost rank 1: no heartbeat for 108 s, last seen at step {STEP}, {OPERATION}")


def test_stopped(groups: dict[str, Group]) -> None:
    """The others end; the stopped one ends when it is continued."""
    group = groups["stopped"]
    pid = group.ranks[1].pid
    assert pid is not None
    lose(group, 0, 2)
    expected = rf"lost rank 1: no heartbeat for \d+ s, last seen at step {STEP}, {OPERATION}"
    group.check(0, 2, expected=expected)
    assert group.ranks[1].exitcode is None and not (group.folder / "stacks" / "rank_0001.txt").exists()
    os.kill(pid, signal.SIGCONT)
    assert group.codes(1) == [75]
    group.check(1, expected=expected)


def test_the_host_of_the_store_is_stopped(groups: dict[str, Group]) -> None:
    """Calls to a store whose host is stopped do not return, whatever their time limit."""
    group = groups["host stopped"]
    pid = group.ranks[0].pid
    assert pid is not None
    (group.folder / "impatient").touch()
    assert group.codes(1, 2) == [75, 75]
    group.check(1, 2, expected="the rendezvous")
    os.kill(pid, signal.SIGCONT)

    def ended_by_and_by() -> bool:
        group.clock.value += TIMEOUT
        return not group.running(0)

    wait_until(ended_by_and_by, "end of rank 0")
    assert group.codes(0) == [75]
    assert "lost rank " in group.line(0)


def test_the_host_of_the_store_is_killed(groups: dict[str, Group]) -> None:
    group = groups["host killed"]
    assert group.codes(1, 2) == [75, 75]
    group.check(1, 2, expected="the rendezvous")


def test_a_rank_that_fails_takes_the_others_along(groups: dict[str, Group]) -> None:
    """With its own exit code: relaunched, they would meet the same error."""
    group = groups["failed"]
    assert group.codes(0, 1, 2) == [65, 65, 65]
    group.check(0, 2, expected=f"rank 1 ended by an error: {ENDED}$", relaunch=False)


def test_nothing_moves(groups: dict[str, Group]) -> None:
    group = groups["stalled"]
    group.all_wait()
    group.turn(0.9 * STALL, 0, 1, 2)
    assert group.running(0, 1, 2) == [0, 1, 2], "not yet"
    group.turn(0.2 * STALL, 0, 1, 2)
    assert group.codes(0, 1, 2) == [75, 75, 75]
    where = f"rank 1 at step {STEP}, exchange of blocks.2; ranks 0, 2 at step {STEP}, {OPERATION}; relaunch"
    group.check(0, 2, expected=f"nothing has moved for 22 s: {where}")
    group.check(1, expected="nothing has moved for ", function="rank_that_waits_elsewhere")


def test_all_is_well(groups: dict[str, Group]) -> None:
    """The control, for longer than every limit: ranks that move are left alone, also after one has closed."""
    group = groups["well"]
    wait_until((group.folder / "port").exists, "store of rank 0")
    assert group.codes(1) == [0]
    for _ in range(8):  # 144 s
        group.turn(0.9 * STALL, 0, 2)
        wait_until(lambda: all(group.beat(rank).seconds == 0 for rank in (0, 2)), "new status")
        group.settle(0, 2)
        assert group.running(0, 2) == [0, 2]
    (group.folder / "enough").touch()
    assert group.codes(0, 1, 2) == [0, 0, 0]
    assert not any("handgrad:" in (group.folder / f"said_{rank}").read_text() for rank in range(3))
    assert not (group.folder / "stacks").exists()


# A single process, its store a dictionary, a clock that the test turns, and a list in the place of the process's end.


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def alone(
    folder: Path | None = None,
    ends: list[int] | None = None,
    *,
    rank: int = 0,
    size: int = 1,
    stall: float = 10 * TIMEOUT,
    timeout: float = TIMEOUT,
    store: dist.Store | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Heartbeat:
    store, end = store or dist.HashStore(), ([] if ends is None else ends).append
    limits = {"timeout_seconds": timeout, "stall_seconds": stall}
    return Heartbeat(store, rank, size, **limits, stacks=folder, end=end, clock=clock)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_silence_is_told_to_all(lost: int) -> None:
    store, clock = dist.HashStore(), Clock()
    ranks = [alone(rank=rank, size=3, store=store, clock=clock) for rank in range(3)]
    for _ in range(3):
        clock.now += 0.9 * TIMEOUT
        for beating in ranks:
            beating.write(beating.beat())
        assert [beating.read() for beating in ranks] == [None] * 3, "all is well"
    others = [beating for beating in ranks if beating.rank != lost]
    clock.now += 0.9 * TIMEOUT
    for beating in others:
        beating.write(beating.beat())
    assert [beating.read() for beating in others] == [None] * 2
    clock.now += 0.2 * TIMEOUT
    for beating in others:
        beating.write(beating.beat())
    faults = [beating.read() for beating in others]
    assert faults[0] is not None and faults[0].text.startswith(f"lost rank {lost}: no heartbeat for 66 s"), faults
    assert faults[1] == faults[0] and faults[0].exit_code == 75


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError(), "KeyError"),
        (AssertionError(), "AssertionError"),
        (AssertionError(" \n"), "AssertionError"),
        (DataError(""), "DataError"),
        (DataError("a shard"), "a shard"),
        (KeyError("a"), "KeyError: 'a'"),
    ],
)
def test_an_error_without_a_text_has_its_type(error: Exception, text: str) -> None:
    """The others would take none for an orderly end."""
    assert error_text(error) == text


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_is_told_to_all(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "SUSPECT_SECONDS", 0.0)  # nobody reads before rank 0 has left
    store = dist.HashStore()
    ranks = [alone(rank=rank, size=4, store=store) for rank in range(4)]
    ranks[3].leave("")  # an orderly end: nobody misses it
    ranks[failing].leave("MemoryError", 1)
    finder, reader = ranks[1 - failing], ranks[2]
    expected = Fault(f"rank {failing} ended by an error: MemoryError", 1)
    assert finder.read() == expected and reader.read() == expected


def test_work_may_take_longer_than_waiting() -> None:
    for waiting, stalls, stalled in ((True, 0.9, False), (True, 1.1, True), (False, 5.9, False), (False, 6.1, True)):
        clock = Clock()
        beating = alone(stall=STALL, clock=clock)
        beating.set_status(STEP, OPERATION, waiting=waiting)
        clock.now += stalls * STALL
        assert (beating.stalled_ranks() is not None) == stalled, (waiting, stalls)


def test_one_that_waits_for_one_that_works_is_patient() -> None:
    for waiting in (True, False):
        store, clock = dist.HashStore(), Clock()
        first, second = (alone(rank=rank, size=2, store=store, stall=STALL, clock=clock) for rank in (0, 1))
        first.set_status(STEP, OPERATION)
        second.set_status(STEP, "saving", waiting=waiting)
        clock.now += 2 * STALL
        second.write(second.beat())
        assert (first.read() is not None) == waiting
