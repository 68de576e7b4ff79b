"""Runs a sweep, a process per run and one run per GPU at a time, and collects its results."""

import json
import math
import os
import signal
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handgrad import format
from handgrad.errors import HandgradError, storage_errors
from handgrad.files import write_durably
from handgrad.format import human_seconds
from handgrad.joins.parallel.local import LAUNCHER, POLL_SECONDS, command_line, noted_signals, send, worst_code
from handgrad.run.listing import FINISHED, summarize
from handgrad.run.settings import Sweep, SweepRun
from handgrad.settings.config import differences, read_toml, to_dict, to_toml

STARTS = "starts"  # in the sweep's folder: the recipe of each run, and the errors of its last process
RESULTS_FILE = "sweep.json"
Say = Callable[[str], object]


@dataclass
class Outcome:
    """The end of one run. The code is None for one that was not started, because the sweep was stopped."""

    run: SweepRun
    code: int | None
    error: str = ""
    loss: float | None = None  # of the last validation, nats per token

    def as_json(self) -> dict[str, Any]:
        known = {"name": self.run.name, "folder": str(self.run.folder), "settings": self.run.settings}
        return {**known, "exit_code": self.code, "error": self.error, "validation_loss": self.loss}


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seeds alone."""

    settings: dict[str, Any]
    losses: list[float]

    @property
    def name(self) -> str:
        return ",".join(f"{key}={value}" for key, value in self.settings.items()) or "all runs"

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses)

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds."""
        return statistics.stdev(self.losses) if len(self.losses) > 1 else None

    @property
    def standard_error(self) -> float | None:
        """Standard error of the mean over seeds."""
        return None if self.spread is None else self.spread / math.sqrt(len(self.losses))

    def text(self) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:.4f} over {len(self.losses)} seeds"
        return f"{self.mean:.4f}{error}"


class Runner:
    """Starts the runs that are not finished, waits for them, and passes signals on."""

    def __init__(self, sweep: Sweep, places: list[Mapping[str, str]], say: Say):
        """`places`: the environment of each run that is trained at the same time."""
        self.sweep, self.places, self.say = sweep, places, say
        self.active: dict[int, tuple[subprocess.Popen[bytes], SweepRun]] = {}  # by place
        self.outcomes: dict[str, Outcome] = {}
        self.received: list[int] = []
        self.begun = time.monotonic()

    def run_all(self) -> list[Outcome]:
        """The outcomes in the order of the runs."""
        with noted_signals(self.received):
            try:
                self.loop()
            finally:
                send([process for process, _ in self.active.values()], signal.SIGKILL)
        return [self.outcomes.get(run.name, Outcome(run, None)) for run in self.sweep.runs]

    def loop(self) -> None:
        waiting: deque[SweepRun] = deque()
        for run in self.sweep.runs:
            if is_finished(self.sweep, run):
                self.end(run, 0, "was finished")
            else:
                waiting.append(run)
        handled = 0
        while self.active or (waiting and not self.received):
            for place, environment in enumerate(self.places):
                if place not in self.active and waiting and not self.received:
                    run = waiting.popleft()
                    self.active[place] = start(self.sweep, run, environment), run
            for _ in self.received[handled:]:
                handled += 1  # the first lets them finish their step and save
                send([process for process, _ in self.active.values()], signal.SIGTERM if handled == 1 else signal.SIGKILL)
            for place, (process, run) in list(self.active.items()):
                if (code := process.poll()) is not None:
                    del self.active[place]
                    self.end(run, 128 - code if code < 0 else code, "is finished")
            time.sleep(POLL_SECONDS)

    def end(self, run: SweepRun, code: int, finished: str) -> None:
        outcome = Outcome(run, code, loss=summarize(run.folder, run.name).validation_loss if run.folder.is_dir() else None)
        if code:
            outcome.error = last_error(self.sweep, run)
        self.outcomes[run.name] = outcome
        if code and self.received:
            return  # the sweep's own line says it
        loss = "" if outcome.loss is None else f", validation loss {outcome.loss:.4f}"
        end = f"ended with exit code {code}: {outcome.error}" if code else f"{finished}{loss}"
        done = f"{len(self.outcomes)}/{len(self.sweep.runs)}, {human_seconds(time.monotonic() - self.begun)}"
        self.say(f"{done} | {run.name} {end}")


def start(sweep: Sweep, run: SweepRun, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts `handgrad train` with the run's whole configuration as its recipe."""
    recipe = sweep.folder / STARTS / f"{run.name}.toml"
    with storage_errors(f"writing {recipe}"):
        recipe.parent.mkdir(parents=True, exist_ok=True)
        write_durably(recipe, to_toml(run.config))
        with recipe.with_suffix(".err").open("wb") as errors:
            return subprocess.Popen(
                command_line("train", "--config", recipe),
                env={**os.environ, **environment, LAUNCHER: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                process_group=0,  # a terminal's Ctrl-C comes through the sweep alone
            )


def is_finished(sweep: Sweep, run: SweepRun) -> bool:
    """True if the run has made its last step, by an earlier start with the same settings."""
    recipe = sweep.folder / STARTS / f"{run.name}.toml"
    if not recipe.is_file() or not run.folder.is_dir() or summarize(run.folder, run.name).state != FINISHED:
        return False
    try:
        return not differences(read_toml(str(recipe)), to_dict(run.config))
    except HandgradError:
        return False


def last_error(sweep: Sweep, run: SweepRun) -> str:
    """The last line of a process for its user, or else its last line."""
    path = sweep.folder / STARTS / f"{run.name}.err"
    with storage_errors(f"reading {path}"):
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    messages = [line.removeprefix("handgrad: ") for line in lines if line.startswith("handgrad: ")]
    return (messages or lines or ["it printed nothing"])[-1]


def groups_of(outcomes: list[Outcome]) -> list[Group]:
    """The finished runs by all settings but the seed, the lowest mean loss first."""
    groups: dict[str, Group] = {}
    for outcome in outcomes:
        if outcome.code == 0 and outcome.loss is not None:
            group = groups.setdefault(json.dumps(outcome.run.group), Group(outcome.run.group, []))
            group.losses.append(outcome.loss)
    return sorted(groups.values(), key=lambda group: group.mean)


def table(groups: list[Group]) -> list[str]:
    """A line per group: its settings, runs, and the mean of the validation loss, its standard error, the losses' spread."""
    keys = list(groups[0].settings)
    rows = [[*keys, "runs", "mean loss", "std error", "spread"]]
    for group in groups:
        errors = ("" if value is None else f"{value:.4f}" for value in (group.standard_error, group.spread))
        rows.append([*map(str, group.settings.values()), str(len(group.losses)), f"{group.mean:.4f}", *errors])
    return format.table(rows)


def write_results(sweep: Sweep, outcomes: list[Outcome]) -> Path:
    """Writes sweep.json: the runs, the groups from the best on."""
    groups = [
        {"settings": group.settings, "validation_losses": group.losses, "mean": group.mean}
        | {"standard_error": group.standard_error, "spread": group.spread}
        for group in groups_of(outcomes)
    ]
    content = {"over": sweep.over, "best": groups[0] if groups else None, "groups": groups}
    path = sweep.folder / RESULTS_FILE
    with storage_errors(f"writing {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, json.dumps({**content, "runs": [one.as_json() for one in outcomes]}, indent=1) + "\n")
    return path


def exit_code_of(outcomes: list[Outcome]) -> int:
    return worst_code([outcome.code for outcome in outcomes if outcome.code is not None] or [0])


def gpu_places(jobs: int | None, gpus: int, environment: Mapping[str, str]) -> list[Mapping[str, str]]:
    """The environment of each run that trains at the same time: one GPU each, or one run at a time without a GPU."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(number) for number in range(gpus)]
    count = jobs or max(1, gpus)
    return [{"CUDA_VISIBLE_DEVICES": names[job % gpus]} if gpus else {} for job in range(count)]
