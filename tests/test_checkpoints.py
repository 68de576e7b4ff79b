"""Checkpoints are complete and verified, or they do not exist; damaged ones are named and passed over."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from handgrad import ops
from handgrad.errors import ConfigError, DataError, StorageError
from handgrad.run.evaluating import Evaluations
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from handgrad.storage import checkpoint
from handgrad.storage.checkpoint import Stored
from tests.test_runs import elsewhere, interrupt_at, same_bits, tensors


def stored(tensors: dict[str, torch.Tensor]) -> list[Stored]:
    return [Stored.of(name, tensor) for name, tensor in tensors.items()]


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "flip":
        content[len(content) // 2] ^= 4
    elif how == "cut":
        content = content[: len(content) // 2]
    elif how == "cut to 99 %":
        content = content[: len(content) * 99 // 100]
    elif how == "foreign":  # the same file of another checkpoint
        (other,) = (folder for folder in path.parent.parent.glob("step_*") if folder != path.parent)
        content = (other / path.name).read_bytes()
    elif how == "empty":
        content = bytearray()
    elif how == "append":
        content += b"x"
    path.write_bytes(content)
    if how == "missing":
        path.unlink()


@pytest.mark.fault(6, 7, 8, 9, 10)
@pytest.mark.parametrize("how", ["flip", "cut", "cut to 99 %", "empty", "append", "missing", "foreign"])
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "manifest.json"])
def test_a_damaged_checkpoint_is_named_and_passed_over(config: RunConfig, file: str, how: str) -> None:
    checkpoints = Path(config.out)
    for step in (1, 2):
        state = stored({"a": torch.arange(40.0) * step, "m.a": torch.ones(40) * step, "v.a": torch.ones(40)})
        checkpoint.save(checkpoints, step, state, {"config": {}}, {})
    assert checkpoint.newest(checkpoints)[0].step == 2
    damage(checkpoints / "step_00000002" / file, how)
    found, passed_over = checkpoint.newest(checkpoints)
    assert found is not None and found.step == 1
    assert len(passed_over) == 1 and "step_00000002" in passed_over[0]
    assert file.split(".")[0] in passed_over[0] or (how == "foreign" and "holds a checkpoint of step 1" in passed_over[0])
    with pytest.raises(DataError, match="step_00000002"):
        checkpoint.open_checkpoint(checkpoints / "step_00000002")


@pytest.mark.fault(7)
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


@pytest.mark.fault(4)
def test_a_full_disk_in_a_save(finished: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    run = elsewhere(finished, "full")
    original = checkpoint.write_file

    def full(path: Path, chunks) -> dict:
        if "step_00000008" in str(path) and path.name == "optimizer.safetensors":
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(path, chunks)

    monkeypatch.setattr(checkpoint, "write_file", full)
    with pytest.raises(StorageError, match="No space left") as raised:
        train(run)
    assert raised.value.exit_code == 74
    checkpoints = Path(run.out) / "checkpoints"
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step_00000004"]


@pytest.mark.fault(10)
def test_an_edited_manifest_is_refused(finished: RunConfig) -> None:
    newest = Path(finished.out) / "checkpoints" / f"step_{finished.steps:08d}"
    manifest = newest / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 12', '"step": 13'))
    with pytest.raises(DataError, match="edited or damaged"):
        checkpoint.open_checkpoint(newest)


def test_a_damaged_checkpoint_never_crowds_out_a_valid_one(tmp_path: Path) -> None:
    state = stored({"a": torch.ones(4), "m.a": torch.ones(4), "v.a": torch.ones(4)})
    for step in (4, 12):
        checkpoint.save(tmp_path, step, state, {"config": {}}, {})
    damage(tmp_path / "step_00000012" / "model.safetensors", "flip")
    checkpoint.save(tmp_path, 6, state, {"config": {}}, {})  # the run went on from step 4
    checkpoint.prune(tmp_path, 6, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000006", "step_00000012"]
    assert checkpoint.newest(tmp_path, moves=True)[0].step == 6
    assert sorted(p.name for p in tmp_path.iterdir()) == ["damaged", "step_00000006"]


def test_a_save_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, then their folder, then the rename, then the parent."""
    calls = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        calls.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real_fsync(descriptor)

    def rename(self: Path, target: Path) -> Path:
        calls.append(f"rename to {Path(target).name}")
        return real_rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    state = stored({"a": torch.ones(4), "m.a": torch.ones(4), "v.a": torch.ones(4)})
    checkpoint.save(tmp_path / "c", 1, state, {"config": {}}, {})
    files = ["model.safetensors", "optimizer.safetensors", "manifest.json"]
    assert calls == [*files, "step_00000001.partial", "rename to step_00000001", "c"]


@pytest.mark.fault(39)
def test_an_evaluation_that_crashes_costs_no_step(finished: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint of that step is there already; the resumed run makes up for the missing validation."""
    settings = {"save_every": 6, "eval_every": 6}
    whole, crashed = (elsewhere(finished, name, **settings) for name in ("whole", "crashed"))
    train(whole)

    def crash(self: Evaluations, *_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Evaluations, "validate", crash)
        train(crashed)
    assert sorted(p.name for p in (Path(crashed.out) / "checkpoints").iterdir()) == ["step_00000006"]
    train(crashed)
    same_bits(whole.out, crashed.out, whole.steps)


def test_a_run_without_a_usable_checkpoint_does_not_start_over(finished: RunConfig) -> None:
    for folder in (Path(finished.out) / "checkpoints").iterdir():
        damage(folder / "model.safetensors", "flip")
    with pytest.raises(DataError, match=r"none that can be used .*remove .* to start over"):
        train(finished)


def test_old_checkpoints_are_removed(finished: RunConfig) -> None:
    kept = sorted(p.name for p in (Path(finished.out) / "checkpoints").iterdir())
    assert kept == ["step_00000008", "step_00000012"]


def test_a_checkpoint_of_another_model_is_refused(finished: RunConfig) -> None:
    with pytest.raises(DataError, match="another model"):
        train(dataclasses.replace(finished, num_layers=3), allow_changes=True)
    with pytest.raises(DataError, match=r"expected .* of shape"):
        train(dataclasses.replace(finished, sequence_length=8), allow_changes=True)
    with pytest.raises(ConfigError, match="holds the state of channels 32, found 64"):
        train(dataclasses.replace(finished, channels=64), allow_changes=True)


def test_fewer_steps_than_a_run_has_made_are_refused(finished: RunConfig) -> None:
    before = (Path(finished.out) / "config.toml").read_bytes()
    with pytest.raises(ConfigError, match=f"expected --steps {finished.steps} or more, as .* has made, found 8"):
        train(dataclasses.replace(finished, steps=8), allow_changes=True)
    assert (Path(finished.out) / "config.toml").read_bytes() == before


def test_fp16_goes_on_with_its_loss_scale(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Doubled after every third good step here, and resumed between two of those: the same bits, the same scale."""
    monkeypatch.setattr(ops, "LOSS_SCALE_GROWTH_STEPS", 3)
    settings = {"precision": "fp16", "steps": 7, "save_every": 4, "sample_tokens": 0, "eval_every": 0}
    whole, pieces = (elsewhere(config, name, **settings) for name in ("whole", "pieces"))
    train(whole)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            train(pieces)
    train(pieces)
    same_bits(whole.out, pieces.out, 7)
    folders = [Path(run.out) / "checkpoints" for run in (whole, pieces)]
    at_four, at_seven, resumed = (
        checkpoint.open_checkpoint(checkpoint.folder_of(folder, step)).manifest["loss_scale"]
        for folder, step in ((folders[0], 4), (folders[0], 7), (folders[1], 7))
    )
    assert at_four == [2.0**17, 1.0] and at_seven == resumed == [2.0**18, 1.0]


def test_every_tensor_of_a_file_has_its_receiver(tmp_path: Path) -> None:
    """One too many in the file, or one too few: an error that names it, before anything is received."""
    weights = {name: torch.full((2,), float(ord(name))) for name in "ab"}
    checkpoint.save(tmp_path, 3, stored(weights), {"config": {}}, {})
    found, received = checkpoint.open_checkpoint(checkpoint.folder_of(tmp_path, 3)), []
    for names, differing in (("a", "'b'"), ("abc", "'c'")):
        with pytest.raises(DataError, match=f"other tensors than this model: 1 differ, the first is {differing}"):
            found.load(checkpoint.WEIGHTS_FILE, dict.fromkeys(names, ((2,), received.append)))
    assert not received
    found.load(checkpoint.WEIGHTS_FILE, dict.fromkeys("ab", ((2,), received.append)))
    assert [tensor[0] for tensor in received] == [97, 98]


@pytest.mark.parametrize("length", range(1, 10))
def test_tensors_of_a_file_begin_at_multiples_of_8_bytes(length: int) -> None:
    """As the format asks of its header, whatever the names' lengths."""
    header, *data = checkpoint.safetensors_bytes(stored({"n" * length: torch.tensor([1.0, 2.0])}))
    assert len(header) % 8 == 0 and int.from_bytes(header[:8], "little") == len(header) - 8
    loaded = safetensors.torch.load(b"".join([header, *data]))
    assert loaded["n" * length].tolist() == [1.0, 2.0]


def test_a_manifest_may_be_laid_out_anew(tmp_path: Path) -> None:
    """Other indents, keys in another order: the same content."""
    checkpoint.save(tmp_path, 3, stored({"a": torch.ones(2)}), {"config": {"b": 1, "a": 2}, "more": [1, 2]}, {})
    folder = checkpoint.folder_of(tmp_path, 3)
    before = checkpoint.open_checkpoint(folder).manifest
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(dict(reversed(content.items())), indent=4))
    assert checkpoint.open_checkpoint(folder).manifest == before


def test_a_file_that_another_writer_has_not_finished(tmp_path: Path) -> None:
    """A file of another machine is as long as its entry says, or the checkpoint does not get its name."""
    final = checkpoint.folder_of(tmp_path, 1)
    rows = [Stored.of("w", torch.arange(5.0)), Stored.of("m.w", torch.zeros(5))]
    for lost, stands in ((0, True), (1, False)):
        checkpoint.begin_partial(final)
        files = checkpoint.write_tensors(final, checkpoint.split_among_writers(rows, 1)[0])
        cut = checkpoint.partial_folder(final) / "optimizer.safetensors"
        os.truncate(cut, cut.stat().st_size - lost)
        if stands:
            assert checkpoint.commit(final, 1, files, {}, {}).is_dir()
            shutil.rmtree(final)
            continue
        with pytest.raises(OSError, match=r"expected \d+ bytes in optimizer.safetensors, found \d+"):
            checkpoint.commit(final, 1, files, {}, {})
        assert not final.exists()
