"""Lists the runs below a folder, each in a few figures. Imports no slow library."""

import contextlib
import math
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from handgrad.errors import INTERRUPTED, RESUMABLE, DataError, HandgradError, NumericsError, StorageError, storage_errors
from handgrad.evaluation.outcome import DIVERGED
from handgrad.format import human_age, human_bytes, human_count, human_seconds, table
from handgrad.parsing import parse_record
from handgrad.settings.batch_schedule import parse_schedule
from handgrad.settings.config import read_toml
from handgrad.storage.run_files import CONFIG_FILE, LOCK_FILE, METRICS_FILE, is_held

RUNNING, FINISHED, BROKEN = "running", "finished", "broken"
STOPPED = "stopped"  # by Ctrl-C
WAITING = "waiting"  # can resume: preempted, ended by a lost rank, or closed by its program
CRASHED = "crashed"  # the process is gone and recorded no end
FAILED = "failed"  # ended by an error

KINDS = re.compile(rb'\{"kind": "(run|step|validation|save|result|end|stop)"')
MARKERS = ("run", "end", "stop")  # the last of these records determines the state
Records = dict[str, dict[str, Any]]
HEADINGS = ("run", "model", "step", "loss", "size", "state", "written")


@dataclass(frozen=True)
class RunSummary:
    """One run; None where unknown."""

    name: str  # its folder, relative to the searched one
    folder: Path
    state: str
    size_bytes: int
    written: float  # newest file's time, seconds since 1970
    reason: str = ""  # why the run failed or what became of it, or why its folder cannot be read
    outcome: str = ""  # of a finished run: `evaluation.outcome`
    exit_code: int | None = None  # of a stopped or failed run
    parameters: float | None = None
    step: int = 0
    steps: int | None = None
    validation_loss: float | None = None  # last validation, nats per token
    reward: float | None = None  # the mean of the last validation of answers
    set_losses: dict[str, float] = field(default_factory=dict)  # the same of each of several data sets
    seconds_left: float | None = None  # of a running one

    def row(self, now: float) -> tuple[str, ...]:
        """Table cells, in the order of `HEADINGS`."""
        loss = "" if self.validation_loss is None else f"{self.validation_loss:.4f}"
        return (
            self.name,
            "" if self.parameters is None else human_count(self.parameters),
            "" if self.steps is None else f"{self.step}/{self.steps}",
            loss if self.reward is None else f"reward {self.reward:.4f}",
            human_bytes(self.size_bytes),
            self.state,
            f"{human_age(now - self.written)} ago",
        )

    def as_json(self) -> dict[str, Any]:
        written = datetime.fromtimestamp(self.written, UTC).isoformat(timespec="seconds")
        return {**vars(self), "folder": str(self.folder), "written": written}


def list_runs(folder: Path) -> list[RunSummary]:
    """The runs in and below `folder`, most recently written first. Raises `DataError` if the folder does not exist."""
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; name one with runs in it, or make a first one by `handgrad demo`")
    runs = [summarize(run, run.relative_to(folder).as_posix() if run != folder else run.name) for run in find_runs(folder)]
    return sorted(runs, key=lambda run: (-run.written, run.name))


def find_runs(folder: Path) -> Iterator[Path]:
    """Yields the run folders in and below `folder`. Does not descend into runs, and follows links only to runs."""
    if any((folder / name).exists() for name in (LOCK_FILE, METRICS_FILE, CONFIG_FILE)):
        yield folder
        return
    with storage_errors(f"reading {folder}"):
        inside = sorted(path for path in folder.iterdir() if path.is_dir())
    for child in inside:
        if not child.is_symlink() or (child / LOCK_FILE).exists():
            try:
                yield from find_runs(child)
            except StorageError:
                yield child  # listed as broken


def summarize(folder: Path, name: str) -> RunSummary:
    """Summarizes a run folder. An unreadable one is "broken", with the reason."""
    size, written = extent(folder)
    try:
        return RunSummary(name, folder, size_bytes=size, written=written, **figures(folder))
    except HandgradError as error:
        state = RUNNING if is_held(folder) else BROKEN
        return RunSummary(name, folder, state, size, written, "" if state == RUNNING else str(error))


def extent(folder: Path) -> tuple[int, float]:
    """(bytes, time of the newest file in seconds since 1970). Tolerates a trainer that removes files meanwhile."""
    size, written = 0, 0.0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                status = (Path(path) / name).stat()
                size, written = size + status.st_size, max(written, status.st_mtime)
    return size, written or time.time()


def figures(folder: Path) -> dict[str, Any]:
    """The fields of a summary, from a run's configuration and record; `DataError` or `StorageError`: unreadable."""
    config, records = read_config(folder), last_records(folder)
    if "run" not in records:
        raise DataError(f"{folder / METRICS_FILE} has no 'run' line; `handgrad train` did not get to its first step")
    marker = records["marker"]
    loss, sets, reward = (records.get("validation", {}).get(name) for name in ("loss", "sets", "reward"))
    result = records.get("result", {})
    state, code = RUNNING if is_held(folder) else state_of(marker), marker.get("code")
    return {
        "state": state,
        "reason": str({FAILED: marker.get("reason", ""), FINISHED: result.get("text", "")}.get(state, "")),
        "outcome": str(result.get("outcome", "")) if state == FINISHED else "",
        "exit_code": code if isinstance(code, int) and state not in (FINISHED, RUNNING) else None,
        "parameters": records["run"].get("parameters"),
        "step": records.get("step", {}).get("step", 0),
        "steps": config.get("steps", records["run"].get("steps")),
        "validation_loss": loss if isinstance(loss, float) and math.isfinite(loss) else None,
        "reward": reward if isinstance(reward, float) else None,
        "set_losses": {name: x for name, x in sets.items() if isinstance(x, float)} if isinstance(sets, dict) else {},
        "seconds_left": seconds_left(config, records) if state == RUNNING else None,
    }


def seconds_left(config: dict[str, Any], records: dict[str, dict[str, Any]]) -> float | None:
    """Estimated seconds to the end of the run, at its pace since the last start, or None before that start's first step."""
    numbers: list[Any] = [end.get(name) for end in (records["run"], records.get("step", {})) for name in ("time", "step")]
    numbers += [config.get(name) for name in ("steps", "tokens_per_step")]
    if not all(isinstance(number, int | float) for number in numbers):
        return None
    begun, first, now, last, steps, tokens_per_step = numbers
    batch = parse_schedule(tokens_per_step, config.get("batch_schedule", ""))
    before, done, in_all = (batch.tokens_before(step) for step in (first, last, steps))
    return (now - begun) * (in_all - done) / (done - before) if done > before else None


def read_config(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG_FILE).is_file():
        raise DataError(f"{folder} holds no {CONFIG_FILE}; it is no run, or one that did not get to its first step")
    return read_toml(str(folder / CONFIG_FILE))


def last_records(folder: Path) -> Records:
    """The last record of each kind, and as "marker" the last one that determines the state. Parses only these."""
    if not (path := folder / METRICS_FILE).is_file():
        raise DataError(f"{folder} holds no {METRICS_FILE}; it is no run, or one that did not get to its first step")
    newest: dict[str, tuple[bytes, int]] = {}
    with storage_errors(f"reading {path}"), path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if (kind := KINDS.match(line)) and line.endswith(b"\n"):  # else a kill truncated it
                newest[kind[1].decode()] = line, number
    records = {kind: parse_record(line, f"line {number} of {path}").fields for kind, (line, number) in newest.items()}
    if markers := [kind for kind in MARKERS if kind in newest]:
        records["marker"] = records[max(markers, key=lambda kind: newest[kind][1])]
    return records


def records_of(run: Path) -> Records:
    """`last_records`; empty if the record is missing or damaged."""
    try:
        return last_records(run)
    except DataError:
        return {}


def last_failure(records: Records) -> int | None:
    """The step at which non-finite numbers ended the last launch of a run; None if it ended otherwise."""
    last = records.get("marker", {})
    failed = last.get("kind") == "stop" and last.get("code") == NumericsError.exit_code and last.get("not_finite") is True
    return last.get("step") if failed else None


def failed_twice(records: Records, resumed: int) -> bool:
    """True if non-finite numbers ended the last two launches at the same step, and the second had resumed from the
    checkpoint of step `resumed`. A launch records where the previous one failed."""
    failed_at, launch = last_failure(records), records.get("run", {})
    return failed_at is not None and launch.get("step") == resumed and launch.get("failed_at") == failed_at


def state_of(marker: dict[str, Any]) -> str:
    """The state of a run without a process, from the last marker of its record."""
    if marker["kind"] == "end":
        return FINISHED
    if marker["kind"] == "run":
        return CRASHED
    if marker.get("code") == INTERRUPTED or marker.get("signal") == "SIGINT":
        return STOPPED
    return WAITING if marker.get("code") in (0, RESUMABLE) else FAILED


def listed(runs: list[RunSummary], width: int) -> list[str]:
    """A table `width` characters wide, or wider to keep names readable, then time left and reasons for stops."""
    now = time.time()
    rows = [HEADINGS, *(run.row(now) for run in runs)]
    room = max(12, width - len(table([row[1:] for row in rows])[0]) - 2)  # left for the names
    names = [row[0] if len(row[0]) <= room else "…" + row[0][1 - room :] for row in rows]
    lines = table([(name, *row[1:]) for name, row in zip(names, rows, strict=True)], left=1)
    for run in runs:
        if run.seconds_left is not None:
            lines.append(f"{run.state:<8} {run.name}: {human_seconds(run.seconds_left)} left at the pace of this start")
        if run.set_losses:
            lines.append(f"loss     {run.name}: {', '.join(f'{name} {x:.4f}' for name, x in run.set_losses.items())}")
        if run.reason and run.outcome in ("", DIVERGED):
            code = "" if run.exit_code is None else f" (exit code {run.exit_code})"
            lines.append(f"{run.state:<8} {run.name}: {run.reason}{code}")
    return lines
