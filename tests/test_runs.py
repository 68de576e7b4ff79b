"""Whole runs: the same bits twice, after a kill, after a signal; checkpoints that are complete or do not exist."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

from handgrad import checkpoint
from handgrad.config import RunConfig, to_toml
from handgrad.errors import ConfigError, DataError, NumericsError, Preempted, StorageError, UsageError
from handgrad.training import loop
from handgrad.training.loop import train

TIMES = ("step_ms", "tokens_per_second")  # the only fields of a record that may differ between equal runs


def records(run: str | Path, kinds: tuple[str, ...] = ("step", "validation", "sample")) -> list[dict]:
    lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines if line["kind"] in kinds]


def tensors(run: str | Path, step: int) -> dict[str, torch.Tensor]:
    folder = Path(run) / "checkpoints" / f"step_{step:08d}"
    found = {}
    for file in ("model.safetensors", "optimizer.safetensors"):
        found |= {name: tensor.clone() for name, tensor in safetensors.torch.load_file(folder / file).items()}  # no map
    return found


def same_bits(a: str | Path, b: str | Path, step: int) -> None:
    first, second = tensors(a, step), tensors(b, step)
    assert first.keys() == second.keys() and len(first) > 20
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert records(a) == records(b)
    assert (Path(a) / "main.log").read_text() == (Path(b) / "main.log").read_text()


@pytest.fixture
def finished(config: RunConfig) -> RunConfig:
    """An uninterrupted run."""
    train(config)
    return config


def elsewhere(config: RunConfig, name: str, **settings: object) -> RunConfig:
    return dataclasses.replace(config, out=str(Path(config.out).with_name(name)), **settings)


def launch(config: RunConfig, folder: Path) -> subprocess.Popen:
    recipe = folder / f"{Path(config.out).name}.toml"
    recipe.write_text(to_toml(config))
    command = [sys.executable, "-m", "handgrad", "train", "--config", str(recipe)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_two_runs_give_the_same_bits(finished: RunConfig, tmp_path: Path) -> None:
    """One in this process, one through the command line."""
    again = elsewhere(finished, "again")
    process = launch(again, tmp_path)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    same_bits(finished.out, again.out, finished.steps)
    assert (Path(again.out) / "report.html").exists()


def test_another_seed_gives_other_bits(finished: RunConfig) -> None:
    other = elsewhere(finished, "other", seed=finished.seed + 1)
    train(other)
    assert records(other.out) != records(finished.out)


def test_killed_and_resumed_gives_the_same_bits(finished: RunConfig, tmp_path: Path) -> None:
    """SIGKILL after some checkpoint, at a moment of the machine's choosing; then the same command again."""
    killed = elsewhere(finished, "killed", log_every=1)
    process = launch(killed, tmp_path)
    log = Path(killed.out) / "log.txt"
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and not (log.exists() and "step  5/12" in log.read_text()):
        time.sleep(0.005)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "the fault must fire before the run ends"
    train(killed)
    assert "resumed at step" in log.read_text()
    same_bits(finished.out, killed.out, finished.steps)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_75(finished: RunConfig, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = elsewhere(finished, f"stopped{number}")
    original = loop.train_step

    def with_signal(*arguments):
        if arguments[-1] == 6:
            os.kill(os.getpid(), number)
        return original(*arguments)

    monkeypatch.setattr(loop, "train_step", with_signal)
    with pytest.raises(Preempted, match="after step 7") as raised:
        train(stopped)
    assert raised.value.exit_code == 75
    monkeypatch.undo()
    train(stopped)
    same_bits(finished.out, stopped.out, finished.steps)


def test_resume_of_a_resume(finished: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = elsewhere(finished, "pieces", skip_loss_z=4.0, save_every=3)
    whole = elsewhere(finished, "whole", skip_loss_z=4.0, save_every=3)
    train(whole)
    original = loop.train_step
    for last in (2, 6, 8):

        def stopping(*arguments, last=last):
            if arguments[-1] == last:
                raise KeyboardInterrupt  # like a crash: nothing is saved
            return original(*arguments)

        monkeypatch.setattr(loop, "train_step", stopping)
        with pytest.raises(KeyboardInterrupt):
            train(pieces)
    monkeypatch.undo()
    train(pieces)
    same_bits(whole.out, pieces.out, whole.steps)


def test_a_finished_run_stays_as_it_is(finished: RunConfig) -> None:
    before = records(finished.out)
    assert train(finished) is None
    assert records(finished.out) == before


def test_another_configuration_is_refused_and_named(finished: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"learning_rate: 0\.003 -> 0\.1") as raised:
        train(dataclasses.replace(finished, learning_rate=0.1))
    assert raised.value.exit_code == 78
    train(dataclasses.replace(finished, steps=14), allow_changes=True)
    assert any("steps: 12 -> 14" in r["text"] for r in records(finished.out, ("event",)))
    # What does not touch the numbers may change freely.
    train(dataclasses.replace(finished, steps=14, log_every=1, save_every=5))


def test_other_data_is_refused(finished: RunConfig, shards: Path, tmp_path: Path) -> None:
    import shutil

    from handgrad.data.shards import HEADER_BYTES, header

    other = tmp_path / "other"
    other.mkdir()
    for split, name in (("train", "x_train_000000.bin"), ("validation", "x_val_000000.bin")):
        tokens = (shards / f"{split}_000000.bin").read_bytes()[HEADER_BYTES:]
        (other / name).write_bytes(header(len(tokens) // 2) + tokens)
    shutil.rmtree(Path(finished.out) / "samples")
    with pytest.raises(ConfigError, match="trained on other data"):
        train(dataclasses.replace(finished, data=str(other)), allow_changes=False)


def test_two_trainers_in_one_folder(finished: RunConfig) -> None:
    from handgrad.training.run_folder import RunFolder

    held = RunFolder(finished, allow_changes=False)
    try:
        with pytest.raises(ConfigError, match="another process is training"):
            train(finished)
    finally:
        held.close()


def test_a_folder_of_something_else_is_left_alone(config: RunConfig) -> None:
    folder = Path(config.out)
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("do not touch")
    with pytest.raises(UsageError, match="no run folder"):
        train(config)
    assert [p.name for p in folder.iterdir()] == ["thesis.tex"]


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "flip":
        content[len(content) // 2] ^= 4
    elif how == "cut":
        content = content[: len(content) // 2]
    elif how == "empty":
        content = bytearray()
    elif how == "append":
        content += b"x"
    path.write_bytes(content)
    if how == "missing":
        path.unlink()


@pytest.mark.parametrize("how", ["flip", "cut", "empty", "append", "missing"])
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "manifest.json"])
def test_a_damaged_checkpoint_is_named_and_passed_over(config: RunConfig, file: str, how: str) -> None:
    checkpoints = Path(config.out)
    state = [("a", torch.arange(40.0)), ("m.a", torch.ones(40)), ("v.a", torch.ones(40))]
    for step in (1, 2):
        checkpoint.save(checkpoints, step, state, {"config": {}}, {})
    assert checkpoint.newest(checkpoints)[0].step == 2
    if file == "manifest.json" and how in ("flip", "append"):
        how = "cut"  # JSON has no hash of its own; the files it names do
    damage(checkpoints / "step_00000002" / file, how)
    found, passed_over = checkpoint.newest(checkpoints)
    assert found is not None and found.step == 1
    assert len(passed_over) == 1 and "step_00000002" in passed_over[0] and file.split(".")[0] in passed_over[0]
    with pytest.raises(DataError, match="step_00000002"):
        checkpoint.open_checkpoint(checkpoints / "step_00000002")


def test_a_resumed_run_says_what_it_passed_over(finished: RunConfig) -> None:
    newest = Path(finished.out) / "checkpoints" / f"step_{finished.steps:08d}"
    reference = tensors(finished.out, finished.steps)
    damage(newest / "optimizer.safetensors", "flip")
    train(finished)
    assert "passed over step_00000012" in (Path(finished.out) / "log.txt").read_text()
    again = tensors(finished.out, finished.steps)
    assert all(torch.equal(reference[name], again[name]) for name in reference)


def test_an_interrupted_save_is_no_checkpoint(finished: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash before the rename leaves a .partial folder, which nobody takes for a checkpoint."""
    run = elsewhere(finished, "interrupted")
    original = Path.rename

    def crash(self: Path, target: Path) -> Path:
        if str(target).endswith("step_00000008"):
            raise KeyboardInterrupt
        return original(self, target)

    monkeypatch.setattr(Path, "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        train(run)
    monkeypatch.undo()
    checkpoints = Path(run.out) / "checkpoints"
    assert (checkpoints / "step_00000008.partial").exists()
    assert checkpoint.newest(checkpoints)[0].step == 4
    train(run)
    assert not list(checkpoints.glob("*.partial"))
    same_bits(finished.out, run.out, finished.steps)


def test_a_full_disk_in_a_save(finished: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    run = elsewhere(finished, "full")
    original = checkpoint._write

    def full(path: Path, chunks) -> dict:
        if "step_00000008" in str(path) and path.name == "optimizer.safetensors":
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(path, chunks)

    monkeypatch.setattr(checkpoint, "_write", full)
    with pytest.raises(StorageError, match="No space left") as raised:
        train(run)
    assert raised.value.exit_code == 74
    checkpoints = Path(run.out) / "checkpoints"
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step_00000004"]


def test_old_checkpoints_are_removed(finished: RunConfig) -> None:
    kept = sorted(p.name for p in (Path(finished.out) / "checkpoints").iterdir())
    assert kept == ["step_00000008", "step_00000012"]


def test_a_checkpoint_of_another_model_is_refused(finished: RunConfig) -> None:
    with pytest.raises(DataError, match="another model"):
        train(elsewhere(finished, "deeper", init_from=finished.out, num_layers=3))
    with pytest.raises(DataError, match=r"expected .* of shape"):
        train(elsewhere(finished, "wider", init_from=finished.out, channels=64))


def test_init_from_starts_from_the_weights(finished: RunConfig) -> None:
    run = elsewhere(finished, "warm", init_from=finished.out, steps=1, learning_rate=0.0)
    train(run)
    old, new = tensors(finished.out, 12), tensors(run.out, 1)
    assert all(torch.equal(old[n], new[n]) for n in old if not n.startswith(("m.", "v.")))


def test_non_finite_losses_are_skipped_then_end_the_run(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    original = loop.train_step

    def poisoned(run_config, state, *arguments):
        if arguments[-1] >= 6:
            state.weights.lnf_bias[0] = float("nan")
        return original(run_config, state, *arguments)

    monkeypatch.setattr(loop, "train_step", poisoned)
    with pytest.raises(NumericsError, match="3 updates in a row") as raised:
        train(dataclasses.replace(config, max_skips=3, save_every=2))
    assert raised.value.exit_code == 76
    events = [r["text"] for r in records(config.out, ("event",)) if "no update" in r["text"]]
    assert len(events) == 3 and "loss is nan" in events[0] and "non-finite gradients in wte" in events[0]
    newest = checkpoint.newest(Path(config.out) / "checkpoints")[0]
    stored = safetensors.torch.load_file(newest.folder / "model.safetensors")
    assert newest.step == 6 and all(torch.isfinite(t).all() for t in stored.values())
