"""Runs of which a rank is lost, stopped, slow, wrong or missing from the start.

Each test sees its fault fire; `unharmed` is the same run without any, which all that goes on afterwards must equal.
"""

import ctypes
import itertools
import os
import re
import socket
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.errors import LostRank, UsageError
from handgrad.joins.parallel import rendezvous
from handgrad.joins.parallel.launchers import RankInfo
from handgrad.run.checkpointing import sources_sha256
from tests.conftest import write_text
from tests.distributed import runs
from tests.distributed.runs import Launcher, Started, same_run, saved_steps
from tests.faults.firing import FIRED
from tests.test_runs import records


def arguments(data: Path | str, out: Path, **settings: object) -> list[str]:
    """Of a run that waits for its saves: a fault hits a step after one, of which the checkpoint stands by then."""
    return runs.arguments(data, out, async_save="false", **settings)


@pytest.fixture(scope="module")
def unharmed(launcher: Launcher, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The control of all faults."""
    run = tmp_path_factory.mktemp("unharmed") / "run"
    started = launcher.run(2, arguments(shards, run))
    assert not any(started.fired) and not any(rank.told for rank in started.ranks)
    assert not (run / "stacks").exists() and saved_steps(run) == [4, 8]
    return run


def on_either_rank(launcher: Launcher, data: Path, folder: Path, fault: str, **settings: int) -> dict[int, Started]:
    """Two runs at once, FOLDER/0 and FOLDER/1, with the same fault on the one or the other of their two ranks."""
    commands = {rank: arguments(data, folder / str(rank), **settings) for rank in (0, 1)}
    return {rank: launcher.start(2, command, fault.format(rank)) for rank, command in commands.items()}


def hit(started: Started) -> list[int]:
    """The ranks whose fault fired."""
    return [rank for rank, fired in enumerate(started.fired) if fired]


def ended_alike(started: Started, codes: list[int | None], *, without: tuple[int, ...] = ()) -> None:
    """All ranks end with these codes; those that print an error print one line."""
    assert started.wait(without=without) == codes, started.errors
    assert all(len(rank.told) <= 1 for rank in started.ranks), started.errors
    assert not any("Traceback" in rank.errors for rank in started.ranks), started.errors


@pytest.mark.fault(3)
def test_killed_in_a_save(launcher: Launcher, shards: Path, tmp_path: Path, unharmed: Path) -> None:
    """Row 3. One of two ranks dies while the second checkpoint is gathered: it never exists, both go on from the first."""
    for rank, started in on_either_rank(launcher, shards, tmp_path, "kill-save:{}:7").items():
        run = tmp_path / str(rank)
        ended_alike(started, [75, -9] if rank else [-9, 75])
        assert hit(started) == [rank] and "checkpoint, blocks.1" in started.ranks[1 - rank].told[0]
        assert saved_steps(run) == [4] and len(records(run, ("step",))) == 8
        launcher.run(2, arguments(shards, run))
        assert "resumed at step 4" in (run / "log.txt").read_text()
        same_run(unharmed, run, 8)


@pytest.mark.fault(4)
def test_a_full_disk_ends_all_ranks(launcher: Launcher, shards: Path, tmp_path: Path, unharmed: Path) -> None:
    """Row 4 with two ranks: the one that does not write has shards to hand over, and must not wait for ever."""
    run = tmp_path / "run"
    started = launcher.start(2, arguments(shards, run), "disk:0:1")
    ended_alike(started, [74, 74])
    assert hit(started) == [0] and "No space left" in started.ranks[0].told[0] and saved_steps(run) == [4]
    launcher.run(2, arguments(shards, run))
    same_run(unharmed, run, 8)


@pytest.mark.fault(29)
def test_killed_in_a_collective(launcher: Launcher, shards: Path, tmp_path: Path) -> None:
    """Row 29. The other one ends, says where it stood, and whom it lost."""
    for rank, started in on_either_rank(launcher, shards, tmp_path, "kill:{}:5").items():
        ended_alike(started, [75, -9] if rank else [-9, 75])
        (told,) = started.ranks[1 - rank].told
        assert hit(started) == [rank] and f"rank {1 - rank}, at step 5, gradients of blocks." in told
        assert ("lost rank 1" if rank else "rank 0's machine") in told
        assert saved_steps(tmp_path / str(rank)) == [4]


@pytest.mark.fault(30)
def test_stopped_in_a_collective(launcher: Launcher, shards: Path, tmp_path: Path) -> None:
    """Row 30. A process that is there but does nothing; rank 0's keeps the table from which the others would learn it."""
    for rank, started in on_either_rank(launcher, shards, tmp_path, "freeze:{}:5").items():
        started.see_fault()
        ended_alike(started, [75, None] if rank else [None, 75], without=(rank,))
        (told,) = started.ranks[1 - rank].told
        assert hit(started) == [rank] and f"rank {1 - rank}, at step 5, gradients of blocks." in told
        assert ("lost rank 1: no heartbeat for " if rank else "rank 0's machine or the launcher (no answer for") in told
        stacks = (tmp_path / str(rank) / "stacks" / f"rank_{1 - rank:04d}.txt").read_text()
        assert told in stacks and "ranks.py" in stacks and " in wait" in stacks


@pytest.mark.nightly(but=["break:0:3-AssertionError: a mistake of our own", "break-silent:1:3-KeyError"])
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("break:1:3", "AssertionError: a mistake of our own"),
        ("break:0:3", "AssertionError: a mistake of our own"),  # with rank 0 ends the store in which the others read of it
        ("break-silent:1:3", "KeyError"),
    ],
)
def test_an_error_of_one_rank_ends_the_others(
    fault: str, told: str, launcher: Launcher, shards: Path, tmp_path: Path
) -> None:
    """With its exit code, so that nobody relaunches what would fail again; also where the others wait for it."""
    started, rank = launcher.start(2, arguments(shards, tmp_path / "run"), fault), int(fault.split(":")[1])
    assert started.wait() == [1, 1], started.errors
    assert hit(started) == [rank] and started.ranks[1 - rank].told[0].endswith(f": rank {rank} ended by an error: {told}")
    assert "Traceback" in started.ranks[rank].errors and not started.ranks[rank].told


@pytest.mark.nightly(but=["1"])
@pytest.mark.fault(31)
@pytest.mark.parametrize("zero", [0, 1])
def test_a_skipped_collective_is_found(zero: int, launcher: Launcher, shards: Path, tmp_path: Path, unharmed: Path) -> None:
    """Row 31, in that very step, by every rank. Its neighbour has the same shape: nothing else would notice."""
    run = tmp_path / "run"
    started = launcher.start(2, arguments(shards, run, zero=zero), "skip:1:5")
    ended_alike(started, [76, 76])
    following = "gradients of blocks.1 to all" if zero == 0 else "gradients of blocks.0"
    sides = [
        "rank 0 at step 5, collective {}, gradients of blocks.1 (",
        f"rank 1 at step 5, collective {{}}, {following} (",
    ]
    for rank in started.ranks:
        (told,) = rank.told
        (number,) = set(re.findall(r"collective (\d+)", told))
        assert all(side.format(number) in told for side in sides), told
    assert hit(started) == [1] and len(records(run, ("step",))) == 5 and saved_steps(run) == [4]
    launcher.run(2, arguments(shards, run, zero=zero))
    same_run(unharmed, run, 8)


@pytest.mark.nightly(but=["3"])
@pytest.mark.fault(32)
@pytest.mark.parametrize("step", [0, 3])
def test_unequal_sizes_are_found(step: int, launcher: Launcher, shards: Path, tmp_path: Path) -> None:
    """Row 32, before gloo would meet two sizes and abort."""
    started = launcher.start(2, arguments(shards, tmp_path / "run", check_ranks_every=0), f"resize:1:{step}")
    ended_alike(started, [76, 76])
    for rank in started.ranks:
        (told,) = rank.told
        pattern = rf"rank (\d) at step {step}, collective \d+, gradients of blocks.1 \((\d+) bytes of float32 -> (\d+) b"
        (zero, whole, received), (one, half, _) = re.findall(pattern, told)
        assert (zero, one) == ("0", "1") and whole == received and int(whole) == 2 * int(half)
    assert hit(started) == [1] and saved_steps(tmp_path / "run") == []


def test_other_settings_of_a_rank_are_named(launcher: Launcher, shards: Path, tmp_path: Path) -> None:
    """Row 32. What would give the ranks other shapes."""
    run = tmp_path / "run"
    for name, value, usual in (("micro_batch", 4, 2), ("channels", 32, 64), ("zero", 0, 1)):
        started = launcher.start(2, arguments(shards, run), others=arguments(shards, run, **{name: value}))
        ended_alike(started, [64, 64])
        assert f"{name} is {usual} on rank 0 and {value} on rank 1" in started.ranks[0].told[0]
        assert f"{name} is {value} on rank 1 and {usual} on rank 0" in started.ranks[1].told[0]
        assert not run.exists()


def test_other_data_of_a_rank_is_named(launcher: Launcher, shards: Path, tmp_path: Path) -> None:
    """A folder of the same name that holds another text, as on another machine."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    (here / "text").symlink_to(shards)
    source = write_text(tmp_path / "text.txt", words=6100)
    prepare(PrepareOptions(str(source), there / "text", tokenizer="bytes", workers=1))
    started = launcher.start(2, arguments("text", tmp_path / "run"), cwds=(here, there))
    ended_alike(started, [64, 64])
    assert all("versions and data: data is" in rank.told[0] for rank in started.ranks)
    assert not saved_steps(tmp_path / "run")


@pytest.mark.fault(47)
def test_a_rank_of_other_code_is_named(launcher: Launcher, shards: Path, tmp_path: Path) -> None:
    """Row 47. Another commit, or an edited file, under the same version number."""
    started = launcher.start(2, arguments(shards, tmp_path / "run"), "other-code:1")
    ended_alike(started, [64, 64])
    assert hit(started) == [1]
    mine, theirs = (
        re.search(r"versions and data: sources is '(\w{64})' on rank \d and '(\w{64})'", rank.told[0])
        for rank in started.ranks
    )
    assert mine and theirs and mine.groups() == theirs.groups()[::-1] and mine[1] == sources_sha256() != mine[2]
    assert not saved_steps(tmp_path / "run")


@pytest.mark.nightly(but=["4-2-None-256", "2-1-None-512"])
@pytest.mark.fault(34)
@pytest.mark.parametrize(
    ("size", "zero", "every", "tokens"), [(2, 0, None, 512), (4, 0, 3, 512), (2, 1, None, 512), (4, 2, None, 256)]
)
def test_a_flipped_bit_of_a_weight_is_found(
    size: int, zero: int, every: int | None, tokens: int, launcher: Launcher, shards: Path, tmp_path: Path
) -> None:
    """Row 34. By default in the step that uses it, also with shared weights, which the update of that step overwrites.
    Among more than two ranks it is known who is wrong."""
    run = tmp_path / "run"
    settings = {"zero": zero, "check_ranks_every": every, "save_every": 3, "eval_every": 0, "tokens_per_step": tokens}
    started = launcher.start(size, arguments(shards, run, **settings), "flip:1:4")
    ended_alike(started, [76] * size)
    who = "rank 1 other than the rest" if size > 2 else "ranks 0, 1, no majority is right"
    (told,) = (line for rank in started.ranks for line in rank.told)
    assert hit(started) == [1] and f"in step 6 the ranks used different weights ({who})" in told
    assert saved_steps(run) == [3]


@pytest.mark.fault(34)
@pytest.mark.parametrize(("size", "zero"), [(2, 1), (4, 0)])
def test_a_flipped_bit_of_a_weight_is_not_saved(
    size: int, zero: int, launcher: Launcher, shards: Path, tmp_path: Path
) -> None:
    """It flips after the step that is saved, in one of the copies that the ranks hold: any of them may be the one that is
    written."""
    run = tmp_path / "run"
    settings = {"zero": zero, "check_ranks_every": 0, "save_every": 3, "eval_every": 0, "tokens_per_step": 512}
    started = launcher.start(size, arguments(shards, run, **settings), "flip:1:5")
    ended_alike(started, [76] * size)
    (told,) = (line for rank in started.ranks for line in rank.told)
    assert hit(started) == [1] and "step 6 is not saved: the ranks hold different weights or moments" in told
    assert saved_steps(run) == [3]


@pytest.mark.nightly(but=["4-2-256"])
@pytest.mark.fault(38)
@pytest.mark.parametrize(("size", "zero", "tokens"), [(2, 1, 512), (2, 0, 512), (4, 2, 256)])
def test_a_flipped_bit_of_a_gradient_leaves_no_trace(
    size: int, zero: int, tokens: int, launcher: Launcher, shards: Path, tmp_path: Path, unharmed: Path
) -> None:
    """Row 38. The step is made again, twice, and the event names the rank whose micro-batches gave other bits."""
    run, control = tmp_path / "run", unharmed
    if tokens != 512:
        control = tmp_path / "control"
        launcher.run(size, arguments(shards, control, zero=zero, tokens_per_step=tokens))
    started = launcher.run(size, arguments(shards, run, zero=zero, tokens_per_step=tokens), "flip-gradient:1:5")
    assert hit(started) == [1]
    (told,) = (record["text"] for record in records(run, ("event",)))
    pattern = (
        r"step 6: loss (\S+) and norm \S+, made again loss \1 and norm (\S+), and again loss \1 and norm \2: the first"
    )
    assert re.match(pattern + " was a fault of the hardware in the gradients of rank 1;", told), told
    same_run(control, run, 8)


def test_a_lasting_fault_is_skipped_by_all_ranks(launcher: Launcher, shards: Path, tmp_path: Path) -> None:
    """Row 36 on two ranks: the second attempt equals the first, so the hardware is not to blame."""
    run = tmp_path / "run"
    started = launcher.run(2, arguments(shards, run), "flip-gradient-always:1:5")
    (told,) = (record["text"] for record in records(run, ("event",)))
    assert told.startswith("step 6 made no update: gradient norm is inf; non-finite gradients at blocks.1.")
    assert hit(started) == [1] and started.ranks[1].errors.count(FIRED) == 2 and len(records(run, ("step",))) == 8


@pytest.mark.fault(38)
def test_three_results_end_all_ranks(launcher: Launcher, shards: Path, tmp_path: Path, unharmed: Path) -> None:
    """Row 38 on a machine that cannot be trusted: an exit code of its own, and the last checkpoint is good."""
    run = tmp_path / "run"
    started = launcher.start(2, arguments(shards, run), "flip-gradients:1:5")
    ended_alike(started, [79, 79])
    (told,) = (line for rank in started.ranks for line in rank.told)
    assert hit(started) == [1] and "step 6 was made three times and gave three results" in told and "of rank 1:" in told
    assert saved_steps(run) == [4]
    launcher.run(2, arguments(shards, run))
    same_run(unharmed, run, 8)


@pytest.mark.fault(34)
def test_without_checks_a_flipped_bit_is_found_when_it_would_be_saved(
    launcher: Launcher, shards: Path, tmp_path: Path
) -> None:
    started = launcher.start(2, arguments(shards, tmp_path / "run", zero=0, check_ranks_every=0), "flip:1:4")
    ended_alike(started, [76, 76])
    assert hit(started) == [1] and saved_steps(tmp_path / "run") == [4]


@pytest.mark.fault(35)
@pytest.mark.parametrize(("rank", "missing", "fault"), [(0, "1", "none"), (1, None, "none"), (1, None, "connecting:1")])
def test_a_rank_that_never_comes(
    rank: int, missing: str | None, fault: str, launcher: Launcher, shards: Path, tmp_path: Path
) -> None:
    """Row 35. The one that is there waits as long as it was told, and no longer, and ends at once even if a thread of it
    still connects; rank 0 knows who is missing."""
    started = launcher.start(2, arguments(shards, tmp_path / "run", lanes=None, join_seconds=2), fault, only=(rank,))
    begun = time.monotonic()
    assert started.wait() == [75] and started.fired == [fault != "none"], started.errors
    assert time.monotonic() - begun > 1.5
    (told,) = started.ranks[0].told
    assert "Traceback" not in started.ranks[0].errors
    assert ("found no rank 0" if missing is None else f"not there: {missing};") in told
    assert not (tmp_path / "run").exists()


@pytest.mark.fault(35)
@pytest.mark.parametrize("rank", [0, 2])
def test_ranks_that_are_there_name_the_one_that_is_not(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 35 with several that wait, by a clock of which each look takes a second: not before the time is over."""
    monkeypatch.setattr(rendezvous, "RETRY_SECONDS", 0)
    store, clock = dist.HashStore(), itertools.count(100)
    store.set(f"joined/{2 - rank}", "here")
    info = RankInfo(rank, 3, rank, 3, "torchrun", "127.0.0.1", 29500)
    with pytest.raises(LostRank, match=r"expected 3 ranks at 127.0.0.1:29500 within 7 s, not there: 1; start them"):
        rendezvous.wait_for_all(store, info, 7, clock=lambda: next(clock))
    assert next(clock) == 109, "at 100 the wait begins, at 107 it may still go on"


def join_start(store: dist.Store, info: RankInfo, started: dict[int, str]) -> None:
    started[info.rank] = rendezvous.wait_for_all(store, info, 60)


def test_ranks_of_an_earlier_start_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a store that outlives a start: nobody begins with a rank that is no longer there, and all know the start by one
    name. Each comes at another time."""
    monkeypatch.setattr(rendezvous, "RETRY_SECONDS", 0.001)
    store, names = dist.HashStore(), list[str]()
    places = [RankInfo(rank, 3, rank, 3, "torchrun", "127.0.0.1", 29500) for rank in range(3)]
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        started = dict[int, str]()
        ranks = [threading.Thread(target=join_start, args=(store, place, started)) for place in places]
        for rank in order:
            assert not started, "all words of the last start are still there"
            ranks[rank].start()
            time.sleep(0.02)
        for thread in ranks:
            thread.join(60)
        assert sorted(started) == [0, 1, 2] and len(set(started.values())) == 1
        names.append(started[0])
    assert len(set(names)) == 3


def in_empty_network(info: RankInfo) -> str:
    """The error of `check_loopback` in a process of its own, whose network has no interface that is up."""
    reading, writing = os.pipe()
    if not os.fork():
        new_network = 0x40000000  # CLONE_NEWNET
        text = "no namespaces"
        if ctypes.CDLL(None).unshare(new_network) == 0:
            try:
                text = str(rendezvous.check_loopback(info))
            except UsageError as error:
                text = str(error)
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    os.wait()
    return os.read(reading, 1000).decode()


def test_a_machine_without_loopback_is_told() -> None:
    """Row 35. Its ranks cannot reach each other, by whatever address: one line at once, no wait for `--join-seconds`."""
    told = in_empty_network(RankInfo(0, 2, 0, 2, "torchrun", "127.0.0.1", 29500))
    if told == "no namespaces":
        pytest.skip("no network namespaces")
    assert told == (
        "the 2 ranks of this machine cannot reach each other: its loopback interface is down or missing; bring it up with"
        " `ip link set lo up`"
    )
    assert in_empty_network(RankInfo(1, 2, 0, 1, "srun", "node-a", 29500)) == "None", "one rank a machine needs none"


@pytest.mark.fault(35)
def test_a_port_that_is_taken(launcher: Launcher, shards: Path, tmp_path: Path) -> None:
    """By a program that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        started = launcher.start(2, arguments(shards, tmp_path / "run", join_seconds=2), port=port)
        ended_alike(started, [64, 75])
    assert "in use by another program; set MASTER_PORT" in started.ranks[0].told[0]
    assert "found no rank 0" in started.ranks[1].told[0]


@pytest.mark.fault(33)
def test_a_slow_rank_is_named(launcher: Launcher, shards: Path, tmp_path: Path) -> None:
    """Row 33. By clocks that the test turns: its own work takes 250 ms more in each step, and waits count for nobody."""
    run = tmp_path / "run"
    few = {"lanes": 2, "tokens_per_step": 128, "eval_every": 0, "save_every": 0}
    started = launcher.start(2, arguments(shards, run, steps=32, log_every=8, **few), "slow:1")
    assert started.wait() == [0, 0], started.errors
    (told,) = (record["text"] for record in records(run, ("event",)) if "is slow" in record["text"])
    assert told.startswith("step 32: rank 1 is slow: 312 ms of its own work a step, the median rank 62 ms")
    figures = records(run, ("ranks",))
    assert [record["step"] for record in figures] == [8, 16, 24, 32] and hit(started) == [1]
    assert all((record["slowest"], record["slowest_ms"], record["median_ms"]) == (1, 312.5, 62.5) for record in figures)
