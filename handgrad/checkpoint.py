"""Checkpoints: complete and verified, or they do not exist.

    checkpoints/step_00001000.partial/   written, hashed on the way, fsynced
        model.safetensors                the weights (float32; bf16 without masters), by the names of the parameter table
        optimizer.safetensors            the state of the optimizer; of AdamW both moments: m.NAME, v.NAME
        tokenizer.json                   if the tokenizer needs a file
        manifest.json                    sizes, SHA-256, config, position in the data, detector windows
    checkpoints/step_00001000/           the same, renamed: only now it is a checkpoint

Tensors have names and no padding, so the layout in memory may change without them.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from handgrad.errors import DataError, storage_error, storage_errors
from handgrad.files import file_sha256, sync_folder
from handgrad.manifest import check_fields
from handgrad.parsing import parse_json
from handgrad.run_files import BEST, CHECKPOINTS, METRICS_FILE

SCHEMA = 1
PARTIAL = ".partial"
REMOVED = ".removed"
MANIFEST = "manifest.json"
WEIGHTS_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
SAFETENSORS_DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16"}
MAX_MANIFEST_BYTES = 64 << 20


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint on disk."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return self.manifest["step"]

    def load(self, file: str, receivers: Mapping[str, tuple[tuple[int, ...], Callable[[Tensor], object]]]) -> None:
        """Passes each of the file's tensors to its receiver, by name with the expected shape; raises `DataError` if names
        or shapes differ."""
        path = self.folder / file
        with _opened(path) as stored:
            names = set(stored.keys())
            if names != set(receivers):
                differing = sorted(names ^ set(receivers))
                raise DataError(
                    f"{path} holds other tensors than this model: {len(differing)} differ, the first is"
                    f" {differing[0]!r}; it belongs to another model"
                )
            for name, (shape, receive) in receivers.items():
                receive(_tensor(stored, path, name, shape))

    def tensor(self, file: str, name: str, shape: tuple[int, ...]) -> Tensor:
        """One of the file's tensors; raises `DataError` if it is missing or of another shape."""
        with _opened(self.folder / file) as stored:
            return _tensor(stored, self.folder / file, name, shape)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file, open; raises `DataError` for what it does not hold."""
    try:
        with safetensors.safe_open(path, framework="pt") as stored:
            yield stored
    except (safetensors.SafetensorError, OSError) as error:
        raise DataError(f"{path} cannot be read as safetensors: {error}") from None


def _tensor(stored: Any, path: Path, name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = stored.get_tensor(name)
    if tensor.shape != shape:
        raise DataError(f"{path}: expected {name} of shape {tuple(shape)}, found {tuple(tensor.shape)}")
    return tensor


@dataclass
class Stored:
    """A tensor of a checkpoint to write: its entry in the header, and a function that fetches it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    get: Callable[[], Tensor]
    fetched: bool = False

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "Stored":
        return cls(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def fetch(self) -> Tensor:
        self.fetched = True
        return self.get()


def folder_of(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step_{step:08d}"


def save(
    checkpoints: Path,
    step: int,
    state: Iterable[Stored],
    manifest: dict[str, Any],
    extra_files: dict[str, bytes],
) -> Path:
    """Writes a folder like `checkpoints/step_00001000` and returns it; on a `StorageError` no folder of that name remains.

    `state` are the weights, then the optimizer's tensors, named STATE.WEIGHT, fetched in this order; `manifest` is the rest
    of the state (JSON).
    """
    final = folder_of(checkpoints, step)
    partial = final.with_name(final.name + PARTIAL)
    tensors = list(state)
    names = {tensor.name for tensor in tensors}
    moments = [tensor for tensor in tensors if tensor.name.partition(".")[2] in names]
    weights = [tensor for tensor in tensors if tensor.name.partition(".")[2] not in names]
    try:
        _remove(partial)
        partial.mkdir(parents=True)
        files = {
            WEIGHTS_FILE: write_file(partial / WEIGHTS_FILE, safetensors_bytes(weights)),
            OPTIMIZER_FILE: write_file(partial / OPTIMIZER_FILE, safetensors_bytes(moments)),
        }
        for name, content in extra_files.items():
            files[name] = write_file(partial / name, [content])
        content = {"schema": SCHEMA, "step": step, "files": files, **manifest}
        write_file(partial / MANIFEST, [json.dumps({"sha256": _content_sha256(content), **content}, indent=1).encode()])
        sync_folder(partial)
        _remove(final)  # a damaged folder of the same step, passed over when the run was resumed
        partial.rename(final)
        sync_folder(checkpoints)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise storage_error(error, f"saving {final}") from None
    return final


def safetensors_bytes(tensors: list[Stored], metadata: dict[str, str] | None = None) -> Iterator[bytes | memoryview]:
    """The safetensors layout: header length, JSON header (with `metadata`, if any), raw tensors one after another.

    The library's writer needs all tensors as bytes in memory and cannot hash while it writes; the format is 10 lines.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.size_bytes
        dtype = SAFETENSORS_DTYPES[tensor.dtype]
        header[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors:
        yield tensor.fetch().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Writes and fsyncs a file; returns its size and SHA-256."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _remove(folder: Path) -> None:
    """Removes a folder; a kill in between cannot leave half of it under its name."""
    if folder.exists():
        aside = folder.with_name(folder.name + REMOVED)
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        shutil.rmtree(aside)


def prune(checkpoints: Path, newest_step: int, keep: int, best_step: int | None = None, keep_every: int = 0) -> list[Path]:
    """Keeps the `keep` newest checkpoints up to `newest_step` (0: all), that of `best_step`, and those of multiples of
    `keep_every` (0: none). Removes the others, remains of interrupted saves, and later folders: those are damaged, or the
    run would not be at `newest_step`. Returns the removed folders."""
    with storage_errors(f"removing old checkpoints in {checkpoints}"):
        leftovers = [*checkpoints.glob(f"step_*{PARTIAL}"), *checkpoints.glob(f"step_*{REMOVED}")]
        for leftover in leftovers:
            shutil.rmtree(leftover)
        found = folders(checkpoints)
        later = [folder for folder in found if step_of(folder) > newest_step]
        earlier = found[len(later) :][keep:] if keep else []
        removed = later + [f for f in earlier if step_of(f) != best_step and not is_major(step_of(f), keep_every)]
        for folder in removed:
            _remove(folder)
    return leftovers + removed


def is_major(step: int, keep_every: int) -> bool:
    """True for the checkpoint of a step that is never pruned."""
    return bool(keep_every) and step % keep_every == 0


def folders(checkpoints: Path) -> list[Path]:
    """The folders named like checkpoints, newest first."""
    found = [p for p in checkpoints.glob("step_*") if p.is_dir() and p.name.removeprefix("step_").isdigit()]
    return sorted(found, key=lambda folder: -step_of(folder))


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def open_checkpoint(folder: Path) -> Checkpoint:
    """Opens the checkpoint in `folder` and verifies every file's size and hash; a `DataError` names the file."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise DataError(f"{path} is larger than any manifest; this is no checkpoint")
        manifest = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{folder} has no {MANIFEST}: it is not a complete checkpoint") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        found = manifest.get("schema") if isinstance(manifest, dict) else type(manifest).__name__
        raise DataError(f"{path}: expected checkpoint schema {SCHEMA}, found {found!r}")
    digest = manifest.pop("sha256", None)
    if digest != _content_sha256(manifest):
        raise DataError(f"{path}: its SHA-256 differs from its content's; it was edited or damaged")
    check_fields(manifest, path)
    files = manifest["files"]
    if not {WEIGHTS_FILE, OPTIMIZER_FILE} <= files.keys():
        raise DataError(f"{path} lacks a file in its list; it was edited or damaged")
    for name, entry in files.items():
        _verify(folder / Path(name).name, entry)
    return Checkpoint(folder, manifest)


def _content_sha256(content: dict[str, Any]) -> str:
    """SHA-256 of a manifest's content, independent of its layout in the file."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _verify(path: Path, entry: Any) -> None:
    if not isinstance(entry, dict):
        raise DataError(f"{path}: its entry in the manifest is not readable")
    try:
        size = path.stat().st_size
        if size != entry.get("bytes"):
            raise DataError(f"{path}: expected {entry.get('bytes')} bytes, found {size}")
        found = file_sha256(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    if found != entry.get("sha256"):
        raise DataError(f"{path}: its SHA-256 differs from the manifest's; the file is damaged")


def newest(checkpoints: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest valid checkpoint (or None), and one line for each newer one that it skips."""
    passed_over = []
    for folder in folders(checkpoints):
        try:
            return open_checkpoint(folder), passed_over
        except DataError as error:
            passed_over.append(f"passed over {folder.name}: {error}")
    return None, passed_over


def find(path: str) -> Checkpoint:
    """The checkpoint at a user's `path`: a checkpoint's folder, a run folder (its newest valid one), or RUN/best."""
    folder = Path(path)
    if (folder / MANIFEST).exists() and (folder / WEIGHTS_FILE).exists():
        return open_checkpoint(folder)
    if means_best(folder):
        return best(folder.parent)
    checkpoint, passed_over = newest(folder / CHECKPOINTS)
    if checkpoint is None:
        reason = f" ({passed_over[0]})" if passed_over else ""
        raise DataError(f"{path} holds no checkpoint{reason}; give a run folder or RUN/checkpoints/step_00001000")
    return checkpoint


def means_best(path: Path) -> bool:
    return path.name == BEST and not path.exists() and (path.parent / CHECKPOINTS).is_dir()


def best(run: Path) -> Checkpoint:
    """The run's checkpoint with the lowest validation loss; `DataError` if there is none or if it is damaged: the user did
    not ask for another one."""
    found = best_validated(run)
    if found is None:
        raise DataError(
            f"{run} holds no checkpoint of a validated step; give {run} for its newest, and train with --keep-best"
        )
    return open_checkpoint(folder_of(run / CHECKPOINTS, found[0]))


def best_validated(run: Path) -> tuple[int, float] | None:
    """(step, loss) of the lowest validation loss among the steps that have a checkpoint, the first if several are equal."""
    finite = [(loss, step) for step, loss in validated(run).items() if math.isfinite(loss)]
    if not finite:
        return None
    loss, step = min(finite)
    return step, loss


def validated(run: Path) -> dict[int, float]:
    """The validation losses of the steps that have a checkpoint. Reads the run's record, so that no second file has to
    agree with it."""
    path, found = run / METRICS_FILE, dict[int, float]()
    saved = {step_of(folder) for folder in folders(run / CHECKPOINTS)}
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if '"validation"' not in line:
                    continue
                with contextlib.suppress(ValueError, TypeError, RecursionError):  # a line cut by a kill
                    record = json.loads(line)
                    if isinstance(record, dict) and record.get("kind") == "validation" and record.get("step") in saved:
                        found[record["step"]] = float(record.get("loss", math.nan))
    except FileNotFoundError:
        pass
    except OSError as error:
        raise storage_error(error, f"reading {path}") from None
    return found


def peek_config(path: Path) -> dict[str, Any] | None:
    """The configuration in the manifest of `peek`, or None."""
    found = peek(path)
    return None if found is None else found[1]["config"]


def peek(path: Path) -> tuple[Path, dict[str, Any]] | None:
    """(folder, manifest) of the newest checkpoint with a readable manifest in a checkpoint's or a run's folder, or None.
    Does not verify the checkpoint."""
    manifests = (path / MANIFEST, *sorted((path / CHECKPOINTS).glob(f"step_*/{MANIFEST}"), reverse=True))
    for manifest in manifests:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            content = json.loads(manifest.read_text(encoding="utf-8"))
            if isinstance(content, dict) and isinstance(content.get("config"), dict):
                return manifest.parent, content
    return None
