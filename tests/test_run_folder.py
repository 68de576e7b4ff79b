"""Whose a run folder is, and whose code made it."""

import errno
import fcntl
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import pytest
import torch

import handgrad
from handgrad.errors import ConfigError, DataError, StorageError, UsageError
from handgrad.run import checkpointing
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from handgrad.storage import checkpoint
from handgrad.storage.run_files import CHECKPOINTS, CONFIG_FILE, LOCK_FILE, METRICS_FILE, take_lock
from tests.test_runs import records, tensors


def test_a_lock_whose_file_is_gone_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that was refused removed it between another's opening of it and its locking."""
    (tmp_path / LOCK_FILE).touch()
    locking, removals = fcntl.flock, []

    def removed_before(file: TextIO, operation: int) -> None:
        if not removals:
            removals.append((tmp_path / LOCK_FILE).unlink())
        locking(file, operation)

    monkeypatch.setattr("fcntl.flock", removed_before)
    with take_lock(tmp_path), pytest.raises(ConfigError, match="another process is training"):
        take_lock(tmp_path)


def test_a_refused_start_leaves_no_folder(config: RunConfig, tmp_path: Path) -> None:
    """Unless something is in it."""
    (tmp_path / "nothing").mkdir()
    refused = replace(config, out=str(tmp_path / "runs" / "refused"), init_from=str(tmp_path / "nothing"))
    with pytest.raises(DataError):
        train(refused)
    assert list((tmp_path / "runs").iterdir()) == []
    Path(refused.out).mkdir()
    with pytest.raises(DataError):
        train(refused)
    assert Path(refused.out).is_dir(), "somebody else has made it"


@pytest.mark.fault(4)
def test_a_start_that_a_full_disk_refuses_may_be_repeated(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves no half of a configuration, nor a folder that counts as somebody else's for what is in it."""
    with monkeypatch.context() as patch, pytest.raises(StorageError, match=r"config.toml failed: No space left"):
        patch.setattr(Path, "replace", full)
        train(replace(config, steps=1))
    assert not Path(config.out).exists()

    def stacks_then_full(path: Path, target: Path) -> None:
        (Path(config.out) / "stacks").mkdir()
        full(path, target)

    with monkeypatch.context() as patch, pytest.raises(StorageError):
        patch.setattr(Path, "replace", stacks_then_full)
        train(replace(config, steps=1))
    train(replace(config, steps=1))


def full(path: Path, target: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_folder_of_something_else_is_left_alone(config: RunConfig) -> None:
    folder = Path(config.out)
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("do not touch")
    with pytest.raises(UsageError, match="no run folder"):
        train(config)
    assert [p.name for p in folder.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("what", ["*", "step_*"])
def test_a_run_whose_checkpoints_are_gone_does_not_start_over(finished: RunConfig, what: str) -> None:
    """Their disk may not be mounted."""
    checkpoints = Path(finished.out) / CHECKPOINTS
    if what == "*":
        shutil.rmtree(checkpoints)
    else:
        for folder in checkpoints.glob(what):
            shutil.rmtree(folder)
    record = (Path(finished.out) / METRICS_FILE).read_bytes()
    with pytest.raises(DataError, match=r"expected the checkpoint of step 12 in .*, found none; restore it, or remove"):
        train(finished)
    assert (Path(finished.out) / METRICS_FILE).read_bytes() == record


@pytest.mark.parametrize("kept", [(CHECKPOINTS,), (CHECKPOINTS, METRICS_FILE, CONFIG_FILE)])
def test_a_copy_without_its_dotfiles_resumes(finished: RunConfig, tmp_path: Path, kept: tuple[str, ...]) -> None:
    """`cp -r RUN/* COPY` leaves the lock out, a backup may hold the checkpoints alone."""
    (tmp_path / "copy").mkdir()
    for name in kept:
        path = Path(finished.out) / name
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / "copy" / name)
    shutil.rmtree(tmp_path / "copy" / CHECKPOINTS / "step_00000012")
    copy = replace(finished, out=str(tmp_path / "copy"))
    train(copy)
    there, here = tensors(finished.out, 12), tensors(copy.out, 12)
    assert there.keys() == here.keys() and all(torch.equal(there[name], here[name]) for name in there)


def test_other_code_under_the_same_version_is_said(finished: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another version is: a developer's edit between two starts is no reason to refuse the run."""
    manifest = checkpoint.find(finished.out).manifest
    assert len(manifest["versions"]["sources"]) == 64
    monkeypatch.setattr(checkpointing, "sources_sha256", lambda: "another")
    train(finished)
    told = " ".join(r["text"] for r in records(finished.out, ("event",)))
    assert f"sources {manifest['versions']['sources']} -> another (the bits may differ" in told


def test_sources_are_named_and_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A byte, a name or the place of a cut changes the hash; compiled files do not."""
    monkeypatch.setattr(handgrad, "__file__", str(tmp_path / "__init__.py"))
    digests = []
    for files in (
        {"a.py": "x", "b.py": "y"},
        {"a.py": "x", "b.py": "z"},
        {"a.py": "x", "c.py": "z"},
        {"a.py": "", "c.py": "xz"},
        {"a.py": "xb.py\ny"},  # the bytes of the first one without lengths
    ):
        for path in tmp_path.rglob("*.py"):
            path.unlink()
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        (tmp_path / f"{len(digests)}.pyc").touch()
        digests.append(checkpointing.sources_sha256.__wrapped__())
        assert digests[-1] == checkpointing.sources_sha256.__wrapped__()
    assert len({*digests}) == len(digests)
