"""The results of an evaluation on disk: lines of the run's metrics.jsonl, of kind "evaluation", and the file of --out."""

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from handgrad.errors import storage_errors
from handgrad.evaluation.scoring import TaskResult
from handgrad.evaluation.tasks import TaskData
from handgrad.files import write_durably
from handgrad.storage.checkpoint import Checkpoint
from handgrad.storage.run_files import LOCK_FILE, METRICS_FILE

IN_TRAINING, AFTERWARDS = "train", "evaluate"  # the maker of a record


def task_record(task: TaskData, result: TaskResult, precision: str, by: str) -> dict[str, Any]:
    """A line's content except `kind` and `step`; a metric is (value, standard error)."""
    return {
        "task": result.name,
        "examples": result.examples,
        "metrics": {f.metric: [f.value, f.stderr] for f in result.figures},
        "sources": task.sources,
        "precision": precision,
        "by": by,
    }


def append_to_run(checkpoint: Checkpoint, records: Sequence[dict[str, Any]]) -> str:
    """Appends the records to the metrics of the run around a checkpoint. Returns a line about it, "" without such a run.
    Writes nothing while a trainer holds the run: its lines and ours could mix.

    Raises `StorageError` if the disk refuses; the file is then unchanged or has whole lines more.
    """
    run = checkpoint.folder.resolve().parent.parent
    path, lock = run / METRICS_FILE, run / LOCK_FILE
    if not path.is_file() or not lock.is_file():
        return ""
    lines = [json.dumps({"kind": "evaluation", "step": checkpoint.step, **record}) for record in records]
    with storage_errors(f"writing {path}"), lock.open("a") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return f"not recorded: a trainer is at work in {run}; evaluate again when it has ended, or keep --out"
        with path.open("r+b") as file:
            # A line that a kill cut in half would spoil ours; a resumed run drops it as well.
            whole = file.read().rfind(b"\n") + 1
            file.truncate(whole)
            file.seek(whole)
            file.write("".join(line + "\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())
    return f"recorded in {path}"


def write_rows(path: Path, results: Sequence[TaskResult]) -> None:
    """Writes one JSON object per example. Raises `StorageError`."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for result in results for row in result.rows]
    with storage_errors(f"writing {path}"):
        write_durably(path, "".join(lines))
