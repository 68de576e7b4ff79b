"""Saves behind training: the same bytes as those of saves that training waits for, and the same promises."""

import dataclasses
import errno
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import handgrad
from handgrad.cli import main
from handgrad.errors import REPEAT_SECONDS, MemoryShort, Preempted, StorageError
from handgrad.joins import offload
from handgrad.run import checkpointing, saves
from handgrad.run.log import RunLog
from handgrad.run.open import train
from handgrad.run.saves import Saves
from handgrad.settings.config import RunConfig, to_toml
from handgrad.storage import checkpoint
from handgrad.storage.manifest import OPTIMIZER_FILE, WEIGHTS_FILE, parts_of
from handgrad.storage.run_files import is_held
from handgrad.storage.tensor_files import Stored
from handgrad.training.step import TrainStep
from tests.distributed.launching import wait_for
from tests.distributed.runs import Launcher, same_run, saved_steps
from tests.test_runs import elsewhere, records, same_bits

PATIENCE = 60.0  # seconds, reached by no machine that works


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A disk that takes nothing before the event is set; the first wait for it sets it."""
    free, original = threading.Event(), checkpoint.write_tensors

    def write_tensors(*given: Any) -> dict[str, Any]:
        assert free.wait(PATIENCE)
        return original(*given)

    monkeypatch.setattr(checkpoint, "write_tensors", write_tensors)
    return free


def before(patch: pytest.MonkeyPatch, owner: type, name: str, act: Callable[..., Any]) -> None:
    """`act` before each call of a method, with its arguments."""
    original = getattr(owner, name)

    def patched(*given: Any, **named: Any) -> Any:
        act(*given)
        return original(*given, **named)

    patch.setattr(owner, name, patched)


def begins(patch: pytest.MonkeyPatch, step: int, act: Callable[[], Any]) -> None:
    """`act` when a step, counted from 0, begins."""
    before(patch, TrainStep, "begin", lambda training, now: act() if now == step else None)


def contents(run: RunConfig, step: int) -> dict[str, bytes]:
    folder = checkpoint.folder_of(Path(run.out) / "checkpoints", step)
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"precision": "bf16", "master_weights": False}])
def test_the_bytes_are_those_of_a_save_that_training_waits_for(
    settings: dict, config: RunConfig, disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though two steps change every buffer before a byte is written."""
    config = dataclasses.replace(config, steps=8, sample_tokens=0, keep_checkpoints=0, **settings)
    begins(monkeypatch, 6, disk.set)
    train(config)
    behind = elsewhere(config, "still", async_save=False)
    train(behind)
    same_bits(config.out, behind.out, 8)
    for step in (4, 8):
        assert contents(config, step) == contents(behind, step) and len(contents(config, step)) == 2


def test_a_save_that_comes_due_waits_for_the_one_before(
    config: RunConfig, disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is told once with both times, and counts as time that training stood still."""
    monkeypatch.setattr(saves, "SHORT_SECONDS", 0.0)
    waited: list[int] = []

    def come_due(run_saves: Saves, step: int) -> None:
        if run_saves.pending is not None:
            waited.append(step)
            threading.Timer(0.05, disk.set).start()

    before(monkeypatch, Saves, "await_earlier", come_due)
    config = dataclasses.replace(config, save_every=2, sample_tokens=0, eval_every=0, keep_checkpoints=0)
    train(config)
    assert waited[0] == 4 and saved_steps(Path(config.out)) == [2, 4, 6, 8, 10, 12]
    (told,) = (record for record in records(config.out, ("event",)) if "its save waited" in record["text"])
    assert re.match(r"step 4: its save waited [\d.]+ s for step 2's, which took [\d.]+ s; a larger", told["text"])
    found = {record["step"]: record for record in records(config.out, ("save",))}
    assert sorted(found) == [2, 4, 6, 8, 10, 12] and min(found[4]["pause_seconds"], found[2]["seconds"]) > 0.04


@pytest.mark.parametrize("step", [5, 6])
def test_a_stop_waits_for_both_saves(
    step: int, finished: RunConfig, disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of step 4 is under way when the signal comes."""
    run = elsewhere(finished, "stopped", keep_checkpoints=0)
    before(monkeypatch, Saves, "wait", lambda run_saves: disk.set())
    begins(monkeypatch, step, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Preempted, match=f"after step {step + 1}, saved step {step + 1}"):
        train(run)
    monkeypatch.undo()
    assert saved_steps(Path(run.out)) == [4, step + 1]
    train(run)
    same_bits(finished.out, run.out, 12)


@pytest.mark.nightly(but=["2-130"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_second_signal_waits_for_no_disk(
    number: int, code: int, config: RunConfig, launcher: Launcher, tmp_path: Path
) -> None:
    """That never takes the checkpoint for which the first one waits."""
    (tmp_path / "recipe.toml").write_text(to_toml(config))
    started = launcher.start(1, ["train", "--config", str(tmp_path / "recipe.toml")], "slow-disk:0:99")
    wait_for(Path(config.out) / "metrics.jsonl", containing='"kind": "step", "step": 5')
    pid = started.ranks[0].number("pid")
    assert pid is not None
    os.kill(pid, number)
    time.sleep(REPEAT_SECONDS + 0.1)
    assert started.ranks[0].code is None
    os.kill(pid, number)
    assert started.wait() == [code] and not saved_steps(Path(config.out))
    assert [path.name for path in (Path(config.out) / "checkpoints").iterdir()] == ["step_00000004.partial"]


def fails(path: Path, chunks: Any) -> dict[str, Any]:
    path.write_bytes(b"half")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_write_that_fails_ends_the_run_at_the_next_step(
    finished: RunConfig, disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the line and the exit code of a save that training waits for; what was written of it is gone."""
    run, saving = elsewhere(finished, "full"), list[Saves]()

    def fail() -> None:
        disk.set()
        assert saving[0].work.exception(PATIENCE) is not None

    for behind in (True, False):
        with monkeypatch.context() as patch, pytest.raises(StorageError) as raised:
            patch.setattr(checkpoint, "write_file", fails)
            before(patch, Saves, "save", lambda run_saves, *given: saving.append(run_saves))
            begins(patch, 5, fail)
            train(dataclasses.replace(run, async_save=behind))
        folder = Path(run.out) / "checkpoints" / "step_00000004"
        assert raised.value.exit_code == 74 and not list(folder.parent.iterdir())
        line = f"saving {folder} failed: No space left on device; free some space, or write elsewhere"
        assert str(raised.value) == line
        assert len(records(run.out, ("step",))) == (5 if behind else 4)
    train(run)
    same_bits(finished.out, run.out, 12)


def test_a_folder_that_is_gone_is_named(config: RunConfig, disk: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the file that could therefore not be written."""
    saving = list[Saves]()

    def remove() -> None:
        shutil.rmtree(config.out)
        disk.set()
        assert saving[0].work.exception(PATIENCE) is not None

    before(monkeypatch, Saves, "save", lambda run_saves, *given: saving.append(run_saves))
    begins(monkeypatch, 5, remove)
    with pytest.raises(StorageError, match=f"{config.out} was moved or removed while the run trained in it; put it back"):
        train(config)
    assert not Path(config.out).exists()


def test_a_crash_lets_the_writer_finish(
    finished: RunConfig, disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the folder's lock is held until it has."""
    run, held = elsewhere(finished, "crashed"), list[bool]()

    def crash() -> None:
        threading.Timer(0.05, disk.set).start()
        raise RuntimeError("a mistake of our own")

    original = checkpoint.commit

    def commit(*given: Any) -> Path:
        held.append(is_held(Path(run.out)))
        return original(*given)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a mistake of our own"):
        begins(patch, 5, crash)
        patch.setattr(checkpoint, "commit", commit)
        train(run)
    assert held == [True] and not is_held(Path(run.out)) and saved_steps(Path(run.out)) == [4]
    assert records(run.out, ("stop",))[0]["step"] == 5 and records(run.out, ("save",))[0]["step"] == 4
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("save") and thread.is_alive()]
    train(run)
    assert "resumed at step 4" in (Path(run.out) / "log.txt").read_text()
    same_bits(finished.out, run.out, 12)


def test_what_a_program_asked_for_stands(config: RunConfig, disk: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """When `steps`, `save` or `close` return, and when an error of its own comes back to it."""
    before(monkeypatch, Saves, "wait", lambda run_saves: disk.set())
    before(monkeypatch, Saves, "save", lambda run_saves, *given: disk.clear())
    standing = lambda: saved_steps(Path(config.out))  # noqa: E731
    with handgrad.Training(config, quiet=True, keep_checkpoints=0, save_every=3) as run:
        run.steps(3)
        assert standing() == [3]
        run.steps(1)
        assert run.save().is_dir() and standing() == [3, 4]
        with pytest.raises(ZeroDivisionError):
            run.steps(on_step=lambda step: 1 // (7 - step.step))
        assert standing() == [3, 4, 6]
    assert standing() == [3, 4, 6, 7]


def test_the_best_validation_is_recorded_after_its_checkpoint(
    config: RunConfig, disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    before(monkeypatch, Saves, "wait", lambda run_saves: disk.set())
    stood: dict[int, bool] = {}
    note = lambda log, step, *given: stood.update({step: step in saved_steps(Path(config.out))})  # noqa: E731
    before(monkeypatch, RunLog, "validation", note)
    train(dataclasses.replace(config, eval_every=2, save_every=4, keep_best=True, steps=8, learning_rate=1e-3))
    assert stood == dict.fromkeys((2, 4, 6, 8), True)


def test_without_memory_for_a_copy_training_stands_still(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the header says so, with what it takes and what there is."""
    monkeypatch.setattr(checkpointing.devices, "available_bytes", lambda device: 2 << 20)
    monkeypatch.setattr("handgrad.run.open.check_fits", lambda *given, **named: None)
    monkeypatch.setattr(Saves, "write", lambda *given: pytest.fail("written behind"))
    train(dataclasses.replace(config, sample_tokens=0, eval_every=0))
    (line,) = (line for line in (Path(config.out) / "log.txt").read_text().splitlines() if line.startswith("saves "))
    assert line.endswith(" MiB, 2.0 MiB are free") and "with a copy in host memory the run needs " in line
    found = records(config.out, ("save",))
    assert [record["step"] for record in found] == [4, 8, 12]
    assert all(record["pause_seconds"] >= record["seconds"] for record in found)


def test_the_header_names_the_copy(finished: RunConfig) -> None:
    """It holds each number of the checkpoint once."""
    lines = [line for line in (Path(finished.out) / "log.txt").read_text().splitlines() if line.startswith("saves ")]
    assert lines == ["saves      behind training, from a copy of 424.5 KiB in host memory"]
    (run,) = records(finished.out, ("run",))
    assert run["host_bytes"] >= sum(map(len, contents(finished, 12).values())) - 30_000


def test_a_plan_has_the_bytes(finished: RunConfig, capsys: pytest.CaptureFixture) -> None:
    """Of the largest of several ranks."""
    recipe = f"{finished.out}/config.toml"
    found = {}
    for ranks in ("1", "2"):
        assert main(["plan", "--config", recipe, "--lanes", "2", "--micro-batch", "2", "--ranks", ranks]) == 0
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("host "))
        found[ranks] = line
    assert found["1"] == "host       424.5 KiB: the copy from which saves are written behind training"
    assert found["2"].split()[3:5] == ["per", "rank:"] and 212.0 <= float(found["2"].split()[1]) < 260.0
    assert main(["plan", "--config", recipe, "--async-save", "false"]) == 0
    assert "host " not in capsys.readouterr().out


# Kills.


SIZE = 400_000  # bytes of a checkpoint's tensors, about


@pytest.mark.nightly(but=["1"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_at_any_byte(ranks: int, finished: RunConfig, launcher: Launcher, tmp_path: Path) -> None:
    """SIGKILL while the second checkpoint is written, after so many bytes of the one or the other rank: it exists or it
    does not, and the run goes on with the same bits."""
    dice, started = random.Random(ranks), {}
    for number in range(4):
        run = elsewhere(finished, f"killed{number}", lanes=ranks, micro_batch=4 // ranks)
        recipe = tmp_path / f"{number}.toml"
        recipe.write_text(to_toml(run))
        fault = f"kill-write:{number % ranks}:{dice.randrange(SIZE // ranks)}"
        started[run] = launcher.start(ranks, ["train", "--config", str(recipe)], fault), recipe
    whole = elsewhere(finished, "whole", lanes=ranks, micro_batch=4 // ranks)
    train(whole)
    for run, (processes, recipe) in started.items():
        codes = processes.wait()
        assert -signal.SIGKILL in codes and any(processes.fired), processes.errors
        folder = Path(run.out) / "checkpoints"
        assert saved_steps(Path(run.out)) == [4] and [path.name for path in folder.glob("*.partial")] == [
            "step_00000008.partial"
        ]
        launcher.run(ranks, ["train", "--config", str(recipe)])
        assert "resumed at step 4" in (Path(run.out) / "log.txt").read_text()
        same_run(Path(whole.out), Path(run.out), 12)
        assert not list(folder.glob("*.partial"))


# Files.


def stored(sizes: dict[str, int]) -> list[Stored]:
    return [Stored.of(name, torch.zeros(size)) for name, size in sizes.items()]


@pytest.mark.parametrize("writers", [1, 2, 3, 4, 8, 64])
def test_shares_are_whole_tensors_in_order_and_about_equal(writers: int) -> None:
    sizes = {"wte": 3000, "wpe": 600, **{f"blocks.{number}": 500 + 10 * number for number in range(12)}, "lnf": 2}
    state = stored(sizes | {f"m.{name}": size for name, size in sizes.items()})
    shares = checkpoint.split_among_writers(state, writers)
    assert len(shares) == writers
    files = {file: [one.name for one in tensors] for share in shares for file, tensors in share.items()}
    for file, prefix in ((WEIGHTS_FILE, ""), (OPTIMIZER_FILE, "m.")):
        names = parts_of(file, files)
        assert (names == [file]) == (writers == 1) and len(names) <= writers
        assert [name for part in names for name in files[part]] == [prefix + name for name in sizes]
        largest = max(sum(sizes[name.removeprefix("m.")] for name in files[part]) for part in names)
        assert largest <= sum(sizes.values()) / writers + max(sizes.values())
    assert all(files.values()), "no file is empty"


@pytest.mark.parametrize("missing", ["model-00001-of-00002", "model-00002-of-00002", "optimizer", "all"])
def test_a_checkpoint_lacks_no_part(missing: str) -> None:
    names = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "optimizer.safetensors"}
    assert len(parts_of(WEIGHTS_FILE, names)) == 2 and parts_of(OPTIMIZER_FILE, names) == [OPTIMIZER_FILE]
    left = set() if missing == "all" else names - {f"{missing}.safetensors"}
    assert [] in (parts_of(WEIGHTS_FILE, left), parts_of(OPTIMIZER_FILE, left))


class Driver:
    """Notes what is pinned; `error`: of the next call."""

    def __init__(self, error: int = 0):
        self.error, self.pinned = error, dict[int, int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.pinned[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> None:
        del self.pinned[address]


def test_memory_is_pinned_while_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """As large as it is."""
    driver, memory = Driver(), torch.zeros(3000, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    offload.pin(memory, "a copy", "--async-save false")
    assert driver.pinned == {memory.data_ptr(): 3000}
    del memory
    assert not driver.pinned
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Driver(error=2))
    with pytest.raises(MemoryShort, match=r"pin 2.9 KiB of host memory.*CUDA error 2.*--async-save false"):
        offload.pin(torch.zeros(3000, dtype=torch.uint8), "a copy", "--async-save false")
