"""Reads prompts from a .jsonl file and writes their texts to another, in the same order. Survives interruptions."""

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from handgrad.errors import ConfigError, DataError, storage_error, storage_errors
from handgrad.files import check_free, write_durably
from handgrad.parsing import numbered_lines, parse_record

ADDED = ("text", "stopped", "tokens")  # keys that an output line adds to its prompt's


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file, each with a "prompt" and optionally "max_tokens". Skips blank lines. Raises
    `DataError` naming the bad line, `StorageError` if the file cannot be read."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise storage_error(error, f"reading {path}") from None
    prompts = []
    for line, where in numbered_lines(content, path):
        row = parse_record(line, where)
        row.text("prompt", encodable=False)
        if "max_tokens" in row.fields and row.count("max_tokens") < 1:
            raise row.wrong("max_tokens", "a whole number of 1 or more", row.fields["max_tokens"])
        if taken := [key for key in ADDED if key in row.fields]:
            raise DataError(f"{taken[0]!r} in {where} is a key of the output; give it another name")
        prompts.append(row.fields)
    if not prompts:
        raise DataError(f'{path}: expected lines like {{"prompt": "Once"}}, found none')
    return prompts


Written = dict[int, dict[str, Any]]  # line number, from 0 -> object


@contextlib.contextmanager
def whole_lines(path: Path, identity: dict[str, Any]) -> Iterator[tuple[Written, Callable[[int, dict[str, Any]], None]]]:
    """Yields the lines that an interrupted call has left, and a function that writes a line: it takes the line's number, in
    any order, and its object. If the block succeeds, `path` receives all lines, sorted by number.

    Until then PATH.partial holds them in order of arrival, after a line with the `identity` of prompts, model and settings.
    If the block fails, PATH.partial stays unless it has no lines. Raises `UsageError` if `path` exists, `ConfigError` if
    the lines have another identity or another process writes them, `DataError` if they are damaged, `StorageError` if the
    disk refuses."""
    check_free(path)
    partial, doing = path.with_name(path.name + ".partial"), f"writing {path}"
    with storage_errors(doing):
        file = partial.open("a+", encoding="utf-8", buffering=1)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process writes {path}; wait for it or give another --out") from None
        with storage_errors(doing):
            rows = read_partial(partial, identity)
            if not partial.stat().st_size:
                file.write(json.dumps({"identity": identity}) + "\n")

        def write(number: int, row: dict[str, Any]) -> None:
            with storage_errors(doing):
                file.write(json.dumps({"number": number, "row": row}) + "\n")
            rows[number] = row

        try:
            yield dict(rows), write
            assert sorted(rows) == list(range(len(rows)))
            check_free(path)
            with storage_errors(doing):
                write_durably(path, "".join(json.dumps(rows[number]) + "\n" for number in sorted(rows)))
            rows.clear()
        finally:
            if not rows:
                partial.unlink(missing_ok=True)


def read_partial(partial: Path, identity: dict[str, Any]) -> Written:
    """The lines of an interrupted call, without one that a kill cut. Raises OSError and the errors of `whole_lines`."""
    content = partial.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        os.truncate(partial, len(whole))
    lines = [parse_record(line, where) for line, where in numbered_lines(whole, partial)]
    if not lines:
        return {}
    before = lines[0].inner("identity").fields
    for name in {**identity, **before}:
        if before.get(name) != identity.get(name):
            then, now = (repr(values.get(name))[:80] for values in (before, identity))
            raise ConfigError(
                f"{partial} has texts of other {name} ({then}, now {now}); go on with the same command, give another --out,"
                " or remove the file to start over"
            )
    return {line.count("number"): line.inner("row").fields for line in lines[1:]}
