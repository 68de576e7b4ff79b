"""A checkpoint's manifest: its writer, its step, the size and hash of every file. A reader first checks its own hash."""

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from handgrad import __version__
from handgrad.errors import DataError, storage_error, storage_errors
from handgrad.files import file_sha256
from handgrad.parsing import parse_json
from handgrad.storage.run_files import AUDIT_FILE
from handgrad.storage.tensor_files import first_damaged

SCHEMA = 1
PARTS_SCHEMA = 2  # weights or optimizer state in several files, unknown to a version that reads only 1
STATE_SCHEMA = 3  # some state is smaller than its parameter; schemas 1 and 2 pad it with zeros to the parameter's size
MANIFEST = "manifest.json"
WEIGHTS_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
MAX_MANIFEST_BYTES = 64 << 20


def part_of(file: str, number: int, parts: int) -> str:
    """The name of part `number`, counted from 1, if `WEIGHTS_FILE` or `OPTIMIZER_FILE` is written in `parts` parts."""
    stem, _, suffix = file.partition(".")
    return file if parts == 1 else f"{stem}-{number:05}-of-{parts:05}.{suffix}"


def parts_of(file: str, files: Iterable[str]) -> list[str]:
    """The names in `files` that make up `WEIGHTS_FILE` or `OPTIMIZER_FILE`: itself or all its parts, in order."""
    files = set(files)
    if file in files:
        return [file]
    stem, _, suffix = file.partition(".")
    parts = sorted(name for name in files if re.fullmatch(rf"{stem}-\d{{5}}-of-\d{{5}}\.{suffix}", name))
    return parts if parts == [part_of(file, number, len(parts)) for number in range(1, len(parts) + 1)] else []


def has_tensors(files: Any) -> bool:
    return is_object(files) and all(parts_of(file, files) for file in (WEIGHTS_FILE, OPTIMIZER_FILE))


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def is_object(value: Any) -> bool:
    return isinstance(value, dict)


def are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) in (int, float) and math.isfinite(one) for one in value)


# Field -> (condition, the condition in words).
Conditions = dict[str, tuple[Callable[[Any], bool], str]]
FIELDS: Conditions = {
    "step": (is_count, "a whole number"),
    "config": (is_object, "an object"),
    "files": (has_tensors, "both files"),
}
RUN_FIELDS: Conditions = {  # a run needs them to resume; weights alone have none
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
    """Another version of handgrad wrote the checkpoint. No older one replaces it, which may be many steps back."""


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads a checkpoint's manifest and verifies its hash; reads no tensors. Raises the errors of `open_checkpoint`."""
    path = folder / MANIFEST
    try:
        with path.open("rb") as file:
            content = file.read(MAX_MANIFEST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{folder} has no {MANIFEST}: it is not a complete checkpoint") from None
    except OSError as error:
        raise storage_error(error, f"reading {path}") from None
    try:
        manifest = parse_json(content, unique=True) if len(content) <= MAX_MANIFEST_BYTES else None
    except ValueError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error}") from None
    if not isinstance(manifest, dict):
        raise DamagedCheckpoint(f"{path}: expected a JSON object; it was edited or damaged")
    intact, schema = manifest.pop("sha256", None) == content_sha256(manifest), manifest.get("schema")
    if schema not in (SCHEMA, PARTS_SCHEMA, STATE_SCHEMA):
        expected = f"{path}: expected checkpoint schema {SCHEMA} to {STATE_SCHEMA}, found {schema!r}"
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
    """Raises `DataError` unless the manifest has its fields, and if it has any that a run resumes with, all of these."""
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


def contradiction(lines: Iterable[Any], manifest: dict[str, Any], digest: str, *, sealed: bool = False) -> str:
    """The first fact of a checkpoint that differs from its run's chain, or "". `digest`: SHA-256 of the manifest's file;
    `sealed`: the chain must have a line with this hash, except in format 1, where anyone could remove that line."""
    lines, step = [line for line in lines if is_object(line) and is_count(line.get("step"))], manifest["step"]
    begins, seals = ([line for line in lines if line.get("kind") == kind] for kind in ("begin", "checkpoint"))
    if not begins or step < begins[0]["step"]:
        return ""  # saved before the chain began
    begin = next((line for line in reversed(begins) if line["step"] < step), None)
    if begin and (fault := difference(begin, manifest)):  # else the run was resumed from it, perhaps with other settings
        return fault
    saved = [str(line.get("manifest")) for line in seals if line["step"] == step]
    if other := [seal for seal in saved if seal != digest]:
        return f"it is not the checkpoint that was saved at step {step}: the chain has {other[0]:.12}, found {digest:.12}"
    if sealed and not saved and (begin or begins[0]).get("format") != 1:
        return "the chain has no line for it: one was removed, or a kill came before it (resume the run, which adds it)"
    return ""


def difference(begin: dict[str, Any], manifest: dict[str, Any]) -> str:
    """The first difference between a chain's `begin` and a manifest, in facts that a run's checkpoints share, or ""."""
    names, local = ("config", "versions", "identity", "init", "chat", "files"), ("path",)
    if begin.get("format") == 1:
        names, local = names[:4], ("path", "context")
    tensors = {file for kind in (WEIGHTS_FILE, OPTIMIZER_FILE) for file in parts_of(kind, manifest["files"])}
    settings = begin["config"] if is_object(begin.get("config")) else {}
    saved = manifest | {
        "config": {name: manifest["config"].get(name) for name in settings},
        "init": manifest.get("init") or manifest.get("imported"),
        "files": {name: flat(manifest["files"]).get(f"{name}.sha256") for name in manifest["files"] if name not in tensors},
    }
    then, now = (flat({name: source.get(name) for name in names}) for source in (begin, saved))
    for name in local:
        now.pop(f"init.{name}", None)
    then["tokenizer.sha256"], now["tokenizer.sha256"] = then.get("identity.tokenizer"), flat(saved).get("tokenizer.sha256")
    for name in (*then, *now):
        if then.get(name) != now.get(name):
            return f"its manifest has {name} {now.get(name)!r:.80}, the chain {then.get(name)!r:.80}"
    return ""


def flat(facts: dict[str, Any]) -> dict[str, Any]:
    flattened = dict[str, Any]()
    for name, value in facts.items():
        flattened |= {f"{name}.{key}": inner for key, inner in value.items()} if is_object(value) else {name: value}
    return flattened


def check_against_chain(folder: Path, manifest: dict[str, Any]) -> None:
    """Raises `DataError` for a checkpoint that contradicts the chain in its run folder. Unlike `verify`, skips the links of
    steps, and accepts a checkpoint without a line: its run may be about to write it."""
    path = folder.absolute().parent.parent / AUDIT_FILE
    if not path.is_file():
        return
    with storage_errors(f"reading {path}"):
        texts, digest = path.read_bytes().split(b"\n"), file_sha256(folder / MANIFEST)
    lines = list[Any]()
    for text in (*(text for text in texts[:-2] if not text.startswith(b'{"kind": "step"')), *texts[-2:]):
        with contextlib.suppress(ValueError):  # cut by a kill
            lines.append(parse_json(text))
    last = max((step for line in lines if is_object(line) and is_count(step := line.get("step"))), default=0)
    if manifest["step"] <= last and (fault := contradiction(lines, manifest, digest)):  # later ones are not in the chain
        raise DataError(f"{folder}: {fault}; restore it, or move {path} away to use it without its chain")


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
            tensor = first_damaged(path, entry.get("ends", []))  # older versions wrote no ends
            raise DamagedCheckpoint(f"{path}: {error}{f', first in {tensor}' if tensor else ''}")
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} cannot be read: it is missing") from None
    except OSError as failed:
        raise storage_error(failed, f"reading {path}") from None


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_").partition(".")[0])


def is_named_by_step(folder: Path) -> bool:
    return bool(re.fullmatch(r"step_[0-9]{1,18}", folder.name))
