"""Prompts from a .jsonl file, and the texts written to them into another, in the same order."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from handgrad.errors import DataError, storage_error
from handgrad.files import whole
from handgrad.jsonl import numbered_lines, parse

ADDED = ("text", "stopped", "tokens")  # the keys that an output line adds


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file, each with a "prompt" and optionally its "max_tokens"; skips blank lines.

    Raises `DataError` with the line, `StorageError` if the file is unreadable.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise storage_error(error, f"reading {path}") from None
    prompts = []
    for line, where in numbered_lines(content, path):
        row = parse(line, where)
        row.text("prompt", encodable=False)
        if "max_tokens" in row.fields and row.count("max_tokens") < 1:
            raise row.wrong("max_tokens", "a whole number of 1 or more", row.fields["max_tokens"])
        if taken := [key for key in ADDED if key in row.fields]:
            raise DataError(f"{taken[0]!r} in {where} is a key of the output; give it another name")
        prompts.append(row.fields)
    if not prompts:
        raise DataError(f'{path}: expected lines like {{"prompt": "Once"}}, found none')
    return prompts


@contextlib.contextmanager
def whole_lines(path: Path) -> Iterator[Callable[[int, dict[str, Any]], None]]:
    """Yields a function that takes a line's number (0-based, in any order) and its object. Writes the lines by number to
    `path`, which appears when the block ends well.

    Raises `UsageError` if `path` exists, `StorageError` if the disk refuses.
    """
    early: dict[int, dict[str, Any]] = {}  # lines that wait for one above them
    written = 0
    with whole(path) as partial, partial.open("w", encoding="utf-8") as file:

        def write(number: int, row: dict[str, Any]) -> None:
            nonlocal written
            early[number] = row
            while written in early:
                file.write(json.dumps(early.pop(written)) + "\n")
                written += 1

        yield write
        assert not early
        file.flush()
        os.fsync(file.fileno())
