"""The manifest of a checkpoint: who wrote it, of which step, and every file's size and hash. Nothing is believed before its
hash is right."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from handgrad import __version__
from handgrad.errors import DataError, storage_error
from handgrad.files import file_sha256
from handgrad.tensor_files import first_damaged

SCHEMA = 1
MANIFEST = "manifest.json"
WEIGHTS_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
MAX_MANIFEST_BYTES = 64 << 20


class DamagedCheckpoint(DataError):
    """A size or a hash says that a checkpoint is not as it was written."""


class OtherSchema(DataError):
    """Another version of handgrad wrote the checkpoint. It is not passed over: an older one may lie far back."""


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
        manifest = json.loads(content) if len(content) <= MAX_MANIFEST_BYTES else None
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error}") from None
    if not isinstance(manifest, dict):
        raise DamagedCheckpoint(f"{path}: expected a JSON object; it was edited or damaged")
    intact, schema = manifest.pop("sha256", None) == content_sha256(manifest), manifest.get("schema")
    if schema != SCHEMA:
        expected = f"{path}: expected checkpoint schema {SCHEMA}, found {schema!r}"
        if not intact:
            raise DamagedCheckpoint(f"{expected}, and its SHA-256 differs from its content's; it was edited or damaged")
        writer = f"handgrad {manifest.get('handgrad')} wrote it, probably a newer handgrad than this one, {__version__}"
        raise OtherSchema(f"{expected}; {writer}: use that version, or move {folder} away to go on without")
    if not intact:
        raise DamagedCheckpoint(f"{path}: its SHA-256 differs from its content's; it was edited or damaged")
    step, files = manifest.get("step"), manifest.get("files")
    if type(step) is not int or step < 0 or not isinstance(manifest.get("config"), dict):
        raise DataError(f"{path} lacks its step or config; it was edited")
    if not isinstance(files, dict) or not {WEIGHTS_FILE, OPTIMIZER_FILE} <= files.keys():
        raise DataError(f"{path} lacks its file list; it was edited")
    if is_named_by_step(folder) and step != step_of(folder):
        raise DataError(f"{folder} holds a checkpoint of step {step}; give the folder its name back")
    return manifest


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
