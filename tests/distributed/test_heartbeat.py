"""Ranks that are killed, stopped, stuck or end by an error: the others say so and end."""

import datetime
import io
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from handgrad.parallel import heartbeat
from handgrad.parallel.heartbeat import Fault, Heartbeat

TIMEOUT = 4.0  # seconds without a beat
STALL = 1.0
GRACE = 0.3
PATIENCE = 60.0  # of the tests, which wait for events: reached by no machine that works
STEP, OPERATION = 12, "exchange of blocks.3"
ENDED = "shards/train_000003.bin: expected 100 bytes, found 99"

# Ranks as processes: forks of one that has imported torch, so that each starts in milliseconds.

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["handgrad.parallel.heartbeat", "tests.distributed.test_heartbeat"])


# What a rank does. The name of the function must be found in its stacks.


def rank_that_works(rank: int, beating: Heartbeat, folder: Path) -> None:
    """Goes from step to step, until the test says that it is enough."""
    step = 0
    while not (folder / "enough").exists():
        beating.set_status(step, OPERATION, waiting=bool(step % 2))
        step += 1
        time.sleep(0.02)
    beating.leave("")


def rank_that_closes(rank: int, beating: Heartbeat, folder: Path) -> None:
    beating.leave("")


def rank_that_waits(rank: int, beating: Heartbeat, folder: Path) -> None:
    """Is in a collective that never ends."""
    beating.set_status(STEP, OPERATION)
    rounds = beating.rounds
    wait_until(lambda: beating.rounds > rounds + 1, "beat with this status")
    (folder / f"waits_{rank}").touch()
    time.sleep(2 * PATIENCE)


def rank_that_waits_elsewhere(rank: int, beating: Heartbeat, folder: Path) -> None:
    beating.set_status(STEP, "exchange of blocks.2")
    time.sleep(2 * PATIENCE)


def rank_that_fails(rank: int, beating: Heartbeat, folder: Path) -> None:
    beating.set_status(STEP, OPERATION)
    wait_until(lambda: all((folder / f"waits_{other}").exists() for other in range(3) if other != rank), "others")
    beating.leave(ENDED, 65)
    sys.exit(65)


Role = Callable[[int, Heartbeat, Path], None]


def be_rank(rank: int, roles: list[Role], port: int, hosts: bool, stall: float, folder: Path) -> None:
    """The process. With `hosts`, rank 0 has the store."""
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
    beating = Heartbeat(store, rank, size, timeout_seconds=TIMEOUT, stall_seconds=stall, stacks=folder / "stacks")
    store.wait([f"beat/{other}" for other in range(size)])
    store.set_timeout(limit)
    beating.start()
    roles[rank](rank, beating, folder)


class Group:
    """The processes of one test."""

    def __init__(self, folder: Path, *roles: Role, hosts: bool = False, stall: float = PATIENCE):
        folder.mkdir()
        self.begun = time.monotonic()
        self.folder, self.size = folder, len(roles)
        limit = datetime.timedelta(seconds=PATIENCE)
        self.store = None if hosts else dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
        port = self.store.port if self.store is not None else 0
        self.ranks = [
            FORKS.Process(target=be_rank, args=(rank, list(roles), port, hosts, stall, folder)) for rank in range(self.size)
        ]
        for process in self.ranks:
            process.start()

    def send(self, rank: int, number: int) -> None:
        """Sends a signal once all ranks wait and have written where."""
        wait_until(lambda: all((self.folder / f"waits_{other}").exists() for other in range(self.size)), "ranks")
        pid = self.ranks[rank].pid
        assert pid is not None
        os.kill(pid, number)

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
            assert line.endswith("; relaunch the same command to go on from the last checkpoint") == relaunch
            assert f"in {function}" in stacks and line in stacks


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, f"no {what} in {PATIENCE:g} s"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Group]]:
    """The groups of all tests at once, and their signals: they wait for seconds and compute nothing."""
    folder, three = tmp_path_factory.mktemp("groups"), [rank_that_waits] * 3
    started = {
        "well": Group(folder / "well", rank_that_works, rank_that_closes, rank_that_works, hosts=True, stall=2 * STALL),
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


def test_killed(groups: dict[str, Group]) -> None:
    group = groups["killed"]
    assert group.codes(0, 2) == [75, 75]
    group.check(0, 2, expected=rf"lost rank 1: no heartbeat for [4-9]\d* s, last seen at step {STEP}, {OPERATION}")


def test_stopped(groups: dict[str, Group]) -> None:
    """The others end; the stopped one ends when it is continued."""
    group = groups["stopped"]
    pid = group.ranks[1].pid
    assert pid is not None
    assert group.codes(0, 2) == [75, 75]
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
    assert group.codes(1, 2) == [75, 75]
    group.check(1, 2, expected="the rendezvous")
    os.kill(pid, signal.SIGCONT)
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
    assert group.codes(0, 1, 2) == [75, 75, 75]
    where = f"rank 1 at step {STEP}, exchange of blocks.2; ranks 0, 2 at step {STEP}, {OPERATION}; relaunch"
    group.check(0, 2, expected=rf"nothing has moved for [1-9]\d* s: {where}")
    group.check(1, expected="nothing has moved for ", function="rank_that_waits_elsewhere")


def test_all_is_well(groups: dict[str, Group]) -> None:
    """The control, for longer than every limit: ranks that move are left alone, also after one has closed."""
    group = groups["well"]
    time.sleep(max(0.0, group.begun + 2 * TIMEOUT - time.monotonic()))
    (group.folder / "enough").touch()
    assert group.codes(0, 1, 2) == [0, 0, 0]
    assert not any("handgrad:" in (group.folder / f"said_{rank}").read_text() for rank in range(3))
    assert not (group.folder / "stacks").exists()


# A single process, its store a dictionary, a clock that the test turns, and a list in the place of the process's end.


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Lets seconds pass."""
    now = [1000.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    yield wait
    monkeypatch.undo()


def alone(
    folder: Path | None = None,
    ends: list[int] | None = None,
    *,
    rank: int = 0,
    size: int = 1,
    stall: float = PATIENCE,
    timeout: float = TIMEOUT,
    store: dist.Store | None = None,
) -> Heartbeat:
    store, end = store or dist.HashStore(), ([] if ends is None else ends).append
    return Heartbeat(store, rank, size, timeout_seconds=timeout, stall_seconds=stall, stacks=folder, end=end)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_silence_is_told_to_all(lost: int, clock: Callable[[float], None]) -> None:
    store = dist.HashStore()
    ranks = [alone(rank=rank, size=3, store=store) for rank in range(3)]
    for _ in range(3):
        clock(0.9 * TIMEOUT)
        for beating in ranks:
            beating.write(beating.beat())
        assert [beating.read() for beating in ranks] == [None] * 3, "all is well"
    others = [beating for beating in ranks if beating.rank != lost]
    clock(0.9 * TIMEOUT)
    for beating in others:
        beating.write(beating.beat())
    assert [beating.read() for beating in others] == [None] * 2
    clock(0.2 * TIMEOUT)
    for beating in others:
        beating.write(beating.beat())
    faults = [beating.read() for beating in others]
    assert faults[0] is not None and faults[0].text.startswith(f"lost rank {lost}: no heartbeat for 4 s"), faults
    assert faults[1] == faults[0] and faults[0].exit_code == 75


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_is_told_to_all(failing: int) -> None:
    store = dist.HashStore()
    ranks = [alone(rank=rank, size=4, store=store) for rank in range(4)]
    ranks[3].leave("")  # an orderly end: nobody misses it
    ranks[failing].leave("MemoryError", 1)
    finder, reader = ranks[1 - failing], ranks[2]
    expected = Fault(f"rank {failing} ended by an error: MemoryError", 1)
    assert finder.read() == expected and reader.read() == expected


def test_work_may_take_longer_than_waiting(clock: Callable[[float], None]) -> None:
    for waiting, seconds, stalled in ((True, 0.9, False), (True, 1.1, True), (False, 5.9, False), (False, 6.1, True)):
        beating = alone(stall=STALL)
        beating.set_status(STEP, OPERATION, waiting=waiting)
        clock(seconds)
        assert (beating.stalled_ranks() is not None) == stalled, (waiting, seconds)


def test_one_that_waits_for_one_that_works_is_patient(clock: Callable[[float], None]) -> None:
    for waiting in (True, False):
        store = dist.HashStore()
        first, second = (alone(rank=rank, size=2, store=store, stall=STALL) for rank in (0, 1))
        first.set_status(STEP, OPERATION)
        second.set_status(STEP, "saving", waiting=waiting)
        clock(3 * STALL)
        second.write(second.beat())
        assert (first.read() is not None) == waiting


class BrokenPipe(io.StringIO):
    """stderr, when the launcher that read it is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def fileno(self) -> int:
        raise OSError("no file")


def test_it_ends_though_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []
    monkeypatch.setattr(sys, "stderr", BrokenPipe())
    alone(tmp_path / "stacks", ends).stop(Fault("lost rank 1"))
    assert ends == [75]
    assert "lost rank 1" in (tmp_path / "stacks" / "rank_0000.txt").read_text()


def test_it_ends_though_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []
    monkeypatch.setattr(sys, "stderr", BrokenPipe())
    with pytest.raises(OSError, match="no file"):  # `os._exit` comes before anyone sees it
        alone(tmp_path / "missing" / "stacks", ends).stop(Fault("rank 1 ended by an error", 65))
    assert ends == [65]


def test_it_ends_though_the_device_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ends: list[int] = []
    beating = alone(tmp_path / "stacks", ends)

    def pending() -> str:
        raise RuntimeError("CUDA error")

    beating.pending = pending
    beating.stop(Fault("lost rank 1"))
    assert ends == [75] and "lost rank 1" in capfd.readouterr().err
