"""Faults that stay: a full disk, a device without memory. And a pause of all ranks together, which is no fault."""

from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from handgrad.joins.parallel import heartbeat
from handgrad.joins.parallel.heartbeat import WORK_FACTOR, Fault, Heartbeat, RunningClock
from tests.distributed.runs import Launcher, same_run
from tests.distributed.test_heartbeat import Clock
from tests.distributed.test_rank_faults import arguments, ended_alike, hit, unharmed

__all__ = ["unharmed"]  # a fixture

SILENCE, STALL = 30.0, 600.0


def test_a_rank_without_memory_ends_the_others(launcher: Launcher, shards: Path, tmp_path: Path) -> None:
    """In one line, with 71: the same start would fail there again."""
    started = launcher.start(2, arguments(shards, tmp_path / "run"), "memory:1:3")
    ended_alike(started, [71, 71])
    line = "out of memory: CUDA out of memory. Tried to allocate 2.00 GiB. Try half the --micro-batch; "
    assert hit(started) == [1] and all(line in rank.told[0] for rank in started.ranks), started.errors


@pytest.mark.fault(4)
def test_a_disk_that_stays_full(launcher: Launcher, shards: Path, tmp_path: Path, unharmed: Path) -> None:
    """Row 4 outside of a save, where rank 0 alone meets it: neither a step's line nor what waits behind it is taken."""
    run = tmp_path / "run"
    started = launcher.start(2, arguments(shards, run), "disk-for-good:0:5")
    ended_alike(started, [74, 74])
    line = f"writing {run / 'metrics.jsonl'} failed: No space left on device"
    assert hit(started) == [0] and started.ranks[0].told[0].startswith(f"handgrad: {line}"), started.errors
    assert f"rank 0 ended by an error: {line}" in started.ranks[1].told[0], started.errors
    launcher.run(2, arguments(shards, run))
    same_run(unharmed, run, 8)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The machine's, in the place of the one that ranks read."""
    clock = Clock()
    monkeypatch.setattr(heartbeat, "RunningClock", partial(RunningClock, clock=clock))
    return clock


def rank_of(store: dist.Store, rank: int) -> Heartbeat:
    return Heartbeat(store, rank, 2, timeout_seconds=SILENCE, stall_seconds=STALL, stacks=None)


def rounds(clock: Clock, seconds: float, *ranks: Heartbeat) -> list[Fault]:
    """A beat a second of each; the faults that they find."""
    found = []
    for _ in range(int(seconds)):
        clock.now += 1.0
        for beating in ranks:
            beating.write(beating.beat())
            found.append(beating.read())
    return [fault for fault in found if fault is not None]


@pytest.mark.parametrize("first", [0, 1])
def test_a_pause_of_all_ranks_is_nobodys_silence(first: int, clock: Clock) -> None:
    """SIGSTOP of all processes for an hour: the first that goes on finds the others' beats as they were."""
    store = dist.HashStore()
    ranks = [rank_of(store, rank) for rank in range(2)]
    assert not rounds(clock, 5, *ranks)
    clock.now += 3600.0
    assert not rounds(clock, 5, ranks[first]) and not rounds(clock, 5, *ranks)
    (fault, *_) = rounds(clock, 2 * SILENCE, ranks[first])
    assert fault.text.startswith(f"lost rank {1 - first}: no heartbeat for 31 s"), "a rank that stays silent is lost"


@pytest.mark.parametrize("waiting", [True, False])
def test_a_pause_is_no_work_and_no_wait(waiting: bool, clock: Clock) -> None:
    store = dist.HashStore()
    ranks = [rank_of(store, rank) for rank in range(2)]
    for beating in ranks:
        beating.set_status(7, "its micro-batches", waiting=waiting)
    clock.now += 2 * WORK_FACTOR * STALL
    assert not rounds(clock, 5, *ranks)
    (fault, *_) = rounds(clock, 2 * WORK_FACTOR * STALL, *ranks)
    assert fault.text.startswith("nothing has moved for ")
