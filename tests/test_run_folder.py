"""Whose a run folder is."""

import fcntl
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import pytest

from handgrad.config import RunConfig
from handgrad.errors import ConfigError, DataError, UsageError
from handgrad.run.lock import take_lock
from handgrad.run.start import train
from handgrad.run_files import LOCK_FILE


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


def test_a_folder_of_something_else_is_left_alone(config: RunConfig) -> None:
    folder = Path(config.out)
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("do not touch")
    with pytest.raises(UsageError, match="no run folder"):
        train(config)
    assert [p.name for p in folder.iterdir()] == ["thesis.tex"]
