"""Cuts the records of an earlier launch down to its checkpoint: drops later lines, sets damaged ones aside."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from handgrad.errors import DataError
from handgrad.files import write_bytes_durably
from handgrad.jsonl import parse

DAMAGED = ".damaged"
MAIN_LOG_LINE = re.compile(rb"s:(\d{1,18}) (tel|eval|trl):.*")


class Line(NamedTuple):
    """A readable line."""

    step: int  # the completed steps after which it was written
    is_step: bool  # a step's own: these stand in the order of steps
    record: dict[str, Any]  # of a file of JSON


def metrics_line(line: bytes) -> Line | None:
    """A line of metrics.jsonl or audit.jsonl; None if it is damaged."""
    try:
        record = parse(line, "").fields
    except DataError:
        return None
    step, kind = record.get("step", 0), record.get("kind")
    if type(step) is not int or not isinstance(kind, str):
        return None
    return Line(step, kind == "step", record)


def main_log_line(line: bytes) -> Line | None:
    """A line of main.log, where a step's own is numbered from 0; None if it is damaged."""
    match = MAIN_LOG_LINE.fullmatch(line)
    if match is None or not line.isascii():
        return None
    is_step = match[2] == b"trl"
    return Line(int(match[1]) + is_step, is_step, {})


def set_aside(path: Path, content: bytes) -> Path:
    """Adds lines of a file to FILE.damaged beside it, whose path it returns. Raises OSError."""
    aside = path.with_name(path.name + DAMAGED)
    write_bytes_durably(aside, (aside.read_bytes() if aside.exists() else b"") + content)
    return aside


def keep_lines(path: Path, completed: int, read: Callable[[bytes], Line | None]) -> tuple[list[Line], str]:
    """Cuts a file down to the lines of the first `completed` steps; returns them, and a message about damaged ones or "".

    Damaged lines go to a file beside it, FILE.damaged. A last line without its end was cut by a kill, and its step is done
    again. Raises OSError.
    """
    if not path.exists():
        return [], ""
    content = path.read_bytes()
    lines = content.split(b"\n")
    found = [read(line) for line in lines]
    stays = [line is not None and line.step <= completed for line in found]
    in_order = [index for index, line in enumerate(found) if line is not None and line.is_step and stays[index]]
    # A line before the last step's own that names a later step is damaged as well. The last element has no line's end.
    damaged = [i for i in range(len(lines) - 1) if found[i] is None or (not stays[i] and i < max(in_order, default=0))]
    message = ""
    if damaged:
        aside = set_aside(path, b"".join(lines[index] + b"\n" for index in damaged))
        numbers = ", ".join(str(index + 1) for index in damaged[:8]) + (", ..." if len(damaged) > 8 else "")
        which = "a damaged line" if len(damaged) == 1 else f"{len(damaged)} damaged lines"
        message = f"{path}: set aside {which}, {numbers}, in {aside}; the run continues without them"
    kept = b"".join(line + b"\n" for line, stay in zip(lines, stays, strict=True) if stay)
    if kept != content:
        write_bytes_durably(path, kept)
    return [line for line, stay in zip(found, stays, strict=True) if line is not None and stay], message
