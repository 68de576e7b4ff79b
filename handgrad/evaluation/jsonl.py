"""Prompts from a .jsonl file, and what was written to them into another, in the same order."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from handgrad.errors import DataError, UsageError, storage_error
from handgrad.files import sync_folder

ADDED = ("text", "stopped", "tokens")  # the keys of an output line that the input must not have
PARTIAL = ".partial"


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file, each with a "prompt" and, if it wants, its "max_tokens"; blank lines are none.

    Raises `DataError` that names the line, `StorageError` if the file does not read.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise storage_error(error, f"reading {path}") from None
    prompts = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            problem = ""
            try:
                row = json.loads(line.decode())
            except (ValueError, RecursionError):  # not JSON, not UTF-8, nested beyond measure
                row, problem = {}, 'expected a JSON object like {"prompt": "Once"}, found something else'
            if problem := problem or what_is_wrong(row):
                raise DataError(f"line {number} of {path}: {problem}; nothing was written")
            prompts.append(row)
    if not prompts:
        raise DataError(f'{path}: expected lines like {{"prompt": "Once"}}, found none')
    return prompts


def what_is_wrong(row: Any) -> str:
    """In words; empty if nothing is."""
    if not isinstance(row, dict):
        return f'expected a JSON object like {{"prompt": "Once"}}, found a {type(row).__name__}'
    if not isinstance(row.get("prompt"), str):
        return f'"prompt" must be text, found {json.dumps(row.get("prompt")):.40}'
    most = row.get("max_tokens", 1)
    if type(most) is not int or most < 1:
        return f'"max_tokens" must be a whole number of 1 or more, found {json.dumps(most):.40}'
    taken = [key for key in ADDED if key in row]
    return f'"{taken[0]}" is a key of the output; give it another name' if taken else ""


@contextlib.contextmanager
def whole_lines(path: Path) -> Iterator[Callable[[int, dict[str, Any]], None]]:
    """Something to call with the number of a line (0-based, in any order) and its object: writes `path`, in order of the
    numbers, under a partial name that becomes `path` when the block ends well and goes when it does not.

    Raises `UsageError` if `path` is there, `StorageError` if the disk refuses.
    """
    check_free(path)
    partial = path.with_name(path.name + PARTIAL)
    early: dict[int, dict[str, Any]] = {}  # lines that came before one that stands above them
    written = 0
    try:
        with partial.open("w", encoding="utf-8") as file:

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
        check_free(path)
        partial.rename(path)
        sync_folder(path.absolute().parent)
    except OSError as error:
        raise storage_error(error, f"writing {path}") from None
    finally:
        partial.unlink(missing_ok=True)


def check_free(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise UsageError(f"expected nothing at {path}, found something; give another name or remove it")
