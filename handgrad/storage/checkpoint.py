"""Checkpoints: complete and verified, or they do not exist.

    checkpoints/step_00001000.partial/   written, hashed on the way, fsynced
        model.safetensors                the weights (float32; bf16 without masters), by the names of the parameter table
        optimizer.safetensors            the state of the optimizer; for AdamW both moments: m.NAME, v.NAME
                                         (with several writers: model-00001-of-00004.safetensors, ...)
        tokenizer.json                   if the tokenizer needs a file
        manifest.json                    sizes, SHA-256, config, position in the data, detector windows
    checkpoints/step_00001000/           the same, renamed: only now it is a checkpoint
    checkpoints/damaged/step_00001000/   its hashes show damage: moved aside, never deleted
    checkpoints/failing/step_00001000/   runs resumed from it failed twice at the same step

Tensors have names and no padding, so the layout in memory may change while the files stay valid.
"""

import contextlib
import functools
import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from handgrad.errors import DataError, StorageError, print_message, storage_error, storage_errors
from handgrad.files import sync_folder, sync_name
from handgrad.storage import tensor_files
from handgrad.storage.manifest import (
    MANIFEST,
    OPTIMIZER_FILE,
    PARTS_SCHEMA,
    SCHEMA,
    STATE_SCHEMA,
    WEIGHTS_FILE,
    DamagedCheckpoint,
    OtherSchema,
    check_against_chain,
    content_sha256,
    is_named_by_step,
    part_of,
    parts_of,
    read_manifest,
    step_of,
    verify_file,
)
from handgrad.storage.run_files import BEST, CHECKPOINTS, METRICS_FILE, named_run
from handgrad.storage.tensor_files import Row, Stored, open_tensors, read_tensor, safetensors_bytes, split, write_file

PARTIAL = ".partial"
REMOVED = ".removed"
DAMAGED, FAILING = "damaged", "failing"  # folders of checkpoints that no run resumes from


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint on disk."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return self.manifest["step"]

    def parts(self, file: str) -> list[Path]:
        """The paths of the files that make up `WEIGHTS_FILE` or `OPTIMIZER_FILE`."""
        return [self.folder / name for name in parts_of(file, self.manifest["files"])]

    @functools.cached_property
    def file_of_tensor(self) -> dict[str, Path]:
        """Name of a tensor -> the file that holds it."""
        files = dict[str, Path]()
        for path in (*self.parts(WEIGHTS_FILE), *self.parts(OPTIMIZER_FILE)):
            with open_tensors(path) as stored:
                files |= dict.fromkeys(stored.keys(), path)
        return files

    def load(self, file: str, receivers: Mapping[str, tuple[tuple[int, ...], Callable[[Tensor], object]]]) -> None:
        """Passes each of the file's tensors to its receiver, by name and shape; raises `DataError` if these differ."""
        paths = self.parts(file)
        names = {name for name, path in self.file_of_tensor.items() if path in paths}
        if names != set(receivers):
            differing = sorted(names ^ set(receivers))
            raise DataError(
                f"{paths[0]} holds other tensors than this model: {len(differing)} differ, the first is"
                f" {differing[0]!r}; it belongs to another model"
            )
        with contextlib.ExitStack() as files:
            stored = {path: files.enter_context(open_tensors(path)) for path in paths}
            for name, (shape, receive) in receivers.items():
                path = self.file_of_tensor[name]
                receive(read_tensor(stored[path], path, name, shape, padded=self.is_padded(file)))

    def tensor(self, file: str, name: str, shape: tuple[int, ...]) -> Tensor:
        """One of the file's tensors; raises `DataError` if it is missing or of another shape."""
        path = self.file_of_tensor.get(name) or self.parts(file)[0]
        with open_tensors(path) as stored:
            return read_tensor(stored, path, name, shape, padded=self.is_padded(file))

    def is_padded(self, file: str) -> bool:
        """True if every tensor of the file is padded to its parameter's size, as in older schemas."""
        return file == OPTIMIZER_FILE and self.manifest["schema"] < STATE_SCHEMA


def folder_of(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step_{step:08d}"


def save(
    checkpoints: Path, step: int, state: Iterable[Stored], manifest: dict[str, Any], extra_files: dict[str, bytes]
) -> Path:
    """Writes a folder like `checkpoints/step_00001000` and returns it; on a `StorageError` no folder of that name remains.

    `state`: the weights, then the optimizer's tensors, named STATE.WEIGHT; fetches them in this order. `manifest`: the rest
    of the state (JSON)."""
    final = folder_of(checkpoints, step)
    try:
        with storage_errors(f"saving {final}"):
            begin_partial(final)
            return commit(final, step, write_tensors(final, split_among_writers(list(state), 1)[0]), manifest, extra_files)
    except StorageError:
        discard_partial(final)
        raise


def split_among_writers(state: Sequence[Row], writers: int) -> list[dict[str, list[Row]]]:
    """File -> its tensors, for each writer: cuts weights and optimizer state into parts of about equal size, one each."""
    names = {tensor.name for tensor in state}
    moments = [tensor for tensor in state if tensor.name.partition(".")[2] in names]
    weights = [tensor for tensor in state if tensor.name.partition(".")[2] not in names]
    by_writer: list[dict[str, list[Row]]] = [{} for _ in range(writers)]
    for file, tensors in ((WEIGHTS_FILE, weights), (OPTIMIZER_FILE, moments)):
        parts = split(tensors, writers)
        for number, part in enumerate(parts, start=1):
            by_writer[number - 1][part_of(file, number, len(parts))] = part
    return by_writer


def partial_folder(final: Path) -> Path:
    return final.with_name(final.name + PARTIAL)


def discard_partial(final: Path) -> None:
    """Removes the remains of a checkpoint that could not be written."""
    shutil.rmtree(partial_folder(final), ignore_errors=True)


def begin_partial(final: Path) -> None:
    """Makes the empty folder that a checkpoint is written into. Raises OSError."""
    if (partial := partial_folder(final)).exists():
        _remove(partial)
    partial.mkdir(parents=True)


def write_tensors(final: Path, files: dict[str, list[Stored]]) -> dict[str, Any]:
    """Writes one writer's files of a checkpoint that has begun; returns their entries in the manifest. Raises OSError."""
    written = {name: write_file(partial_folder(final) / name, safetensors_bytes(files[name])) for name in files}
    return {name: tensor_files.with_names(written[name], tensors) for name, tensors in files.items()}


def commit(final: Path, step: int, files: dict[str, Any], manifest: dict[str, Any], extra_files: dict[str, bytes]) -> Path:
    """Completes a checkpoint of all writers' `files`: writes the manifest last, then renames the folder. Raises OSError."""
    partial = partial_folder(final)
    for name, entry in files.items():
        if (size_bytes := (partial / name).stat().st_size) != entry["bytes"]:  # another machine may have written it
            raise OSError(f"expected {entry['bytes']} bytes in {name}, found {size_bytes}")
    for name, content in extra_files.items():
        written = write_file(partial / name, [content])
        files[name] = {"bytes": written["bytes"], "sha256": written["sha256"]}
    schema = SCHEMA if {WEIGHTS_FILE, OPTIMIZER_FILE} <= files.keys() else PARTS_SCHEMA
    content = {"schema": schema, "step": step, "files": files, **manifest}  # may replace the schema
    write_file(partial / MANIFEST, [json.dumps({"sha256": content_sha256(content), **content}, indent=1).encode()])
    sync_folder(partial)
    if final.exists():  # the run skipped it when it resumed
        move_aside(final)
    partial.rename(final)
    sync_name(final)
    return final


def _remove(folder: Path) -> None:
    """Removes a folder. Renames it first, so a kill cannot leave half of it under its name."""
    if folder.is_symlink():
        raise OSError("it is a symbolic link")
    aside = folder.with_name(folder.name + REMOVED)
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    shutil.rmtree(aside)


def move_aside(folder: Path, kind: str = DAMAGED) -> Path:
    """Moves a checkpoint into its sibling folder `kind`; returns its new path."""
    aside, name, number = folder.parent / kind, folder.name, 0
    aside.mkdir(exist_ok=True)
    while (moved := aside / (name if number == 0 else f"{name}.{number}")).exists():
        number += 1
    folder.rename(moved)
    sync_folder(aside)
    return moved


def prune(
    checkpoints: Path,
    newest_step: int,
    keep: int,
    best_step: int | None = None,
    keep_every: int = 0,
    warn: Callable[[str], object] = lambda line: None,
) -> list[Path]:
    """Keeps the `keep` newest checkpoints up to `newest_step` (0: all), the best step's, and every multiple of
    `keep_every` (0: none). Removes the others and the remains of interrupted saves; returns their folders.

    Neither counts nor removes folders without a valid manifest. Passes `warn` a line for each folder that it cannot remove:
    an old checkpoint must not stop a run."""
    leftovers = [path for sign in (PARTIAL, REMOVED) for path in checkpoints.glob(f"step_*{sign}") if path.is_dir()]
    removed = [leftover for leftover in leftovers if _is_removed(leftover, shutil.rmtree, warn)]
    complete = [folder for folder in folders(checkpoints) if step_of(folder) <= newest_step and _is_complete(folder)]
    for folder in complete[keep:] if keep else []:
        if step_of(folder) != best_step and not is_major(step_of(folder), keep_every):
            removed += [folder] if _is_removed(folder, _remove, warn) else []
    return removed


def _is_removed(folder: Path, remove: Callable[[Path], object], warn: Callable[[str], object]) -> bool:
    try:
        remove(folder)
    except OSError as error:
        warn(f"could not remove {folder}: {error.strerror or error}; remove it by hand")
        return False
    return True


def _is_complete(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except (DataError, StorageError):
        return False
    return True


def is_major(step: int, keep_every: int) -> bool:
    """True for a step whose checkpoint is never pruned."""
    return bool(keep_every) and step % keep_every == 0


def folders(checkpoints: Path) -> list[Path]:
    """The folders named like checkpoints, newest first."""
    named = [path for path in checkpoints.glob("step_*") if path.is_dir() and is_named_by_step(path)]
    return sorted(named, key=lambda folder: -step_of(folder))


def unused_checkpoints(checkpoints: Path) -> list[Path]:
    """The checkpoints in `damaged` and `failing`, which no run resumes from."""
    paths = (path for kind in (DAMAGED, FAILING) for path in sorted((checkpoints / kind).glob("step_*")))
    return [path for path in paths if path.is_dir()]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Opens the checkpoint in `folder` and verifies every file's size and hash. Raises `DamagedCheckpoint`, which names
    the file and the tensor; another `DataError` if it is incomplete, of another version, or contradicts its run's
    chain; `StorageError` if it cannot be read, which is not damage."""
    manifest = read_manifest(folder)
    for name, entry in manifest["files"].items():
        verify_file(folder / Path(name).name, entry)
    check_against_chain(folder, manifest)
    return Checkpoint(folder, manifest)


def newest(checkpoints: Path, *, moves: bool = False, before: int | None = None) -> tuple[Checkpoint | None, list[str]]:
    """(the newest valid checkpoint or None, a line for each newer one that it skips). `before`: considers only steps
    before this one; `moves`: moves the damaged ones aside, if a valid one is left. Raises `OtherSchema` and
    `StorageError`: a checkpoint that cannot be read now may be the newest."""
    passed_over, damaged = [], list[Path]()
    for folder in folders(checkpoints):
        if before is not None and step_of(folder) >= before:
            continue
        try:
            intact = open_checkpoint(folder)
        except OtherSchema:
            raise
        except DataError as error:
            passed_over.append(f"passed over {folder.name}: {error}")
            damaged += [folder] if isinstance(error, DamagedCheckpoint) else []
            continue
        with storage_errors(f"moving damaged checkpoints to {checkpoints / DAMAGED}"):
            passed_over += [f"moved {one.name} to {move_aside(one)}" for one in damaged if moves]
        return intact, passed_over
    return None, passed_over


def unknown_names(saved: Checkpoint) -> list[str]:
    """The names of files and folders, in a checkpoint's folder and next to it, that belong to no checkpoint."""
    steps = folders(saved.folder.parent)
    beside = [path for path in saved.folder.parent.iterdir() if path.name not in (DAMAGED, FAILING) and path not in steps]
    names = [f"{path.name}{' (an interrupted save)' if path.name.endswith(PARTIAL) else ''}" for path in sorted(beside)]
    known = {MANIFEST, *saved.manifest["files"]}
    return names + [f"{saved.folder.name}/{path.name}" for path in sorted(saved.folder.iterdir()) if path.name not in known]


def find(path: str, *, strict: bool = False) -> Checkpoint:
    """The checkpoint at a user's `path`: a checkpoint's folder, a run folder (its newest valid one), or RUN/best.

    Prints a line if it skips a newer, invalid one; `strict`: raises `DataError` instead."""
    folder = Path(path)
    if (folder / MANIFEST).exists() and parts_of(WEIGHTS_FILE, (file.name for file in folder.iterdir())):
        return open_checkpoint(folder)
    if is_best_alias(folder):
        return best(folder.parent)
    checkpoint, passed_over = newest(folder / CHECKPOINTS)
    if checkpoint is None:
        useless = f" that can be used ({passed_over[0]}); restore one, or train the run again" if passed_over else ""
        raise DataError(f"{path} holds no checkpoint{useless or f'; {named_run(folder)}'}")
    if passed_over and strict:
        raise DataError(strict_message(checkpoint, passed_over))
    if passed_over:
        more = f" (and {len(passed_over) - 1} more)" if len(passed_over) > 1 else ""
        print_message(f"{passed_over[0]}{more}; takes {checkpoint.folder.name} instead", ends=False)
    return checkpoint


def strict_message(saved: Checkpoint, passed_over: list[str]) -> str:
    """The message about a checkpoint that is not the newest."""
    return f"{passed_over[0]}; leave --strict out to take {saved.folder.name} instead"


def is_best_alias(path: Path) -> bool:
    return path.name == BEST and not path.exists() and (path.parent / CHECKPOINTS).is_dir()


def best(run: Path) -> Checkpoint:
    """The run's checkpoint of the lowest validation loss. `DataError`: none, or damaged, as the user asked for this one."""
    if (lowest := best_validated(run)) is None:
        raise DataError(f"{run} holds no checkpoint of a validated step; give {run} for its newest; train with --keep-best")
    return open_checkpoint(folder_of(run / CHECKPOINTS, lowest[0]))


def best_validated(run: Path) -> tuple[int, float] | None:
    """(step, loss) of the lowest validation loss among the steps that have a checkpoint, the first if several are equal."""
    if not (finite := [(loss, step) for step, loss in validated(run).items() if math.isfinite(loss)]):
        return None
    loss, step = min(finite)
    return step, loss


def validated(run: Path) -> dict[int, float]:
    """The validation losses of the steps that have a checkpoint, from the run's metrics, their only record."""
    path, losses = run / METRICS_FILE, dict[int, float]()
    saved = {step_of(folder) for folder in folders(run / CHECKPOINTS)}
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if '"validation"' not in line:
                    continue
                with contextlib.suppress(ValueError, TypeError, RecursionError):  # a line cut by a kill
                    record = json.loads(line)
                    if isinstance(record, dict) and record.get("kind") == "validation" and record.get("step") in saved:
                        losses[record["step"]] = float(record.get("loss", math.nan))
    except FileNotFoundError:
        pass
    except OSError as error:
        raise storage_error(error, f"reading {path}") from None
    return losses


def peek_config(path: Path) -> dict[str, Any] | None:
    """The configuration in the manifest of `peek`, or None."""
    peeked = peek(path)
    return None if peeked is None else peeked[1]["config"]


def peek(path: Path) -> tuple[Path, dict[str, Any]] | None:
    """(folder, manifest) of the newest checkpoint with a valid manifest in a checkpoint's or a run's folder, or None. Does
    not verify the tensors. Raises `StorageError`."""
    for folder in (path, *folders(path / CHECKPOINTS)):
        with contextlib.suppress(DataError):
            return folder, read_manifest(folder)
    return None
