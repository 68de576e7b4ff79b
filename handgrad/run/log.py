"""The log of a run: metrics.jsonl for programs, main.log in llm.c's format for its plotting tools, log.txt for people,
audit.jsonl for audits, and the console. Only rank 0 logs.

A resumed run cuts the lines of steps that it will repeat from all files but log.txt. They read as if the run never stopped.
"""

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch

from handgrad.data import canvas
from handgrad.errors import DataError, StorageError, storage_error, storage_errors
from handgrad.evaluation.loss import HeldOut
from handgrad.evaluation.preferences import PairsHeldOut
from handgrad.evaluation.scoring import IN_TRAINING
from handgrad.files import write_bytes_durably, write_durably
from handgrad.format import speed
from handgrad.joins.parallel.ranks import Ranks
from handgrad.machine import devices, power
from handgrad.parsing import parse_record
from handgrad.run.console import Cadence, ConsoleMode, Display, Pace, StepFigures
from handgrad.run.sinks import Sinks, trackers
from handgrad.settings.config import RunConfig
from handgrad.storage.run_files import AUDIT_FILE, LOG_FILE, MAIN_LOG_FILE, METRICS_FILE, SAMPLES
from handgrad.training.design import Design
from handgrad.training.step import StepResult

EVALUATION_OF = "evaluation of"  # prefix of a task's name: the kind of its records in `RunLog.recorded`
DAMAGED = ".damaged"
MAIN_LOG_LINE = re.compile(rb"s:(\d{1,18}) (tel|eval|trl):.*")


class RunLog:
    """Appends to the files of one run folder and to the console. Raises `StorageError` if the disk refuses. On
    ranks other than 0 it has no files and a silent console."""

    def __init__(
        self,
        folder: Path,
        steps: int,
        completed: int,
        ranks: Ranks,
        console: ConsoleMode = "live",
        *,
        audited: bool = False,
    ):
        """Keeps the lines of the first `completed` steps and drops the rest. `audited`: opens audit.jsonl."""
        self.folder, self.audited = folder, audited
        self.chain: list[dict[str, Any]] = []  # the lines kept in audit.jsonl, on rank 0
        self.files: dict[str, TextIO] = {}
        self.subjects: set[str] = set()  # logged by `event_once`
        self.notes: list[str] = []  # about damaged lines in the files
        # (kind, step) of existing records: a resumed run writes only missing ones.
        self.recorded: set[tuple[str, int]] = ranks.from_rank_0(lambda: self._open_all(completed), "the run's records")
        self.display = Display(steps, completed, console if ranks.is_rank_0 else "nothing")
        self.sinks = Sinks({}, self.line)

    def _open_all(self, completed: int) -> set[tuple[str, int]]:
        with storage_errors(f"opening the logs in {self.folder}"):
            lines, note = keep_lines(self.folder / METRICS_FILE, completed, metrics_line)
            _, other = keep_lines(self.folder / MAIN_LOG_FILE, completed, main_log_line)
            chain, links = keep_lines(self.folder / AUDIT_FILE, completed, metrics_line)
            self.chain = [line.record for line in chain]
            self.notes = [text for text in (note, other, links) if text]
            names = METRICS_FILE, MAIN_LOG_FILE, LOG_FILE, *([AUDIT_FILE] if self.audited else [])
            self.files = {name: self._open(name) for name in names}
        return {(_kind_of(line.record), line.step) for line in lines}

    def _open(self, name: str) -> TextIO:
        return (self.folder / name).open("a", encoding="utf-8", buffering=1)  # line-buffered: a kill loses no written line

    def _write(self, name: str, line: str) -> None:
        if name in self.files:
            with storage_errors(f"writing {self.folder / name}"):
                self.files[name].write(line + "\n")
            if name == METRICS_FILE and (error := self.misplaced()):
                raise error

    def misplaced(self) -> StorageError | None:
        """On rank 0, the error if someone moved or removed the run folder: its open files would accept lines forever."""
        path = self.folder / METRICS_FILE
        try:
            if os.path.samestat(path.stat(), os.fstat(self.files[METRICS_FILE].fileno())):
                return None
        except FileNotFoundError:
            pass
        except OSError as error:
            return storage_error(error, f"writing {path}")
        return StorageError(
            f"{self.folder} was moved or removed while the run trained in it; put it back, or choose another --out, and"
            " start the run again"
        )

    def has_end(self, step: int) -> bool:
        """True if an earlier start recorded the end of the run at `step`."""
        return ("end", step) in self.recorded

    def record(self, kind: str, **values: Any) -> None:
        """Writes a JSON line. Kinds: run, step, fp8, gpu, validation, evaluation, sample, save, event, result, end."""
        self._write(METRICS_FILE, json.dumps({"kind": kind, **values}))
        self.sinks.record({"kind": kind, **values})

    def send_to(self, log_to: str, config: dict[str, Any], completed: int) -> None:
        """Also sends all further records to the trackers `log_to`, on rank 0."""
        if log_to and self.files:
            with storage_errors(f"reading {self.folder / METRICS_FILE}"), (self.folder / METRICS_FILE).open("rb") as file:
                first = file.readline()  # from the first launch, so a resumed run keeps it
            identity = hashlib.sha256(first).hexdigest()[:12]
            self.sinks = Sinks(trackers(log_to, self.folder, identity, config, completed), self.line)

    def set_chain_aside(self) -> Path:
        """Moves the lines of audit.jsonl to audit.jsonl.damaged; returns its path."""
        path = self.folder / AUDIT_FILE
        with storage_errors(f"writing {path}"):
            aside = set_aside(path, path.read_bytes())
            self.files[AUDIT_FILE].truncate(0)
        self.chain = []
        return aside

    def audit(self, line: dict[str, Any]) -> None:
        self._write(AUDIT_FILE, json.dumps(line))

    def main_log(self, line: str) -> None:
        self._write(MAIN_LOG_FILE, line)

    def line(self, line: str) -> None:
        self._write(LOG_FILE, line)
        self.display.print(line)

    def step_line(self, line: Callable[[int | None], str]) -> None:
        """`line(width)`: the line for a terminal of `width` characters; None: any width."""
        self._write(LOG_FILE, line(None))
        self.display.print_step(line)

    def event(self, step: int, line: str) -> None:
        self.record("event", step=step, text=line)
        self.line(line)

    def event_once(self, step: int, line: str, subject: str = "") -> None:
        """Logs only the first event on `subject`, by default the line itself."""
        if (subject or line) not in self.subjects:
            self.subjects.add(subject or line)
            self.event(step, line)

    def step(self, step: int, result: StepResult, tokens: int, tokens_seen: int, counted: str = "trained_tokens") -> None:
        """Records a step. `tokens`: of this step; `tokens_seen`: up to and including it; `counted`: its divisor."""
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
            tokens=tokens_seen,
            time=round(time.time(), 3),
            **({counted: result.trained_tokens} if result.trained_tokens not in (None, tokens) else {}),
            **({"loss_scale": result.loss_scale} if result.loss_scale != 1.0 else {}),
        )
        # llm.c counts steps from 0.
        self.main_log(f"s:{step - 1} trl:{result.loss:.4f} lr:{result.learning_rate:.6f} norm:{result.norm:.2f}")

    def validation(self, step: int, result: HeldOut, line: str) -> None:
        figures = {"loss": result.loss, "perplexity": result.perplexity, "bits_per_byte": result.bits_per_byte}
        sets = {name: one.loss for name, one in result.sets.items()}
        self.record("validation", step=step, **figures, **({"sets": sets} if sets else {}))
        self.main_log(f"s:{step} tel:{result.loss:.4f}")
        self.line(line)

    def validation_of_pairs(self, step: int, result: PairsHeldOut, note: str) -> None:
        self.record("validation", step=step, loss=result.loss, accuracy=result.accuracy, margin=result.margin)
        self.main_log(f"s:{step} tel:{result.loss:.4f}")
        figures = f"loss {result.loss:.4f}, accuracy {result.accuracy:.1%}, margin {result.margin:+.4f}"
        self.line(f"step {step}: validation {figures} on {result.pairs} pairs{note}")

    def validation_of_answers(self, step: int, result: Any, kl: float | None, note: str) -> None:
        """Records a validation (`Answered`). `kl`: the policy's divergence from the start's, nats a token, if known."""
        figures = {"reward": result.reward, "stderr": result.stderr, "answer_tokens": result.answer_tokens}
        figures |= {} if kl is None else {"kl": kl}
        figures |= {} if result.divergence is None else {"divergence": result.divergence}
        self.record("validation", step=step, loss=result.loss, **figures, prompts=result.prompts)
        taught = "" if result.divergence is None else f"divergence {result.divergence:.4f} from the teacher, "
        self.line(
            f"step {step}: {taught}reward {result.reward:.4f} ± {result.stderr:.4f} on {result.prompts} held-out prompts,"
            f" answers of {result.answer_tokens:.1f} tokens{'' if kl is None else f', KL {kl:.4f} from the start'}{note}"
        )

    def sample(self, step: int, text: str, pictures: Sequence[np.ndarray] = ()) -> None:
        """`pictures`: (rows, columns, 3), uint8, which `text` only mentions."""
        path = self.folder / SAMPLES / f"step_{step:08d}.txt"
        with storage_errors(f"writing {path}"):
            write_durably(path, text)
            if pictures:
                path.with_suffix(".png").write_bytes(canvas.png(canvas.enlarged(canvas.grid([*pictures]))))
        self.record("sample", step=step, text=text)
        self.line(f"step {step}, the model writes: {text}")
        for picture in pictures:
            self.display.draw(canvas.blocks(picture))

    def gpu(self, step: int, device: torch.device) -> None:
        """Records the driver's latest sensor readings, without waiting for the GPU."""
        if (reading := power.snapshot(device)) is not None:
            self.record("gpu", step=step, **reading)

    def sync(self) -> None:
        """Syncs the files to disk, so that no checkpoint is ahead of its record."""
        with storage_errors(f"writing the logs in {self.folder}"):
            for file in self.files.values():
                os.fsync(file.fileno())

    def close(self) -> None:
        self.sinks.close()
        self.display.close()
        for file in self.files.values():
            with contextlib.suppress(OSError):  # a failed write has already ended the run
                file.close()


class StepLines:
    """Shows the steps of one process, and logs some of them."""

    def __init__(self, log: RunLog, config: RunConfig, design: Design, ranks: int):
        self.log, self.pace, self.cadence = log, Pace(), Cadence(config.log_every)
        self.steps, self.batch = config.steps, config.batch
        self.tokens = self.batch.tokens_before(self.steps)
        peak = devices.peak_flops(design.device)
        self.peak = peak and peak * ranks
        self.flops_per_token = design.flops_per_token

    def show(self, step: int, result: StepResult, reward: float | None = None) -> None:
        """`step` is counted from 1; `reward`: the mean of its answers', if it trains answers."""
        tokens_per_second = self.pace.add(self.batch.tokens(step - 1), result.elapsed_seconds)
        rate = speed(tokens_per_second, self.flops_per_token, self.peak)
        seconds_left = (self.tokens - self.batch.tokens_before(step)) / tokens_per_second
        figures = StepFigures(step, self.steps, result, tokens_per_second, rate, seconds_left, reward)
        self.log.display.update(step, figures.live_line)
        if self.cadence.due(step, always=step == self.steps or bool(result.skipped)):
            self.log.step_line(figures.line)


def _kind_of(record: dict[str, Any]) -> str:
    """A record's kind. Distinguishes a task evaluation during training from one made afterwards."""
    if record["kind"] == "evaluation" and record.get("by") == IN_TRAINING:
        return f"{EVALUATION_OF} {record.get('task')}"
    return record["kind"]


class Line(NamedTuple):
    """A parsed line."""

    step: int  # completed steps when it was written
    is_step: bool  # the line of a step itself; these are in step order
    record: dict[str, Any]  # of a JSON line


def metrics_line(line: bytes) -> Line | None:
    """Parses a line of metrics.jsonl or audit.jsonl; None if damaged."""
    try:
        record = parse_record(line, "").fields
    except DataError:
        return None
    step, kind = record.get("step", 0), record.get("kind")
    return Line(step, kind == "step", record) if type(step) is int and isinstance(kind, str) else None


def read_curves(folder: Path) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """(training losses, validation losses) of all steps of a run, each with its number of completed steps, in order."""
    path, curves = folder / METRICS_FILE, {True: dict[int, float](), False: dict[int, float]()}
    with storage_errors(f"reading {path}"), path.open("rb") as lines:
        for line in lines:
            known = metrics_line(line) if line.startswith((b'{"kind": "step"', b'{"kind": "validation"')) else None
            if known is not None and isinstance(loss := known.record.get("loss"), int | float):
                curves[known.is_step][known.step] = float(loss)
    return sorted(curves[True].items()), sorted(curves[False].items())


def main_log_line(line: bytes) -> Line | None:
    """Parses a line of main.log, which counts steps from 0; None if damaged."""
    if (match := MAIN_LOG_LINE.fullmatch(line)) is None or not line.isascii():
        return None
    is_step = match[2] == b"trl"
    return Line(int(match[1]) + is_step, is_step, {})


def set_aside(path: Path, content: bytes) -> Path:
    """Appends lines of FILE to FILE.damaged; returns the latter's path. Raises OSError."""
    aside = path.with_name(path.name + DAMAGED)
    write_bytes_durably(aside, (aside.read_bytes() if aside.exists() else b"") + content)
    return aside


def keep_lines(path: Path, completed: int, read: Callable[[bytes], Line | None]) -> tuple[list[Line], str]:
    """Truncates a file to the lines of the first `completed` steps; returns these, and a message about damaged ones or "".

    Moves damaged lines to FILE.damaged. A last line without a newline comes from a kill, and the run repeats its step.
    Raises OSError."""
    if not path.exists():
        return [], ""
    content = path.read_bytes()
    lines = content.split(b"\n")
    parsed = [read(line) for line in lines]
    stays = [line is not None and line.step <= completed for line in parsed]
    in_order = [index for index, line in enumerate(parsed) if line is not None and line.is_step and stays[index]]
    # A line that names a later step is damaged too, if it precedes the last step's own. The last element lacks a newline.
    damaged = [i for i in range(len(lines) - 1) if parsed[i] is None or (not stays[i] and i < max(in_order, default=0))]
    message = ""
    if damaged:
        aside = set_aside(path, b"".join(lines[index] + b"\n" for index in damaged))
        numbers = ", ".join(str(index + 1) for index in damaged[:8]) + (", ..." if len(damaged) > 8 else "")
        which = "a damaged line" if len(damaged) == 1 else f"{len(damaged)} damaged lines"
        message = f"{path}: set aside {which}, {numbers}, in {aside}; the run continues without them"
    if (remaining := b"".join(line + b"\n" for line, stay in zip(lines, stays, strict=True) if stay)) != content:
        write_bytes_durably(path, remaining)
    return [line for line, stay in zip(parsed, stays, strict=True) if line is not None and stay], message
