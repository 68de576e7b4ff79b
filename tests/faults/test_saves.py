"""Saves of which an fsync or a rename fails; checkpoints with a flipped bit, or with a pickle in the place of tensors."""

import dataclasses
import errno
import io
import json
import os
import pickle
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from handgrad.errors import DataError, StorageError
from handgrad.files import file_sha256
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from handgrad.storage import checkpoint, manifest
from tests.distributed.runs import saved_steps
from tests.test_checkpoints import stored
from tests.test_runs import elsewhere, same_bits

SYNCS = 6  # of a save: three files, their folder, the rename, the parent


def failing(patch: pytest.MonkeyPatch, step: int, number: int) -> list[str]:
    """The fsync or rename `number` of the save of a step fails; returns the list that they enter."""
    seen: list[str] = []
    sync, rename = os.fsync, Path.rename

    def see(path: Path) -> None:
        if f"step_{step:08d}" in str(path) or seen:
            seen.append(path.name)
            if len(seen) == number + 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    def fsync(descriptor: int) -> None:
        see(Path(f"/proc/self/fd/{descriptor}").readlink())
        sync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        see(Path(target))
        return rename(path, target)

    patch.setattr(os, "fsync", fsync)
    patch.setattr(Path, "rename", renamed)
    return seen


@pytest.fixture
def short(config: RunConfig) -> RunConfig:
    return dataclasses.replace(config, steps=3, save_every=1, eval_every=0, sample_tokens=0)


@pytest.mark.fault(5)
def test_a_failing_fsync_or_rename(short: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in turn. A failure before the rename leaves no checkpoint, one after it a whole one. The run waits for its
    saves, so that their operations are the only ones."""
    short = dataclasses.replace(short, async_save=False)
    whole = elsewhere(short, "whole")
    train(whole)
    for number in range(SYNCS):
        run = elsewhere(short, f"failing{number}")
        with monkeypatch.context() as patch:
            seen = failing(patch, 2, number)
            stands = "; step_00000002 is whole, but a loss of power" if number == SYNCS - 1 else ""
            with pytest.raises(StorageError, match=f"Input/output error{stands}") as raised:
                train(run)
        assert raised.value.exit_code == 74 and len(seen) >= number + 1
        steps = saved_steps(Path(run.out))
        assert steps == ([1] if number < SYNCS - 1 else [1, 2])
        for step in steps:
            checkpoint.open_checkpoint(checkpoint.folder_of(Path(run.out) / "checkpoints", step))
        train(run)
        same_bits(whole.out, run.out, 3)


@pytest.mark.fault(6, 7, 10, 26)
@pytest.mark.soak(60, 200)
def test_a_bit_anywhere(short: RunConfig, seeds: Sequence[int]) -> None:
    """In any file of a checkpoint: found, and the file named, or the manifest says the same in another way."""
    train(short)
    folder = checkpoint.folder_of(Path(short.out) / "checkpoints", 3)
    before, paths = checkpoint.open_checkpoint(folder).manifest, sorted(folder.iterdir())
    found = 0
    for seed in seeds:
        dice = random.Random(seed)
        path = dice.choice(paths)
        place, bit = dice.randrange(path.stat().st_size), dice.randrange(8)
        flip(path, place, bit)
        try:
            assert checkpoint.open_checkpoint(folder).manifest == before and path.name == manifest.MANIFEST
        except DataError as error:
            assert path.name in str(error) and folder.name in str(error)
            found += 1
        flip(path, place, bit)
    assert checkpoint.open_checkpoint(folder).manifest == before and found > 0.9 * len(seeds)


def flip(path: Path, place: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Callable, tuple]:
        return Path.touch, (self.path,)


@pytest.mark.fault(11)
@pytest.mark.parametrize("write", [lambda value, path: path.write_bytes(pickle.dumps(value)), torch.save])
def test_a_pickle_never_runs(write: Callable, tmp_path: Path) -> None:
    """Not even where the manifest has its size and hash."""
    folder = checkpoint.save(tmp_path, 1, stored({"a": torch.ones(4)}), {"config": {}}, {})
    path, ran = folder / checkpoint.WEIGHTS_FILE, tmp_path / "ran"
    write(Payload(ran), path)
    content = json.loads((folder / manifest.MANIFEST).read_text())
    content["files"][path.name] |= {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    del content["sha256"]
    (folder / manifest.MANIFEST).write_text(json.dumps({"sha256": manifest.content_sha256(content), **content}))
    found = checkpoint.open_checkpoint(folder)
    with pytest.raises(DataError, match="cannot be read as safetensors"):
        found.load(path.name, {"a": ((4,), pytest.fail)})
    assert not ran.exists()
    content = io.BytesIO(path.read_bytes())
    torch.load(content, weights_only=False) if write is torch.save else pickle.load(content)
    assert ran.exists(), "the payload is armed"
