"""Reads run folders: `config.toml` and the lines of `metrics.jsonl`, checked, as plain data for plots and tables."""

import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from handgrad.errors import DataError, storage_error
from handgrad.run_files import CONFIG_FILE, METRICS_FILE

LARGEST_COUNT = 1 << 53  # beyond it a float64, which the plots use, no longer holds every whole number


@dataclass(frozen=True)
class Start:
    """One launch of a run, the first or a resume: its "run" line. Numbers that are unknown are NaN."""

    first_step: int | None  # the first step done after this launch, None if it never got there
    handgrad: str
    torch: str
    device: str
    precision: str
    parameters: float
    trained_parameters: float
    tokens_per_step: int
    planned_steps: int
    vocab_size: float
    memory_bytes: dict[str, float]
    data_folder: str
    data_identity: str
    tokenizer: str
    train_tokens: float
    validation_tokens: float
    validation_text_bytes: float
    floor_nats_per_token: float
    flops_per_token: float


@dataclass(frozen=True)
class Steps:
    """One array element per step, in order. Values that are not finite are kept as they are."""

    step: np.ndarray
    loss: np.ndarray  # nats per token
    learning_rate: np.ndarray
    norm: np.ndarray  # of the gradient, before clipping
    step_ms: np.ndarray
    tokens_per_second: np.ndarray


@dataclass(frozen=True)
class GpuReading:
    """What the GPU's sensors said after a step. NaN where the GPU does not report it."""

    step: int
    watts: float
    sm_megahertz: float


@dataclass(frozen=True)
class Pace:
    """How long ranks took for their own work, over some steps up to one."""

    step: int
    slowest: int  # rank
    slowest_ms: float  # a step
    median_ms: float


@dataclass(frozen=True)
class Quantized:
    """What an fp8 run found out about a class of tensors in one step, the worst of all layers."""

    largest: float  # magnitude
    smallest_scale: float
    largest_scale: float
    clipped: float  # fraction of the numbers that were too large for their scale
    vanished: float  # fraction that became zero
    most_vanished: str  # the tensor with that fraction


@dataclass(frozen=True)
class TaskFigure:
    """A metric of a task after a step, with its standard error, both NaN where unknown."""

    value: float
    stderr: float
    examples: int


@dataclass(frozen=True)
class Run:
    """One run folder, read."""

    name: str
    folder: Path
    config: dict[str, Any]
    starts: list[Start]
    steps: Steps
    skipped: dict[int, str]  # step: why its update was left out
    validations: list[tuple[int, float]]  # step, nats per token
    tasks: dict[tuple[str, str], list[tuple[int, TaskFigure]]]  # (task, metric): its figures by step
    samples: list[tuple[int, str]]
    events: list[tuple[int, str]]
    gpu: list[GpuReading]
    paces: list[Pace]  # of a run on several ranks
    fp8: list[tuple[int, dict[str, Quantized]]]  # step, classes of tensors by name
    last_line_cut: bool

    @property
    def start(self) -> Start:
        """The latest launch: what holds for the run now."""
        return self.starts[-1]


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in `folders`, in that order; a folder named twice is read once."""
    unique = list({folder.resolve(): folder for folder in folders}.values())
    return [read_run(folder, name) for folder, name in zip(unique, short_names(unique), strict=True)]


def short_names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, each with as many of its parents as it takes to tell all of them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, parts), default=0)):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder.resolve()) for folder in folders]


def read_run(folder: Path, name: str) -> Run:
    """Reads one run folder; `DataError` says in one line what is missing or broken and what to do about it."""
    if not folder.is_dir():
        raise DataError(f"run folder {folder} does not exist; `handgrad train ... --out {folder}` makes it")
    config_path, metrics_path = folder / CONFIG_FILE, folder / METRICS_FILE
    for path in (metrics_path, config_path):
        if not path.is_file():
            raise DataError(f"{folder} holds no {path.name}; name a folder that was the --out of `handgrad train`")
    try:
        config_bytes, metrics_bytes = config_path.read_bytes(), metrics_path.read_bytes()
    except OSError as error:
        raise storage_error(error, f"reading {folder}") from None
    try:
        config = tomllib.loads(config_bytes.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{config_path} is not valid TOML ({error}); mend that line or restore the file") from None
    return collect(parse_lines(metrics_bytes, metrics_path), name, folder, config)


@dataclass(frozen=True)
class Line:
    """One line of `metrics.jsonl` with its place, for messages."""

    record: dict[str, Any]
    where: str

    def field(self, key: str) -> Any:
        """The value of `key`; "data.identity" looks inside "data"."""
        value: Any = self.record
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                raise DataError(f"{self.where} has no {key!r}; take that line out or restore the file")
            value = value[part]
        return value

    def text(self, key: str) -> str:
        value = self.field(key)
        if not isinstance(value, str):
            raise DataError(f"{self.where}: {key!r} must be text, found {value!r:.60}")
        return value

    def number(self, key: str) -> float:
        """A float; null is NaN, and the non-finite ones may be spelt as text, for writers that keep to strict JSON."""
        value = self.field(key)
        if value is None:
            return math.nan
        if value in ("NaN", "Infinity", "-Infinity"):
            return float(value)
        try:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError
            return float(value)
        except (TypeError, OverflowError):
            raise DataError(f"{self.where}: {key!r} must be a number, found {str(value)[:60]!r}") from None

    def count(self, key: str) -> int:
        value = self.field(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < LARGEST_COUNT:
            raise DataError(f"{self.where}: {key!r} must be a whole number, 0 or more, found {value!r:.60}")
        return value


def parse_lines(metrics: bytes, path: Path) -> tuple[list[Line], bool]:
    """The lines of `metrics.jsonl`, and whether the last was left out, cut in half: the mark of a killed run."""
    rows = metrics.split(b"\n")
    lines = []
    for number, row in enumerate(rows, start=1):
        if not row.strip():
            continue
        try:
            record = json.loads(row.decode("utf-8"))
        except (ValueError, RecursionError) as error:  # ValueError: not JSON, not UTF-8, or a number too long to read
            if number == len(rows):  # only the last row has no newline behind it
                return lines, True
            raise DataError(
                f"{path} line {number} is not valid JSON ({error}); take that line out or restore the file"
            ) from None
        line = Line(record, f"{path} line {number}")
        if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
            raise DataError(f"{line.where} must be a JSON object with a 'kind', found {row.decode('utf-8'):.60}")
        lines.append(line)
    return lines, False


def read_start(line: Line, first_step: int | None) -> Start:
    memory = line.field("memory_bytes")
    if not isinstance(memory, dict):
        raise DataError(f"{line.where}: 'memory_bytes' must be an object, found {memory!r:.60}")
    within = Line(memory, f"{line.where}: memory_bytes")
    tokens_per_step, planned_steps = line.count("tokens_per_step"), line.count("steps")
    return Start(
        first_step=first_step,
        handgrad=line.text("handgrad"),
        torch=line.text("torch"),
        device=line.text("device"),
        precision=line.text("precision"),
        parameters=line.number("parameters"),
        # An older version froze nothing, and has no such number.
        trained_parameters=line.number("trained_parameters" if "trained_parameters" in line.record else "parameters"),
        tokens_per_step=tokens_per_step,
        planned_steps=planned_steps,
        vocab_size=line.number("vocab_size"),
        memory_bytes={key: within.number(key) for key in memory},
        data_folder=line.text("data.folder"),
        data_identity=line.text("data.identity"),
        tokenizer=line.text("data.tokenizer"),
        train_tokens=line.number("data.train_tokens"),
        validation_tokens=line.number("data.validation_tokens"),
        validation_text_bytes=line.number("data.validation_text_bytes"),
        floor_nats_per_token=line.number("floor_nats_per_token"),
        flops_per_token=line.number("flops_per_token"),
    )


def read_figures(line: Line) -> dict[str, TaskFigure]:
    """The metrics of an evaluation on a task."""
    metrics = line.field("metrics")
    if not isinstance(metrics, dict):
        raise DataError(f"{line.where}: 'metrics' must be an object, found {metrics!r:.60}")
    found = {}
    for name, pair in metrics.items():
        if not isinstance(pair, list) or len(pair) != 2:
            raise DataError(f"{line.where}: metrics.{name:.60} must be a value and its standard error, found {pair!r:.60}")
        within = Line({"value": pair[0], "stderr": pair[1]}, f"{line.where}: metrics.{name:.60}")
        found[name] = TaskFigure(within.number("value"), within.number("stderr"), line.count("examples"))
    return found


def read_quantized(line: Line) -> dict[str, Quantized]:
    tensors = line.field("tensors")
    if not isinstance(tensors, dict):
        raise DataError(f"{line.where}: 'tensors' must be an object, found {tensors!r:.60}")
    found = {}
    for name, record in tensors.items():
        within = Line(record, f"{line.where}: tensors.{name:.60}")
        found[name] = Quantized(
            largest=within.number("largest_amax"),
            smallest_scale=within.number("smallest_scale"),
            largest_scale=within.number("largest_scale"),
            clipped=within.number("clipped_fraction"),
            vanished=within.number("vanished_fraction"),
            most_vanished=within.text("most_vanished"),
        )
    return found


def collect(parsed: tuple[list[Line], bool], name: str, folder: Path, config: dict[str, Any]) -> Run:
    """Sorts the lines by kind; of a step that a resumed run did again, the last one counts.

    Lines of unknown kinds are left alone: a newer handgrad may write some.
    """
    lines, last_line_cut = parsed
    launches: list[tuple[Line, int | None]] = []
    rows: dict[int, tuple[float, ...]] = {}
    skipped: dict[int, str] = {}
    validations: dict[int, float] = {}
    tasks: dict[tuple[str, str], dict[int, TaskFigure]] = {}
    samples: dict[int, str] = {}
    events: list[tuple[int, str]] = []
    gpu: dict[int, GpuReading] = {}
    paces: dict[int, Pace] = {}
    fp8: dict[int, dict[str, Quantized]] = {}
    for line in lines:
        kind = line.record["kind"]
        if kind == "run":
            launches.append((line, None))
        elif kind == "step":
            step = line.count("step")
            if launches and launches[-1][1] is None:
                launches[-1] = (launches[-1][0], step)
            columns = ("loss", "learning_rate", "norm", "step_ms", "tokens_per_second")
            rows[step] = (step, *(line.number(column) for column in columns))
            skipped.pop(step, None)
            if line.record.get("skipped") is not None:
                skipped[step] = line.text("skipped")
        elif kind == "validation":
            validations[line.count("step")] = line.number("loss")
        elif kind == "evaluation":
            for metric, figure in read_figures(line).items():
                tasks.setdefault((line.text("task"), metric), {})[line.count("step")] = figure
        elif kind == "sample":
            samples[line.count("step")] = line.text("text")
        elif kind == "event":
            events.append((line.count("step"), line.text("text")))
        elif kind == "gpu":
            gpu[line.count("step")] = GpuReading(line.count("step"), line.number("watts"), line.number("sm_megahertz"))
        elif kind == "ranks":
            step, slowest = line.count("step"), line.count("slowest")
            paces[step] = Pace(step, slowest, line.number("slowest_ms"), line.number("median_ms"))
        elif kind == "fp8":
            fp8[line.count("step")] = read_quantized(line)
    if not launches:
        raise DataError(f"{folder / 'metrics.jsonl'} has no 'run' line, so it was not written by `handgrad train`")
    if not rows:
        raise DataError(f"{folder} has no finished step yet; wait for the first, or resume it by `handgrad train`")
    return Run(
        name=name,
        folder=folder,
        config=config,
        starts=[read_start(line, first_step) for line, first_step in launches],
        steps=Steps(*np.array([rows[step] for step in sorted(rows)]).T),
        skipped=dict(sorted(skipped.items())),
        validations=sorted(validations.items()),
        tasks={name: sorted(figures.items()) for name, figures in tasks.items()},
        samples=sorted(samples.items()),
        events=events,
        gpu=[gpu[step] for step in sorted(gpu)],
        paces=[paces[step] for step in sorted(paces)],
        fp8=sorted(fp8.items()),
        last_line_cut=last_line_cut,
    )
