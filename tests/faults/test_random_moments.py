"""Runs that are killed or stopped at random moments, many times in a row, and end as if nothing had been.

A group of seeds is a group of moments; `make soak` gives other ones, and the same group again is the same run again.
"""

import dataclasses
import functools
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from handgrad.storage import checkpoint
from tests.distributed.runs import Launcher, Started, arguments, same_run, saved_steps
from tests.faults import moments

SMALL = {"lanes": 2, "tokens_per_step": 128, "eval_every": 0, "eval_tokens": 128, "save_every": 1, "check_ranks_every": 0}
KILLED, STOPPED, STOPPED_TWICE, RELAUNCH = -signal.SIGKILL, 75, -signal.SIGTERM, 75


Undisturbed = Callable[[int], Path]


def command(data: Path, run: Path, steps: int, **settings: object) -> list[str]:
    return arguments(data, run, **{**SMALL, "steps": steps, "keep_checkpoints": 2, **settings})


@pytest.fixture(scope="module")
def undisturbed(launcher: Launcher, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Steps -> a run of so many that nothing happens to, made when it is first asked for."""

    @functools.cache
    def made(steps: int) -> Path:
        run = tmp_path_factory.mktemp("undisturbed") / "run"
        launcher.run(1, command(shards, run, steps))
        return run

    return made


@pytest.fixture(scope="module")
def size_bytes(undisturbed: Undisturbed) -> int:
    """Of a checkpoint."""
    return sum(path.stat().st_size for path in checkpoint.folder_of(undisturbed(6) / "checkpoints", 6).iterdir())


@pytest.fixture
def start(launcher: Launcher, shards: Path, undisturbed: Undisturbed, tmp_path: Path) -> Callable[..., "Disturbed"]:
    def begin(steps: int, size: int = 1, **settings: object) -> Disturbed:
        run = tmp_path / "run"
        return Disturbed(launcher, command(shards, run, steps, **settings), run, size, undisturbed(steps))

    return begin


def all_whole(run: Path) -> None:
    """Every folder that has a checkpoint's name can be loaded, and there is one."""
    folders = checkpoint.folders(run / "checkpoints")
    assert folders and all(checkpoint.open_checkpoint(folder) for folder in folders)


@dataclasses.dataclass
class Disturbed:
    """A run that is started again and again, each time with a fault."""

    launcher: Launcher
    command: list[str]
    run: Path
    size: int
    undisturbed: Path

    def __post_init__(self) -> None:
        first = self.launcher.start(self.size, self.command, "signal:0:0")
        assert first.wait() == [STOPPED] * self.size and saved_steps(self.run) == [1], first.errors

    def hit(self, fault: str, *codes: list[int]) -> Started:
        """Starts it with a fault that fires; its processes end with one of these codes, and its checkpoints are whole."""
        started = self.launcher.start(self.size, self.command, fault)
        found = started.wait()
        assert sum(started.fired) == 1, f"{fault} did not fire: {found}\n{started.errors}"
        assert sorted(found) in codes, f"{fault}: {found}\n{started.errors}"
        assert not any("Traceback" in rank.errors for rank in started.ranks), started.errors
        all_whole(self.run)
        return started

    def ends_as_if_nothing_had_been(self) -> None:
        steps = max(saved_steps(self.undisturbed))
        assert max(saved_steps(self.run)) < steps, "so many faults need more steps"
        self.launcher.run(self.size, self.command)
        same_run(self.undisturbed, self.run, steps)


@pytest.mark.fault(1)
@pytest.mark.soak(8, 20)
def test_killed_in_saves(seeds: Sequence[int], start: Callable, size_bytes: int) -> None:
    run = start(steps=20)
    for seed in seeds:
        run.hit(moments.in_save(seed, "kill", size_bytes), [KILLED])
    run.ends_as_if_nothing_had_been()


@pytest.mark.fault(2)
def test_killed_before_the_manifest(start: Callable) -> None:
    """The folder has all tensors, and does not count: the run names it."""
    run = start(steps=6)
    run.hit("kill-manifest:0:0", [KILLED])
    left = run.run / "checkpoints" / "step_00000002.partial"
    assert {"model.safetensors", "optimizer.safetensors"} <= {path.name for path in left.iterdir()}
    assert saved_steps(run.run) == [1]
    run.ends_as_if_nothing_had_been()
    assert f"{left.name} (an interrupted save)" in (run.run / "log.txt").read_text()


@pytest.mark.fault(3)
@pytest.mark.soak(1, 10)
def test_a_rank_killed_in_saves(seeds: Sequence[int], start: Callable, size_bytes: int) -> None:
    run = start(steps=6 if len(seeds) == 1 else 20, size=2)
    for seed in seeds:
        run.hit(moments.in_gathering(seed, size_bytes), [KILLED, RELAUNCH])
    run.ends_as_if_nothing_had_been()


@pytest.mark.fault(13)
def test_killed_in_removals(start: Callable) -> None:
    """At each operation of one: the rename to another name, three files, the folder."""
    run = start(steps=20, keep_checkpoints=1)
    for number in range(5):
        run.hit(f"kill-removal:0:{number}", [KILLED])
    run.ends_as_if_nothing_had_been()


@pytest.mark.fault(15)
@pytest.mark.soak(2, 10)
def test_stopped_in_steps(seeds: Sequence[int], start: Callable) -> None:
    run = start(steps=20 if len(seeds) == 2 else 80, save_every=0)
    for seed in seeds:
        started = run.hit(moments.in_steps(seed), [STOPPED])
        (told,) = started.ranks[0].told
        last = max(saved_steps(run.run))
        assert f"stopped by SIGTERM after step {last}, saved step {last};" in told
    run.ends_as_if_nothing_had_been()


@pytest.mark.fault(16)
@pytest.mark.soak(3, 20)
def test_stopped_twice(seeds: Sequence[int], start: Callable, size_bytes: int) -> None:
    """The second signal does not wait: it ends the process in its save. Where the save is done it changes nothing."""
    run = start(steps=20)
    for seed in seeds:
        run.hit(moments.in_save(seed, "signal", size_bytes), [STOPPED_TWICE], [STOPPED])
    run.ends_as_if_nothing_had_been()


@pytest.mark.fault(29)
@pytest.mark.soak(0, 10)
def test_a_rank_killed_in_exchanges(seeds: Sequence[int], start: Callable) -> None:
    run = start(steps=80, size=2)
    for seed in seeds:
        run.hit(moments.in_exchange(seed), [KILLED, RELAUNCH])
    run.ends_as_if_nothing_had_been()
