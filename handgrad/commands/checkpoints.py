"""handgrad checkpoints: lists a run's checkpoints, verifies their hashes, prunes them."""

import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from handgrad.errors import DataError
from handgrad.format import human_age, human_bytes, table
from handgrad.run.listing import extent
from handgrad.settings.config import RunConfig, read_toml
from handgrad.storage import checkpoint
from handgrad.storage.run_files import CHECKPOINTS, CONFIG_FILE, locked, named_run

HEADINGS = ("step", "kind", "size", "loss", "age")


def run(parsed: Namespace) -> int:
    folder = Path(parsed.run)
    checkpoints = kept_checkpoints(folder)
    if parsed.verify:
        errors, checkpoints = [], [one for one in checkpoints if one.folder.parent.name == CHECKPOINTS]
        for one in checkpoints:
            error = verify(one.folder)
            errors += [error] if error else []
            print(f"{'damaged' if error else 'ok':<9} {one.folder}{f': {error}' if error else ''}", flush=True)
        if errors:
            raise DataError(f"{len(errors)} of {len(checkpoints)} checkpoints are damaged: {errors[0]}")
    if parsed.prune is not None:
        for line in prune(folder, parsed.prune):
            print(line)
    if not parsed.verify and parsed.prune is None:
        print("\n".join(listed(checkpoints)))
    return 0


@dataclass(frozen=True)
class Kept:
    """A checkpoint on disk, with unverified content."""

    folder: Path
    step: int
    kinds: tuple[str, ...]  # last, major, best; damaged, failing: moved aside
    size_bytes: int
    loss: float | None  # of the validation at this step, nats per token
    written: float  # seconds since 1970

    def row(self, now: float) -> tuple[str, ...]:
        loss = "" if self.loss is None else f"{self.loss:.4f}"
        return str(self.step), ", ".join(self.kinds), human_bytes(self.size_bytes), loss, human_age(now - self.written)


def kept_checkpoints(run: Path) -> list[Kept]:
    """The checkpoints of a run, newest first, then the ones moved aside. Raises `DataError` if there are none."""
    folders, aside = checkpoint.folders(run / CHECKPOINTS), checkpoint.unused_checkpoints(run / CHECKPOINTS)
    if not folders and not aside:
        raise DataError(f"{run} holds no checkpoint; {named_run(run)}")
    losses, best, every = checkpoint.validated(run), checkpoint.best_validated(run), keep_every(run)
    checkpoints = []
    for folder in folders:
        step = checkpoint.step_of(folder)
        signs = {
            "last": folder == folders[0],
            "major": checkpoint.is_major(step, every),
            "best": best is not None and step == best[0],
        }
        kinds = tuple(kind for kind, holds in signs.items() if holds)
        size, written = extent(folder)
        checkpoints.append(Kept(folder, step, kinds, size, losses.get(step), written))
    for folder in aside:
        size, written = extent(folder)
        checkpoints.append(Kept(folder, checkpoint.step_of(folder), (folder.parent.name,), size, None, written))
    return checkpoints


def keep_every(run: Path) -> int:
    """The run's setting `keep_every`; 0 for imported weights, which have no configuration file."""
    path = run / CONFIG_FILE
    return read_toml(str(path)).get("keep_every", RunConfig.keep_every) if path.is_file() else 0


def listed(checkpoints: Sequence[Kept]) -> list[str]:
    now = time.time()
    return table([HEADINGS, *(one.row(now) for one in checkpoints)])


def verify(folder: Path) -> str:
    """Reads a checkpoint and compares every file with its hash; returns the first error, "" if there is none."""
    try:
        checkpoint.open_checkpoint(folder)
    except DataError as error:
        return str(error)
    return ""


def prune(run: Path, keep: int) -> list[str]:
    """Removes all checkpoints but the `keep` newest valid ones, the best one and the major ones, and moves newer,
    damaged ones aside, as training does. Returns a line for each. Raises `ConfigError` while a trainer holds the run,
    and `DataError`, before it removes any, if no checkpoint is valid."""
    with locked(run, "; prune when it has ended"):
        newest, lines = checkpoint.newest(run / CHECKPOINTS, moves=True)
        if newest is None:
            raise DataError(f"{run} holds no valid checkpoint{f' ({lines[0]})' if lines else ''}; nothing was removed")
        best = checkpoint.best_validated(run)
        chosen = newest.step, keep, best and best[0], keep_every(run), lines.append
        return lines + [f"deleted   {folder}" for folder in checkpoint.prune(run / CHECKPOINTS, *chosen)]
