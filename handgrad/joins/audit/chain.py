"""The audit chain of a run, audit.jsonl: one line of JSON per link.

    begin        configuration, versions and data from here on, and the state; at the start, and if a resume changes them
    step         a step's samples, loss, norm, learning rate and verdict, and the digests of the state after it
    checkpoint   the SHA-256 of a checkpoint's manifest, which lists its files' hashes, and the link of its state

A `begin` or `step` is a link: `link` is the SHA-256 of its content, `previous` the `link` before it. The disk decides when
a checkpoint line appears, so these lines form a second chain: `previous` is the `seal` before it. Format 1 had no
second chain, and its `begin` had no `chat`, no `files` and no hash of the sources.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from handgrad.errors import DataError, storage_error
from handgrad.parsing import Record, numbered_lines, parse_record

BEGIN, STEP, CHECKPOINT = "begin", "step", "checkpoint"
LINKS = (BEGIN, STEP)
NUMBERS = ("loss", "norm", "learning_rate")  # of a step, as hexadecimal text, which is exact
FORMAT = 2
FORMATS = (1, FORMAT)  # readable formats
FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {  # kind -> fields: (texts, objects, others)
    BEGIN: (("link", "previous"), ("config", "versions", "identity", "state"), ("format", "init", "chat", "files")),
    STEP: (("link", "previous", *NUMBERS), ("state",), ("samples", "skipped", "rollouts")),
    CHECKPOINT: (("link", "manifest"), (), ("previous", "seal")),
}

Line = dict[str, Any]


def canonical(content: Line) -> bytes:
    """The bytes to hash for a content: sorted keys, no spaces, ASCII."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def sha256(content: Line) -> str:
    return hashlib.sha256(canonical(content)).hexdigest()


def linked(content: Line, previous: str, name: str = "link") -> Line:
    """Makes the line after hash `previous`, "" for the first. `name`: field for its own hash, "seal" for a checkpoint."""
    content = {**content, "previous": previous}
    return {**content, name: sha256(content)}


def content_of(line: Line) -> Line:
    """The content of a link that a replay must reproduce."""
    return {key: value for key, value in line.items() if key not in ("previous", "link")}


def links(lines: Iterable[Line]) -> list[Line]:
    return [line for line in lines if line.get("kind") in LINKS]


def read_chain(path: Path) -> list[Line]:
    """Reads the lines of a chain. Raises `DataError` for a line that does not belong in one, and `StorageError`."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise DataError(
                f"expected a run folder or a certificate, found nothing at {path.parent}; check the name"
            ) from None
        raise DataError(
            f"{path} does not exist: the run was not audited; train with --audit-every 1 to have a chain"
        ) from None
    except OSError as error:
        raise storage_error(error, f"reading {path}") from None
    lines = []
    for text, where in numbered_lines(content, path):
        try:
            line = parse_record(text, where, unique=True)
        except DataError:
            if content.endswith(text):  # no newline: a kill truncated it, or a run is writing it now
                break
            raise
        lines.append(checked_line(line))
    return lines


def checked_line(record: Record) -> Line:
    """Returns the line if it has the fields of its kind, else raises `DataError`."""
    kind = record.text("kind")
    record.count("step")
    if kind not in FIELDS:
        raise DataError(f"expected begin, step or checkpoint as kind, found {kind!r:.40} in {record.where}")
    texts, objects, others = FIELDS[kind]
    if further := sorted(record.fields.keys() - {"kind", "step", *texts, *objects, *others}):
        raise DataError(f"expected no field {further[0]!r:.40} in a {kind}, found one in {record.where}; it was edited")
    for name in texts:
        text = record.text(name)
        if name in NUMBERS:
            try:
                float.fromhex(text)
            except (ValueError, OverflowError):
                raise record.wrong(name, "a number in hexadecimal", text) from None
    for name in objects:
        record.inner(name)
    if kind == BEGIN:
        for name in ("data", "tokenizer"):
            record.inner("identity").text(name)
        if (format := record.count("format")) not in FORMATS:
            raise DataError(f"expected format 1 or {FORMAT}, found {format} in {record.where}; a newer handgrad reads it")
        if format == FORMAT:
            record.inner("files")
        if "init" in record.fields:
            record.inner("init").inner("sha256")
    return record.fields


def check_chain(lines: Iterable[Line], path: Path) -> None:
    """Raises `DataError` for the first link that was edited or does not follow its predecessor."""
    for fault in faults(lines):
        raise DataError(f"{path}: {fault}")


def numbers_text(fields: Iterable[str], one: Line, other: Line, between: str) -> str:
    """The numeric fields among the differing `fields` of two links: "loss 5.4, replayed 5.3"."""
    pairs = [(name, float.fromhex(one[name]), float.fromhex(other[name])) for name in NUMBERS if name in fields]
    return "; ".join(f"{name} {a:.9g}{between}{b:.9g}" for name, a, b in pairs)


def faults(lines: Iterable[Line], *, whole: bool = True) -> Iterator[str]:
    """Yields a line about each edited, removed or added link. Unless the chain is `whole`, links need not be consecutive.
    A chain may begin late, after one that was lost."""
    last: Line | None = None
    known, seal, format = set[Any](), "", 1
    for number, line in enumerate(lines, start=1):
        where = f"line {number}, {line.get('kind')} {line.get('step')},"
        own = "link" if line.get("kind") in LINKS else "seal"
        digest = sha256({key: value for key, value in line.items() if key != own})
        if own == "seal":
            if whole and line.get("link") not in known:
                yield f"{where} belongs to link {str(line.get('link'))[:12]}, which is not in the chain before it"
            if format == FORMAT and line.get("seal") != digest:
                yield f"{where} was edited: its SHA-256 is {digest[:12]}, its seal says {str(line.get('seal'))[:12]}"
            elif format == FORMAT and line.get("previous") != seal:
                yield f"{where} does not follow the line of a checkpoint before it: one was removed, added or replaced"
            seal = line.get("seal", "")
            continue
        format = line.get("format", format)
        known |= {line.get("link")} if known else {line.get("previous"), line.get("link")}
        if line.get("link") != digest:
            yield f"{where} was edited: its SHA-256 is {digest[:12]}, its link says {str(line.get('link'))[:12]}"
        elif whole and last is None and line["kind"] != BEGIN:
            yield f"{where} has no begin before it: lines were removed"
        elif whole and last is not None and line.get("previous") != last["link"]:
            yield (
                f"{where} does not follow {last['kind']} {last['step']}: a line between them was removed, or one was added"
                f" or replaced (previous is {str(line.get('previous'))[:12]}, expected {last['link'][:12]})"
            )
        elif last is not None and line["step"] < last["step"] + (line["kind"] == STEP):
            yield f"{where} goes back behind {last['kind']} {last['step']}"
        last = line


def differing(one: Line, other: Line) -> list[str]:
    """The fields in which two links differ, one level deep: ["loss", "state.weights"]."""
    one, other, differing_keys = content_of(one), content_of(other), []
    for key in sorted({*one, *other}):
        a, b = one.get(key), other.get(key)
        if a != b and isinstance(a, dict) and isinstance(b, dict):
            differing_keys += [f"{key}.{name}" for name in sorted({*a, *b}) if a.get(name) != b.get(name)]
        elif a != b:
            differing_keys.append(key)
    return differing_keys


CAUSES = {  # field of a step -> cause of a difference, in the order of computation
    "samples": "the samples of the step are others",
    "rollouts.tokens": "the model's answers before the step are others",
    "rollouts.rewards": "equal answers were given other rewards",
    "learning_rate": "the learning rate is another",
    "loss": "the forward pass gave another loss from an equal state: a sample or the arithmetic is another",
    "norm": "the gradients of equal samples are others",
    "skipped": "the verdict on equal gradients is another",
}


def meaning(fields: Iterable[str], step: int, equal: int) -> str:
    """The likely cause of a first difference in these fields. `equal`: the last earlier step with equal state."""
    fields = set(fields)
    if equal < step - 1:  # nothing is known about the steps in between
        return f"one of the steps {equal + 1} to {step} is another"
    if (first := next((name for name in CAUSES if name in fields), None)) is not None:
        return CAUSES[first]
    states = sorted(field.partition(".")[2] for field in fields if field.startswith("state."))
    if "m" in states:  # m's update reads only the gradients; equal norms may hide different gradients
        return f"gradients of an equal norm, or their update, left other bits in {', '.join(states)}"
    if states:
        return f"the update of equal gradients left other bits in {', '.join(states)}"
    return "the links' fields are others"
