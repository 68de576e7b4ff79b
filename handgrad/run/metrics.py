"""The run's record: metrics.jsonl for programs, main.log in llm.c's format for its plotting tools, log.txt for people.

In the first two, lines of steps that a resumed run will do again are cut off, so they read like those of an unbroken run.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from handgrad.errors import storage_error
from handgrad.evaluation.loss import perplexity
from handgrad.evaluation.records import IN_TRAINING
from handgrad.files import write_durably
from handgrad.run_files import LOG_FILE, MAIN_LOG_FILE, METRICS_FILE
from handgrad.training.step import StepResult


class Metrics:
    """Appends to the three files of one run folder; raises `StorageError` when the disk does not take it."""

    def __init__(self, folder: Path, resumed_step: int):
        """Keeps what the files say of the first `resumed_step` steps and drops the rest."""
        self.folder = folder
        try:
            kept = _keep_lines(folder / METRICS_FILE, lambda line: _json_step(line) <= resumed_step)
            # (kind, step) of what the files already say: a resumed run does only what is missing.
            self.recorded = {(_kind_of(record), record.get("step")) for record in map(json.loads, kept)}
            _keep_lines(folder / MAIN_LOG_FILE, lambda line: _log_step(line) <= resumed_step)
            self.metrics = self._open(METRICS_FILE)
            self.main_log = self._open(MAIN_LOG_FILE)
            self.log = self._open(LOG_FILE)
        except OSError as error:
            raise storage_error(error, f"opening the logs in {folder}") from None

    def _open(self, name: str) -> TextIO:
        return (self.folder / name).open("a", encoding="utf-8", buffering=1)  # by lines: a kill loses none written

    def sync(self) -> None:
        """Forces the files to the disk, so that no checkpoint is ahead of its record."""
        try:
            for file in (self.metrics, self.main_log, self.log):
                os.fsync(file.fileno())
        except OSError as error:
            raise storage_error(error, f"writing the logs in {self.folder}") from None

    def close(self) -> None:
        for file in (self.metrics, self.main_log, self.log):
            file.close()

    def record(self, kind: str, **values: Any) -> None:
        """One JSON line. Kinds: run, step, fp8, gpu, validation, evaluation, sample, event, end; most have a step."""
        self._line(self.metrics, json.dumps({"kind": kind, **values}))

    def step(self, step: int, result: StepResult, tokens: int) -> None:
        self.record(
            "step",
            step=step,
            loss=result.loss,
            learning_rate=result.learning_rate,
            norm=result.norm,
            loss_z=result.loss_z,
            norm_z=result.norm_z,
            skipped=result.skipped,
            step_ms=round(result.elapsed_seconds * 1e3, 3),
            tokens_per_second=round(tokens / result.elapsed_seconds, 1),
            tokens=tokens * step,
            **({"loss_scale": result.loss_scale} if result.loss_scale != 1.0 else {}),
        )
        # llm.c numbers a step's line from 0.
        line = f"s:{step - 1} trl:{result.loss:.4f} lr:{result.learning_rate:.6f} norm:{result.norm:.2f}"
        self._line(self.main_log, line)

    def validation(self, step: int, loss: float, bits_per_byte: float | None) -> None:
        self.record("validation", step=step, loss=loss, perplexity=perplexity(loss), bits_per_byte=bits_per_byte)
        self.main_line(f"s:{step} tel:{loss:.4f}")

    def main_line(self, line: str) -> None:
        self._line(self.main_log, line)

    def text(self, line: str) -> None:
        self._line(self.log, line)

    def _line(self, file: TextIO, line: str) -> None:
        try:
            file.write(line + "\n")
        except OSError as error:
            raise storage_error(error, f"writing {file.name}") from None


def _kind_of(record: dict[str, Any]) -> str:
    """A record's kind; a training's evaluation on a task counts apart from one that was made afterwards."""
    if record["kind"] == "evaluation" and record.get("by") == IN_TRAINING:
        return f"evaluation of {record.get('task')}"
    return record["kind"]


def _json_step(line: str) -> int:
    """The step a metrics line belongs to; a line cut by a kill belongs to a step that is done again."""
    try:
        record = json.loads(line)
        return int(record.get("step", 0)) if "kind" in record else 1 << 60
    except (ValueError, AttributeError, TypeError):
        return 1 << 60


def _log_step(line: str) -> int:
    """The number of completed steps after which a main.log line was written."""
    match = re.match(r"s:(\d+) (tel|eval|trl):", line)
    if not match:
        return 1 << 60
    return int(match[1]) + (match[2] == "trl")


def _keep_lines(path: Path, keep: Callable[[str], bool]) -> list[str]:
    """Cuts a file down to the lines to keep, and returns them."""
    if not path.exists():
        return []
    content = path.read_text(encoding="utf-8")
    kept = [line for line in content.splitlines() if keep(line)]
    if content != "".join(line + "\n" for line in kept):
        write_durably(path, "".join(line + "\n" for line in kept))
    return kept
