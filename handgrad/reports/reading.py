"""Reads run folders (`config.toml` and `metrics.jsonl`) and llm.c's logs, checks them, and returns `results.Run`."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from handgrad.errors import DataError, HandgradError, UsageError, storage_errors
from handgrad.parsing import Record, numbered_lines, parse_record, parse_toml
from handgrad.reports.results import DataSource, GpuReadings, Pace, Quantized, RolloutFigures, Run, Start, Steps, TaskFigure
from handgrad.storage.run_files import CONFIG_FILE, METRICS_FILE, missing_run

Kind = TypeVar("Kind")
# A line of llm.c's main.log. s:N tel:X is the validation loss after N steps, s:N eval:X the accuracy on HellaSwag, and
# s:N trl:X lr:X norm:X the training loss of step N, counted from 0.
NUMBER = r"(-?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|-?nan|-?inf)"
LOG_LINE = re.compile(rf"s:(\d{{1,15}}) (?:tel:{NUMBER}|eval:{NUMBER}|trl:{NUMBER}(?: lr:{NUMBER})?(?: norm:{NUMBER})?)\s*")


def read_runs(folders: Sequence[Path], leave_out: Callable[[HandgradError], object] | None = None) -> list[Run]:
    """Reads the runs in `folders` (see `runs_in`), in that order; a folder named twice counts once. Raises the error of
    an unreadable folder, or passes it to `leave_out`, and then raises only if no run is left."""
    runs, errors = read_readable(runs_in(folders))
    if errors and (leave_out is None or not runs):
        raise errors[0]
    if leave_out is not None:
        for error in errors:
            leave_out(error)
    return runs


def runs_in(named: Sequence[Path]) -> list[Path]:
    """The run folders and main.logs in `named`; a folder of runs stands for the runs in it."""
    runs = []
    for path in named:
        if path.is_dir() and not (path / CONFIG_FILE).exists():
            runs += sorted(file.parent for file in path.glob(f"*/{METRICS_FILE}")) or [path]
        else:
            runs.append(path)
    return runs


def read_readable(folders: Sequence[Path]) -> tuple[list[Run], list[HandgradError]]:
    """(the runs in `folders` that can be read, the errors of the others)."""
    runs, errors = [], []
    for folder in {folder.resolve(): folder for folder in folders}.values():
        try:
            runs.append(read_run(folder, folder.name))
        except HandgradError as error:
            errors.append(error)
    names = short_names([run.folder for run in runs])
    return [dataclasses.replace(run, name=name) for run, name in zip(runs, names, strict=True)], errors


def short_names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with just enough parents to make all names distinct."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, parts), default=0)):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder.resolve()) for folder in folders]


def read_run(folder: Path, name: str) -> Run:
    """Reads one run folder. Raises `DataError` if a file is missing or broken."""
    if folder.is_file() and folder.suffix == ".log":
        return read_main_log(folder, name)
    if folder.is_file():
        raise DataError(f"{folder} is a file; name a folder that was the --out of `handgrad train`, or a main.log")
    if not folder.is_dir():
        raise DataError(missing_run(folder))
    config_path, metrics_path = folder / CONFIG_FILE, folder / METRICS_FILE
    for path in (metrics_path, config_path):
        if not path.is_file():
            remedy = "name a folder that was the --out of `handgrad train`"
            if any(folder.glob(f"*/*/{METRICS_FILE}")):
                remedy = f"name the folders of runs in it, as `handgrad runs {folder}` lists them"
            raise DataError(f"{folder} holds no {path.name}; {remedy}")
    with storage_errors(f"reading {folder}"):
        config_bytes, metrics_bytes = config_path.read_bytes(), metrics_path.read_bytes()
    try:
        config = parse_toml(config_bytes)
    except ValueError as error:
        raise DataError(f"{config_path} is not valid TOML ({error}); repair that line or restore the file") from None
    lines, last_line_cut = parse_lines(metrics_bytes, metrics_path)
    return collect(lines, name=name, folder=folder, config=config, last_line_cut=last_line_cut)


def parse_lines(metrics: bytes, path: Path) -> tuple[list[Record], bool]:
    """(the lines of `metrics.jsonl`, True if the last one is left out because a kill truncated it)."""
    numbered = list(numbered_lines(metrics, path))
    lines = []
    for number, (text, where) in enumerate(numbered, start=1):
        try:
            lines.append(parse_record(text, where))
            lines[-1].text("kind")
        except DataError:
            if number == len(numbered) and not metrics.endswith(b"\n"):
                return lines[: number - 1], True
            raise
    return lines, False


def read(kind: type[Kind], line: Record) -> Kind:
    """Makes a dataclass from a line; a field's annotation decides how to read it."""
    readers: dict[Any, Callable[[str], Any]] = {
        str: line.text,
        int: line.count,
        float: line.number,
        dict[str, float]: lambda name: {key: line.inner(name).number(key) for key in line.inner(name).fields},
        DataSource: lambda name: read(DataSource, line.inner(name)),
    }
    return kind(**{field.name: readers[field.type](field.name) for field in dataclasses.fields(kind)})  # type: ignore


def read_start(line: Record) -> Start:
    """Reads a "run" line, also from an older version that wrote fewer fields."""
    known = {
        "time": None,
        "host": "",
        "command": "",
        "commit": "",
        "batch_schedule": "",
        "teacher": "",
        "trained_parameters": line.fields.get("parameters"),
        **line.fields,
        "data": {"source": "", **line.inner("data").fields},
    }
    start = read(Start, Record(known, line.where))
    try:
        _ = start.batch
    except UsageError:
        raise line.wrong("batch_schedule", "STEP:TOKENS with commas", start.batch_schedule) from None
    return start


def read_step(line: Record) -> list[float]:
    """Reads the numbers of a "step" line in the order of `Steps`; older versions wrote no time."""
    return [Record({"time": None, **line.fields}, line.where).number(name) for name in Steps.__annotations__]


def read_figures(line: Record) -> dict[str, TaskFigure]:
    """The metrics of an evaluation on a task."""
    metrics, figures = line.inner("metrics"), {}
    for name, pair in metrics.fields.items():
        if not isinstance(pair, list) or len(pair) != 2:
            raise metrics.wrong(f"{name:.60}", "a value and its standard error", pair)
        fields = {"value": pair[0], "stderr": pair[1], "examples": line.value("examples", "a whole number")}
        figures[name] = read(TaskFigure, Record(fields, f"{name!r:.60} in {metrics.where}"))
    return figures


# Kinds of lines that each step has once. If a resumed run repeats a step, the last line counts.
OF_A_STEP: dict[str, Callable[[Record], Any]] = {
    "step": read_step,
    "gpu": lambda line: [line.number(name) for name in GpuReadings.__annotations__],
    "validation": lambda line: line.number("loss"),
    "rollouts": lambda line: [line.number(name) for name in RolloutFigures.__annotations__],
    "sample": lambda line: line.text("text", encodable=False),
    "ranks": lambda line: read(Pace, line),
    "fp8": lambda line: {name: read(Quantized, line.inner("tensors").inner(name)) for name in line.inner("tensors").fields},
}


def columns(kind: type[Kind], rows: Sequence[tuple[int, list[float]]]) -> Kind:
    """Makes a dataclass of arrays from (step, numbers in the order of its fields)."""
    width = len(dataclasses.fields(kind))  # type: ignore
    return kind(*np.array([row for _, row in rows], dtype=float).reshape(-1, width).T)


def collect(lines: Sequence[Record], **run: Any) -> Run:
    """Makes a run from its lines, sorted by kind. Ignores unknown kinds, which a newer handgrad may write."""
    launches: list[Record] = []
    first_steps: list[int | None] = []
    of_step: dict[str, dict[int, Any]] = {kind: {} for kind in OF_A_STEP}
    skipped: dict[int, str] = {}
    sets: dict[int, dict[str, float]] = {}
    pairs: dict[int, tuple[float, float]] = {}
    rewards: dict[int, tuple[float, float, float]] = {}
    tasks: dict[tuple[str, str], dict[int, TaskFigure]] = {}
    events: list[tuple[int, str]] = []
    for line in lines:
        if (kind := line.fields["kind"]) == "run":
            launches.append(line)
            first_steps.append(None)
        elif kind in OF_A_STEP:
            step = line.count("step")
            of_step[kind][step] = OF_A_STEP[kind](line)
            if kind == "validation" and "sets" in line.fields:
                sets[step] = {name: line.inner("sets").number(name) for name in line.inner("sets").fields}
            if kind == "validation" and "accuracy" in line.fields:
                pairs[step] = line.number("accuracy"), line.number("margin")
            if kind == "validation" and "reward" in line.fields:
                kl = line.number("kl") if "kl" in line.fields else math.nan
                rewards[step] = line.number("reward"), line.number("stderr"), kl
                if "divergence" not in line.fields:
                    del of_step[kind][step]  # its loss is the reward's negative
            if kind == "step":
                if first_steps and first_steps[-1] is None:
                    first_steps[-1] = step
                skipped.pop(step, None)
                if line.fields.get("skipped") is not None:
                    skipped[step] = line.text("skipped")
        elif kind == "evaluation":
            for metric, figure in read_figures(line).items():
                tasks.setdefault((line.text("task"), metric), {})[line.count("step")] = figure
        elif kind == "event":
            events.append((line.count("step"), line.text("text")))
    if not launches:
        raise DataError(f"{run['folder'] / METRICS_FILE} has no 'run' line; restore the file, or train the run again")
    if not of_step["step"]:
        raise DataError(f"{run['folder']} has no finished step yet; wait for the first, or resume it by `handgrad train`")
    ordered = {kind: sorted(values.items()) for kind, values in of_step.items()}
    return Run(
        starts=[read_start(line) for line in launches],
        first_steps=first_steps,
        steps=columns(Steps, ordered["step"]),
        skipped=dict(sorted(skipped.items())),
        validations=ordered["validation"],
        tasks={name: sorted(figures.items()) for name, figures in tasks.items()},
        samples=ordered["sample"],
        events=events,
        gpu=columns(GpuReadings, ordered["gpu"]),
        paces=[pace for _, pace in ordered["ranks"]],
        fp8=ordered["fp8"],
        sets=sets,
        pairs=pairs,
        rewards=rewards,
        rollouts=columns(RolloutFigures, ordered["rollouts"]),
        **run,
    )


def read_main_log(path: Path, name: str) -> Run:
    """Reads llm.c's main.log as a run with curves only. If a resumed run repeats a step, the last line counts. Leaves out
    an unreadable last line without a newline. Raises `DataError` for another kind of file."""
    with storage_errors(f"reading {path}"):
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    steps: dict[int, list[float]] = {}
    validations: dict[int, float] = {}
    accuracies: dict[int, TaskFigure] = {}
    cut = False
    for number, line in enumerate(lines, start=1):
        if not (match := LOG_LINE.fullmatch(line)) and number == len(lines):
            cut = bool(line.strip())
        elif match:
            step = int(match[1])
            validation, accuracy, *training = (math.nan if text is None else float(text) for text in match.groups()[1:])
            if match[2]:
                validations[step] = validation
            elif match[3]:
                accuracies[step] = TaskFigure(accuracy, math.nan, 0)
            else:
                steps[step + 1] = [*training, math.nan, math.nan, math.nan]
        elif line.strip():
            wanted = "a line of llm.c's main.log like 's:0 trl:10.9 lr:0.0006 norm:1.2'"
            raise DataError(f"expected {wanted}, found {line[:60]!r} in line {number} of {path}; repair or remove the line")
    if not steps:
        raise DataError(f"{path} has no finished step ('s:0 trl:...') yet; wait for the first, or name another main.log")
    return Run(
        name=name,
        folder=path,
        config={},
        starts=[unknown(Start, steps=max(steps), data=unknown(DataSource))],
        first_steps=[min(steps)],
        steps=Steps(*np.array([[step, *values] for step, values in sorted(steps.items())], dtype=float).T),
        validations=sorted(validations.items()),
        tasks={("hellaswag", "acc_norm_llmc"): sorted(accuracies.items())} if accuracies else {},
        last_line_cut=cut,
        is_log=True,
    )


def unknown(kind: type[Kind], **known: Any) -> Kind:
    """A dataclass with only the `known` fields: other texts are empty, other numbers NaN or 0."""
    blank: dict[Any, Any] = {str: "", int: 0, float: math.nan, dict[str, float]: {}}
    return kind(**{field.name: known.get(field.name, blank.get(field.type)) for field in dataclasses.fields(kind)})  # type: ignore
