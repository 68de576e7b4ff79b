"""Ranks that are killed, stopped, stuck or end by an error, as processes of their own: the others say so and end."""

import datetime
import io
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from handgrad.parallel import heartbeat
from handgrad.parallel.heartbeat import Beat, Heartbeat

SILENCE = 1.5  # seconds
STALL = 1.0
GRACE = 0.3
SLACK = 2.0  # besides the silence: the interval of beats, the grace, a busy machine
STEP, OPERATION = 12, "exchange of blocks.3"

# Forks of one process that has imported torch: each rank starts in milliseconds.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["handgrad.parallel.heartbeat", "tests.distributed.test_heartbeat"])


# What a rank does. The name of the function must be found in its stacks.


def rank_that_works(rank: int, heart: Heartbeat, folder: Path) -> None:
    """Goes from step to step, until the test says that it is enough."""
    step = 0
    while not (folder / "enough").exists():
        heart.set_status(step, OPERATION, waiting=bool(step % 2))
        step += 1
        time.sleep(0.02)
    heart.close()


def rank_that_closes(rank: int, heart: Heartbeat, folder: Path) -> None:
    heart.close()


def rank_that_waits(rank: int, heart: Heartbeat, folder: Path) -> None:
    """Is in a collective that never ends."""
    heart.set_status(STEP, OPERATION)
    (folder / f"waits_{rank}").touch()
    time.sleep(60)


def rank_that_waits_elsewhere(rank: int, heart: Heartbeat, folder: Path) -> None:
    heart.set_status(STEP, "exchange of blocks.2")
    time.sleep(60)


def rank_that_fails(rank: int, heart: Heartbeat, folder: Path) -> None:
    heart.set_status(STEP, OPERATION)
    time.sleep(0.2)
    heart.leave("shards/train_000003.bin: expected 100 bytes, found 99")
    heart.close()
    sys.exit(65)


Role = Callable[[int, Heartbeat, Path], None]


def be_rank(rank: int, roles: list[Role], port: int, hosts: bool, stall: float, folder: Path) -> None:
    """The process. With `hosts`, rank 0 keeps the store."""
    os.dup2(os.open(folder / f"told_{rank}", os.O_CREAT | os.O_WRONLY), 2)
    heartbeat.GRACE_SECONDS = GRACE
    limit = datetime.timedelta(seconds=SILENCE)
    keeper = dist.TCPStore("127.0.0.1", port, None, True, limit, wait_for_workers=False) if hosts and rank == 0 else None
    if keeper is not None:
        (folder / "port.part").write_text(str(keeper.port))
        (folder / "port.part").rename(folder / "port")
    elif hosts:
        wait_until(lambda: (folder / "port").exists(), 10, "the store of rank 0")
    port = int((folder / "port").read_text()) if hosts else port
    store = dist.TCPStore("127.0.0.1", port, None, False, datetime.timedelta(seconds=10), wait_for_workers=False)
    size = len(roles)
    heart = Heartbeat(store, rank, size, silence_seconds=SILENCE, stall_seconds=stall, stacks=folder / "stacks")
    store.wait([f"beat/{other}" for other in range(size)])
    store.set_timeout(limit)
    heart.start()
    roles[rank](rank, heart, folder)


class Group:
    """The processes of one test."""

    def __init__(self, folder: Path, roles: list[Role], *, hosts: bool = False, stall: float = 60.0):
        folder.mkdir(exist_ok=True)
        self.folder, self.size = folder, len(roles)
        limit = datetime.timedelta(seconds=10)
        self.store = None if hosts else dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
        port = self.store.port if self.store is not None else 0
        self.ranks = [
            FORKS.Process(target=be_rank, args=(rank, roles, port, hosts, stall, folder)) for rank in range(self.size)
        ]
        for process in self.ranks:
            process.start()

    def send(self, rank: int, number: int) -> float:
        """Sends a signal once all ranks wait and have told where; returns the time."""
        wait_until(lambda: all((self.folder / f"waits_{other}").exists() for other in range(self.size)), 15, "ranks")
        time.sleep(SILENCE / 4 + 0.1)  # a beat
        pid = self.ranks[rank].pid
        assert pid is not None
        os.kill(pid, number)
        return time.monotonic()

    def codes(self, ranks: list[int], within: float) -> list[int | None]:
        """Exit codes of `ranks`, None for one that does not end `within` so many seconds."""
        deadline = time.monotonic() + within
        for rank in ranks:
            self.ranks[rank].join(max(0.0, deadline - time.monotonic()))
        return [self.ranks[rank].exitcode for rank in ranks]

    def told(self, rank: int) -> str:
        """The single line that the rank said; warnings of torch's network layer set aside."""
        lines = [x for x in (self.folder / f"told_{rank}").read_text().splitlines() if x.startswith("handgrad:")]
        assert len(lines) == 1, (self.folder / f"told_{rank}").read_text()
        return lines[0]

    def stacks(self, rank: int) -> str:
        return (self.folder / "stacks" / f"rank_{rank:04d}.txt").read_text()

    def check(self, ranks: list[int], expected: str, function: str = "rank_that_waits") -> None:
        """All of `ranks` said the `expected`, where they stood and what to do, and left stacks that name the function."""
        for rank in ranks:
            assert re.search(expected, self.told(rank)), self.told(rank)
            assert self.told(rank).startswith(f"handgrad: rank {rank}, at step {STEP}, ")
            assert self.told(rank).endswith("; relaunch the same command to go on from the last checkpoint")
            assert f"in {function}" in self.stacks(rank) and self.told(rank) in self.stacks(rank)


def wait_until(holds: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"no {what} in {seconds:g} s"
        time.sleep(0.02)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Callable[..., Group]]:
    """Starts groups of ranks, and ends what is left of them."""
    groups: list[Group] = []

    def start(*roles: Role, **options: bool | float) -> Group:
        groups.append(Group(tmp_path / str(len(groups)), list(roles), **options))  # pyrefly: ignore
        return groups[-1]

    yield start
    for process in [process for started in groups for process in started.ranks]:
        process.kill()
        process.join()


def test_all_is_well(group: Callable[..., Group]) -> None:
    """The control: ranks that move are left alone, also after one of them has closed in an orderly way."""
    groups = [
        group(rank_that_works, rank_that_closes, rank_that_works, stall=STALL),
        group(rank_that_closes, rank_that_works, rank_that_works, stall=STALL),
        group(rank_that_works, rank_that_works, hosts=True, stall=STALL),
    ]
    time.sleep(3 * SILENCE)
    for ranks in groups:
        (ranks.folder / "enough").touch()
        everyone = list(range(ranks.size))
        assert ranks.codes(everyone, 5) == [0] * ranks.size
        assert not any("handgrad:" in (ranks.folder / f"told_{rank}").read_text() for rank in everyone)
        assert not (ranks.folder / "stacks").exists()


def test_killed(group: Callable[..., Group]) -> None:
    """Rank 1 of a group, and rank 0 of another: whom the others read."""
    groups = {lost: group(rank_that_waits, rank_that_waits, rank_that_waits) for lost in (0, 1)}
    begun = [ranks.send(lost, signal.SIGKILL) for lost, ranks in groups.items()]
    for lost, ranks in groups.items():
        others = [rank for rank in range(3) if rank != lost]
        assert ranks.codes(others, SILENCE + SLACK) == [75, 75]
        assert time.monotonic() - begun[0] > SILENCE / 2, "not before the silence was long"
        where = f"last seen at step {STEP}, {OPERATION}"
        ranks.check(others, rf"lost rank {lost}: no sign of life for \d s, {where}")


def test_stopped(group: Callable[..., Group]) -> None:
    """The others end; the stopped one ends when it is continued."""
    ranks = group(rank_that_waits, rank_that_waits, rank_that_waits)
    ranks.send(1, signal.SIGSTOP)
    assert ranks.codes([0, 2], SILENCE + SLACK) == [75, 75]
    expected = rf"lost rank 1: no sign of life for \d s, last seen at step {STEP}, {OPERATION}"
    ranks.check([0, 2], expected)
    assert ranks.codes([1], 0) == [None] and not (ranks.folder / "stacks" / "rank_0001.txt").exists()
    ranks.send(1, signal.SIGCONT)
    assert ranks.codes([1], SLACK) == [75]
    ranks.check([1], expected)


def test_the_store_is_stopped(group: Callable[..., Group]) -> None:
    """Calls to a store whose host is stopped do not return, whatever their time limit."""
    ranks = group(rank_that_waits, rank_that_waits, rank_that_waits, hosts=True)
    ranks.send(0, signal.SIGSTOP)
    assert ranks.codes([1, 2], SILENCE + SLACK) == [75, 75]
    ranks.check([1, 2], "the rendezvous")
    ranks.send(0, signal.SIGCONT)
    assert ranks.codes([0], SILENCE + SLACK) == [75]
    assert "lost rank " in ranks.told(0)


def test_the_store_is_killed(group: Callable[..., Group]) -> None:
    ranks = group(rank_that_waits, rank_that_waits, rank_that_waits, hosts=True)
    ranks.send(0, signal.SIGKILL)
    assert ranks.codes([1, 2], SILENCE + SLACK) == [75, 75]
    ranks.check([1, 2], "the rendezvous")


@pytest.mark.parametrize("failing", [0, 1])
def test_last_words(group: Callable[..., Group], failing: int) -> None:
    roles: list[Role] = [rank_that_waits] * 3
    roles[failing] = rank_that_fails
    ranks = group(*roles)
    others = [rank for rank in range(3) if rank != failing]
    assert ranks.codes([failing], 10) == [65]
    assert ranks.codes(others, SILENCE + SLACK) == [75, 75]
    words = "shards/train_000003.bin: expected 100 bytes, found 99"
    ranks.check(others, f"rank {failing} ended by an error: {words}")


def test_nothing_moves(group: Callable[..., Group]) -> None:
    ranks = group(rank_that_waits, rank_that_waits_elsewhere, rank_that_waits, stall=STALL)
    assert ranks.codes([0, 1, 2], 10) == [75, 75, 75]
    ranks.check([0, 2], "nothing has moved for ")
    ranks.check([1], "nothing has moved for ", "rank_that_waits_elsewhere")
    told = re.search(r"nothing has moved for (\d+) s: (.*); relaunch", ranks.told(2))
    assert told and 1 <= int(told[1]) <= 3
    assert told[2] == f"rank 1 at step {STEP}, exchange of blocks.2; ranks 0, 2 at step {STEP}, {OPERATION}"


# A single process, its store a dictionary, and a list in the place of its end.


def alone(folder: Path | None, ends: list[int], *, size: int = 1, stall: float = 60.0, store: dist.Store | None = None):
    store = store or dist.HashStore()
    return Heartbeat(store, 0, size, silence_seconds=0.4, stall_seconds=stall, stacks=folder, end=ends.append)


def test_work_may_take_longer_than_waiting() -> None:
    heart = alone(None, [], stall=STALL)
    now = time.monotonic()
    for waiting, seconds, stalled in ((True, 0.9, False), (True, 1.1, True), (False, 5.9, False), (False, 6.1, True)):
        heart.status = STEP, OPERATION, waiting, now - seconds
        assert bool(heart.stalled_ranks()) == stalled, (waiting, seconds)


def test_one_that_waits_for_one_that_works_is_patient() -> None:
    heart = alone(None, [], size=2, stall=STALL)
    heart.status = STEP, OPERATION, True, time.monotonic() - 3
    for waiting, stalled in ((True, True), (False, False)):
        heart.seen[1] = heartbeat.Seen(Beat(1, STEP, "saving", waiting, 3.0), time.monotonic())
        assert bool(heart.stalled_ranks()) == stalled


class BrokenPipe(io.StringIO):
    """stderr, when the launcher that read it is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def fileno(self) -> int:
        raise OSError("no file")


def test_it_ends_though_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []
    monkeypatch.setattr(sys, "stderr", BrokenPipe())
    alone(tmp_path / "stacks", ends).stop("lost rank 1")
    assert ends == [75]
    assert "lost rank 1" in (tmp_path / "stacks" / "rank_0000.txt").read_text()


def test_it_ends_though_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []
    monkeypatch.setattr(sys, "stderr", BrokenPipe())
    with pytest.raises(OSError, match="no file"):  # `os._exit` comes before anyone sees it
        alone(tmp_path / "missing" / "stacks", ends).stop("lost rank 1")
    assert ends == [75]


def test_it_ends_though_the_device_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ends: list[int] = []
    heart = alone(tmp_path / "stacks", ends)

    def pending() -> str:
        raise RuntimeError("CUDA error")

    heart.pending = pending
    heart.stop("lost rank 1")
    assert ends == [75] and "lost rank 1" in capfd.readouterr().err


class SlowStore(dist.HashStore):
    """Holds the watch's thread up, with `answers` cleared as a store does whose host is stopped: one call at a time, so
    nobody else's call returns either. `late`: before the call has begun."""

    def __init__(self, *, late: bool = False) -> None:
        super().__init__()
        self.answers, self.held, self.call, self.late = threading.Event(), threading.Event(), threading.Lock(), late
        self.answers.set()

    def set(self, key: str, value: str) -> None:  # pyrefly: ignore
        if self.late:
            self.wait_for_answer()
        with self.call:
            if not self.late:
                self.wait_for_answer()
            super().set(key, value)

    def wait_for_answer(self) -> None:
        if threading.current_thread().name == "heartbeat" and not self.answers.is_set():
            self.held.set()
            self.answers.wait(10)


def test_the_last_beat_is_the_last() -> None:
    """A beat that was on its way when the rank closed must not come after its farewell: it would be missed."""
    store = SlowStore(late=True)
    heart = alone(None, [], store=store)
    heart.start()
    store.answers.clear()
    assert store.held.wait(5)
    closing = threading.Thread(target=heart.close)
    closing.start()
    time.sleep(0.1)
    store.answers.set()
    closing.join(5)
    heart.thread.join(5)
    assert Beat(*json.loads(store.get("beat/0"))).left == ""


def test_closing_does_not_wait_for_a_store_that_is_gone() -> None:
    store = SlowStore()
    heart = alone(None, [], store=store)
    heart.start()
    store.answers.clear()
    assert store.held.wait(5)
    begun = time.monotonic()
    heart.leave("an error")
    heart.close()
    assert time.monotonic() - begun < 2
    store.answers.set()


def test_a_rank_that_ends_by_itself_in_the_grace_is_left_to_it() -> None:
    ends: list[int] = []
    heart = alone(None, ends)
    heart.store.set("trouble", "lost rank 1")
    heart.start()
    time.sleep(0.4)
    heart.leave("my own error")
    heart.close()
    time.sleep(0.2)
    assert not ends
