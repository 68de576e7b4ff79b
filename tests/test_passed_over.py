"""Checkpoints that cannot be used: damaged ones are moved aside, an I/O error or a newer schema stops the run, and none is
ever deleted by it."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from handgrad.cli import main
from handgrad.errors import DataError, StorageError
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from handgrad.storage import checkpoint, manifest
from tests.test_checkpoints import damage
from tests.test_runs import elsewhere, interrupt_at, same_bits

NAMES = [f"step_{step:08d}" for step in (8, 12)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def names(run: RunConfig) -> list[str]:
    return sorted(path.name for path in (Path(run.out) / "checkpoints").iterdir())


@pytest.fixture
def newest(finished: RunConfig) -> Path:
    return Path(finished.out) / "checkpoints" / NAMES[1]


def with_manifest(folder: Path, **changes: object) -> None:
    """Changes a manifest and gives it the right hash."""
    content = json.loads((folder / "manifest.json").read_text())
    content |= changes
    del content["sha256"]
    content["sha256"] = manifest.content_sha256(content)
    (folder / "manifest.json").write_text(json.dumps(content))


@pytest.mark.fault(7, 8)
def test_a_damaged_checkpoint_is_moved_aside(finished: RunConfig, newest: Path, tmp_path: Path) -> None:
    """And stays there, as it is, when the run saves the same step again."""
    reference = shutil.copytree(finished.out, tmp_path / "reference")
    damage(newest / "optimizer.safetensors", "flip")
    before = contents(newest)
    train(finished)
    assert names(finished) == ["damaged", *NAMES]
    assert contents(newest.parent / "damaged" / NAMES[1]) == before
    same_bits(reference, finished.out, 12)
    damage(newest / "model.safetensors", "cut")
    train(finished)
    aside = newest.parent / "damaged"
    assert sorted(path.name for path in aside.iterdir()) == [NAMES[1], f"{NAMES[1]}.1"]
    assert contents(aside / NAMES[1]) == before


def failing_once(patch: pytest.MonkeyPatch, code: int) -> None:
    """The first read of a checkpoint's optimizer state fails."""
    original, left = manifest.file_sha256, [1]

    def file_sha256(path: Path) -> str:
        if path.name == "optimizer.safetensors" and left:
            left.pop()
            raise OSError(code, os.strerror(code))
        return original(path)

    patch.setattr(manifest, "file_sha256", file_sha256)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.EIO])
def test_an_error_of_the_disk_is_no_damage(finished: RunConfig, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run stops with the error, every checkpoint stays, and the next start takes the newest."""
    before = names(finished)
    with monkeypatch.context() as patch:
        failing_once(patch, code)
        with pytest.raises(StorageError, match=f"reading .*{NAMES[1]}.*{os.strerror(code)}"):
            train(finished)
    assert names(finished) == before
    train(finished)
    assert names(finished) == before and "passed over" not in (Path(finished.out) / "log.txt").read_text()


def test_a_manifest_that_cannot_be_read_is_no_damage(finished: RunConfig, newest: Path, patch_open: Callable) -> None:
    patch_open(f"{NAMES[1]}/manifest.json")
    with pytest.raises(StorageError, match=r"reading .*manifest.json failed: Permission denied; check its permissions"):
        train(finished)
    assert newest.exists()


@pytest.fixture
def patch_open(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Files of a name that may not be read, also by root."""

    def patch(name: str) -> None:
        original = Path.open

        def opened(path: Path, *given: object, **named: object) -> object:
            if str(path).endswith(name):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return original(path, *given, **named)

        monkeypatch.setattr(Path, "open", opened)

    return patch


@pytest.mark.fault(10)
def test_a_newer_schema_is_refused_and_left_alone(finished: RunConfig, newest: Path) -> None:
    """The run would go on from an older checkpoint beside one that another version has made."""
    with_manifest(newest, schema=manifest.STATE_SCHEMA + 1)
    before = contents(newest)
    for read in (lambda: train(finished), lambda: checkpoint.find(finished.out), lambda: checkpoint.find(str(newest))):
        with pytest.raises(
            DataError, match=r"manifest.json: expected checkpoint schema 1 to 3, found 4; .* newer handgrad"
        ):
            read()
    assert contents(newest) == before and names(finished) == NAMES


@pytest.mark.fault(10)
def test_a_flipped_schema_is_damage(finished: RunConfig, newest: Path) -> None:
    """Its manifest's hash says so."""
    path = newest / "manifest.json"
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 3'))
    train(finished)
    assert (newest.parent / "damaged" / NAMES[1]).is_dir()


def test_an_incomplete_folder_is_named_and_left_alone(finished: RunConfig, newest: Path) -> None:
    """One that someone copies at this moment, say. It neither counts among those to keep nor is in a save's way."""
    (newest / "manifest.json").unlink()
    before = contents(newest)
    longer = elsewhere(finished, Path(finished.out).name, steps=16, save_every=2)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at(patch, 11)
        train(longer, allow_changes=True)
    assert names(longer) == [NAMES[0], "step_00000010", NAMES[1]] and contents(newest) == before
    assert f"passed over {NAMES[1]}" in (Path(longer.out) / "log.txt").read_text()
    train(longer, allow_changes=True)
    assert names(longer) == ["damaged", "step_00000014", "step_00000016"]
    assert contents(newest.parent / "damaged" / NAMES[1]) == before


@pytest.mark.fault(2, 9)
def test_what_is_no_checkpoint_is_named(finished: RunConfig, newest: Path) -> None:
    """Remains of an interrupted save, folders and files of others, also within a checkpoint."""
    checkpoints = newest.parent
    shutil.copytree(newest, checkpoints / "step_00000014.partial")
    (checkpoints / "notes.txt").write_text("mine")
    (newest / "more.bin").write_bytes(b"?")
    train(finished)
    log = (Path(finished.out) / "log.txt").read_text().splitlines()
    (line,) = [line for line in log if line.startswith("ignored")]
    expected = f"notes.txt, step_00000014.partial (an interrupted save), {NAMES[1]}/more.bin"
    assert line == f"ignored in {checkpoints}: {expected}"
    assert (checkpoints / "notes.txt").exists() and (newest / "more.bin").exists()


@pytest.mark.parametrize("wrong", [{"step": -1}, {"step": True}, {"step": 8}, {"config": 3}])
def test_a_manifest_of_another_folder_is_refused(newest: Path, wrong: dict) -> None:
    with_manifest(newest, **wrong)
    with pytest.raises(DataError, match=f"{NAMES[1]}"):
        checkpoint.open_checkpoint(newest)


def test_the_list_has_what_was_moved_aside(finished: RunConfig, newest: Path, capsys: pytest.CaptureFixture) -> None:
    damage(newest / "model.safetensors", "flip")
    train(finished)
    capsys.readouterr()
    assert main(["checkpoints", finished.out]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in rows] == [["step", "kind"], ["12", "last,"], ["8", rows[2][1]], ["12", "damaged"]]


def test_a_flipped_number_of_lanes_is_not_believed(finished: RunConfig, newest: Path) -> None:
    """A manifest is read only once its hash is right: the older one says how many lanes the run has."""
    path = newest / "manifest.json"
    for lanes in ("4", "-Infinity"):
        path.write_text(path.read_text().replace('"lanes": 1', f'"lanes": {lanes}'))
        assert f'"lanes": {lanes}' in path.read_text()
        train(elsewhere(finished, Path(finished.out).name, lanes=0))
        assert (newest.parent / "damaged" / NAMES[1]).exists()


@pytest.mark.parametrize("fault", ["link", "file"])
def test_pruning_ends_no_run(finished: RunConfig, newest: Path, fault: str) -> None:
    """An old checkpoint that is a link, or a file in the place where a removed one goes, is named once."""
    first = newest.parent / NAMES[0]
    if fault == "link":
        first.rename(Path(finished.out) / "kept")
        first.symlink_to(Path(finished.out) / "kept")
    else:
        first.with_name(f"{NAMES[0]}.removed").write_text("?")
    longer = elsewhere(finished, Path(finished.out).name, steps=20)
    train(longer, allow_changes=True)
    log = (Path(longer.out) / "log.txt").read_text()
    assert "step 20: saved" in log and log.count("could not remove") == 1
    assert first.exists()
    assert {"step_00000016", "step_00000020"} <= set(names(longer)) and NAMES[1] not in names(longer)
