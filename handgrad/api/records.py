"""What a run wrote down, record by record, also while it goes on."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from handgrad.errors import DataError, storage_error
from handgrad.run_files import METRICS_FILE

POLL_SECONDS = 0.2


def metrics(run: str | os.PathLike[str], kind: str = "", *, follow: bool = False) -> Iterator[dict[str, Any]]:
    """The records of a run's metrics.jsonl in their order, or those of one `kind`: run, step, validation, sample, event,
    ... (docs/training.md has their keys). With `follow` it waits for more until the run is finished; one that was stopped
    is waited for, too.

    A resumed run does the steps after its checkpoint again, and who follows gets them again. Raises `DataError`: there is
    no such file, or a line is no record.
    """
    path = Path(run) / METRICS_FILE
    if not path.is_file() and not follow:
        raise DataError(
            f"expected a run with {METRICS_FILE} at {run}, found none; give the folder of `handgrad train --out`"
        )
    return (record for record in read_records(path, follow=follow) if kind in ("", record["kind"]))


def read_records(path: Path, *, follow: bool) -> Iterator[dict[str, Any]]:
    seen: list[int] = []  # the hashes of the lines that were handed out
    last: dict[str, Any] = {}
    inode, offset = -1, 0
    while True:
        with opened(path, follow=follow) as file:
            place = len(seen)
            if os.fstat(file.fileno()).st_ino != inode:  # a resumed run has replaced the file: what is new in it?
                inode, offset, place = os.fstat(file.fileno()).st_ino, 0, 0
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # cut by a kill, or not all there yet
                offset += len(line)
                if place == len(seen) or seen[place] != hash(line):
                    del seen[place:]
                    seen.append(hash(line))
                    last = parsed(line, path)
                    yield last
                place += 1
            del seen[place:]
        if not follow or last.get("kind") == "end":
            return
        time.sleep(POLL_SECONDS)


def opened(path: Path, *, follow: bool) -> BinaryIO:
    """The file, waited for if it is to be followed."""
    while True:
        try:
            return path.open("rb")
        except FileNotFoundError:
            if not follow:
                raise DataError(f"{path} was there a moment ago and is not any more") from None
            time.sleep(POLL_SECONDS)
        except OSError as error:
            raise storage_error(error, f"reading {path}") from None


def parsed(line: bytes, path: Path) -> dict[str, Any]:
    try:
        record = json.loads(line)
        if isinstance(record, dict) and isinstance(record.get("kind"), str):
            return record
    except (ValueError, RecursionError):
        pass
    raise DataError(f"{path}: expected a record with its kind, found {line[:60]!r}; take that line out or restore the file")
