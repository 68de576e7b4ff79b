"""A run's records, one by one, also while it runs."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from handgrad.errors import DataError, storage_error
from handgrad.names import check_choice
from handgrad.parsing import parse_record
from handgrad.storage.run_files import METRICS_FILE

POLL_SECONDS = 0.2
KINDS = (
    *("run", "step", "gpu", "fp8", "ranks", "rollouts", "validation", "evaluation", "sample", "save", "event"),
    *("result", "stop", "end"),
)


def metrics(run: str | os.PathLike[str], kind: str = "", *, follow: bool = False) -> Iterator[dict[str, Any]]:
    """Yields the records of a run's metrics.jsonl in order, or only one `kind`: run, step, validation, sample, event,
    ... (docs/report.md lists all kinds and their keys). With `follow`, waits for more until the run is finished, even
    while it is stopped.

    A resumed run repeats the steps after its checkpoint, so a follower gets them again. Raises `UsageError` for an
    unknown kind, `DataError` if the file does not exist or a line is not a record."""
    if kind:
        check_choice("kind", kind, KINDS)
    path = Path(run) / METRICS_FILE
    if not path.is_file() and not follow:
        raise DataError(f"expected a run with {METRICS_FILE} at {run}, found none; give the folder of `train --out`")
    return (record for record in read_records(path, follow=follow) if kind in ("", record["kind"]))


def read_records(path: Path, *, follow: bool) -> Iterator[dict[str, Any]]:
    seen: list[int] = []  # the hashes of the lines yielded so far
    last: dict[str, Any] = {}
    inode, offset = -1, 0
    while True:
        with opened(path, follow=follow) as file:
            index = len(seen)
            if os.fstat(file.fileno()).st_ino != inode:  # a resumed run has replaced the file: find the new lines
                inode, offset, index = os.fstat(file.fileno()).st_ino, 0, 0
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # truncated by a kill, or still being written
                offset += len(line)
                if index == len(seen) or seen[index] != hash(line):
                    del seen[index:]
                    seen.append(hash(line))
                    record = parse_record(line, f"line {index + 1} of {path}")
                    record.text("kind")
                    last = last if record.fields["kind"] == "evaluation" else record.fields  # one may follow the end
                    yield record.fields
                index += 1
            del seen[index:]
        if not follow or last.get("kind") == "end":
            return
        time.sleep(POLL_SECONDS)


def opened(path: Path, *, follow: bool) -> BinaryIO:
    """Opens the file; with `follow` waits until it exists."""
    while True:
        try:
            return path.open("rb")
        except FileNotFoundError:
            if not follow:
                raise DataError(f"{path} disappeared while it was read") from None
            time.sleep(POLL_SECONDS)
        except OSError as error:
            raise storage_error(error, f"reading {path}") from None
