"""The manifest of a checkpoint: its writer, its step, the size and hash of every file. A reader checks its hash first."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from handgrad import __version__
from handgrad.errors import DataError, storage_error
from handgrad.files import file_sha256
from handgrad.parsing import parse_json
from handgrad.tensor_files import first_damaged

SCHEMA = 1
PARTS_SCHEMA = 2  # weights or optimizer state in several files, of which a version that reads only 1 does not know
MANIFEST = "manifest.json"
WEIGHTS_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
MAX_MANIFEST_BYTES = 64 << 20


def part_of(file: str, number: int, parts: int) -> str:
    """The name of one of the `parts`, counted from 1, that `WEIGHTS_FILE` or `OPTIMIZER_FILE` is written as."""
    stem, _, suffix = file.partition(".")
    return file if parts == 1 else f"{stem}-{number:05}-of-{parts:05}.{suffix}"


def parts_of(file: str, files: Iterable[str]) -> list[str]:
    """The names among `files` that together are `WEIGHTS_FILE` or `OPTIMIZER_FILE`: itself, or its parts in order; none
    unless all are there."""
    files = set(files)
    if file in files:
        return [file]
    stem, _, suffix = file.partition(".")
    found = sorted(name for name in files if re.fullmatch(rf"{stem}-\d{{5}}-of-\d{{5}}\.{suffix}", name))
    whole = [part_of(file, number, len(found)) for number in range(1, len(found) + 1)]
    return found if found == whole else []


def has_tensors(files: Any) -> bool:
    return is_object(files) and all(parts_of(file, files) for file in (WEIGHTS_FILE, OPTIMIZER_FILE))


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def is_object(value: Any) -> bool:
    return isinstance(value, dict)


def are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) in (int, float) and math.isfinite(one) for one in value)


# A condition on a field, and its words.
Conditions = dict[str, tuple[Callable[[Any], bool], str]]
FIELDS: Conditions = {
    "step": (is_count, "a whole number"),
    "config": (is_object, "an object"),
    "files": (has_tensors, "both files"),
}
RUN_FIELDS: Conditions = {  # with which a run resumes; weights alone have none of them
    "loss_window": (are_numbers, "a list of numbers"),
    "norm_window": (are_numbers, "a list of numbers"),
    "skips_in_a_row": (is_count, "a whole number"),
}
BESIDE: Conditions = {
    "versions": (is_object, "an object"),
    "loss_scale": (lambda value: are_numbers(value) and len(value) == 2, "two numbers"),  # of fp16
}


class DamagedCheckpoint(DataError):
    """The size or the hash of a checkpoint's file differs from the manifest's."""


class OtherSchema(DataError):
    """Another version of handgrad wrote the checkpoint. No older one takes its place: it may lie far back."""


def read_manifest(folder: Path) -> dict[str, Any]:
    """A checkpoint's manifest, once its hash is right; reads no tensors. Raises the errors of `open_checkpoint`."""
    path = folder / MANIFEST
    try:
        with path.open("rb") as file:
            content = file.read(MAX_MANIFEST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{folder} has no {MANIFEST}: it is not a complete checkpoint") from None
    except OSError as error:
        raise storage_error(error, f"reading {path}") from None
    try:
        manifest = parse_json(content) if len(content) <= MAX_MANIFEST_BYTES else None
    except ValueError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error}") from None
    if not isinstance(manifest, dict):
        raise DamagedCheckpoint(f"{path}: expected a JSON object; it was edited or damaged")
    intact, schema = manifest.pop("sha256", None) == content_sha256(manifest), manifest.get("schema")
    if schema not in (SCHEMA, PARTS_SCHEMA):
        expected = f"{path}: expected checkpoint schema {SCHEMA} or {PARTS_SCHEMA}, found {schema!r}"
        if not intact:
            raise DamagedCheckpoint(f"{expected}, and its SHA-256 differs from its content's; it was edited or damaged")
        writer = f"handgrad {manifest.get('handgrad')} wrote it, probably a newer handgrad than this one, {__version__}"
        raise OtherSchema(f"{expected}; {writer}: use that version, or move {folder} away to continue without it")
    if not intact:
        raise DamagedCheckpoint(f"{path}: its SHA-256 differs from its content's; it was edited or damaged")
    check_fields(manifest, path)
    step = manifest["step"]
    if is_named_by_step(folder) and step != step_of(folder):
        raise DataError(f"{folder} holds a checkpoint of step {step}; give the folder its name back")
    return manifest


def check_fields(manifest: dict[str, Any], path: Path) -> None:
    """Raises `DataError` unless the manifest at `path` has its fields; if it has any of those that a run resumes with, it
    needs them all."""
    check(manifest, FIELDS, path)
    if manifest.keys() & RUN_FIELDS:
        needed = manifest["config"].get("precision") == "fp16"
        beside = {key: condition for key, condition in BESIDE.items() if key in manifest or key == "versions" or needed}
        check(manifest, RUN_FIELDS | beside, path)


def check(manifest: dict[str, Any], conditions: Conditions, path: Path) -> None:
    for name, (holds, wanted) in conditions.items():
        value = manifest.get(name)
        if not holds(value):
            raise DataError(f"{path}: expected {wanted} as {name}, found {value!r:.80}; it was edited or damaged")


def content_sha256(content: dict[str, Any]) -> str:
    """SHA-256 of a manifest's content, independent of its layout in the file."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def verify_file(path: Path, entry: Any) -> None:
    if not isinstance(entry, dict):
        raise DataError(f"{path}: its entry in the manifest is not readable")
    try:
        size, error = path.stat().st_size, ""
        if size != entry.get("bytes"):
            error = f"expected {entry.get('bytes')} bytes, found {size}"
        elif file_sha256(path) != entry.get("sha256"):
            error = "its SHA-256 differs from the manifest's; the file is damaged"
        if error:
            tensor = first_damaged(path, entry.get("ends", []))  # of an older version: none
            raise DamagedCheckpoint(f"{path}: {error}{f', first in {tensor}' if tensor else ''}")
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} cannot be read: it is missing") from None
    except OSError as failed:
        raise storage_error(failed, f"reading {path}") from None


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_").partition(".")[0])


def is_named_by_step(folder: Path) -> bool:
    return bool(re.fullmatch(r"step_[0-9]{1,18}", folder.name))
