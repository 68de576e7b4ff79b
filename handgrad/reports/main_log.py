"""Reads llm.c's main.log as a run of curves alone, to overlay it with runs of ours.

s:N tel:X                   validation loss after N steps
s:N eval:X                  accuracy on HellaSwag after N steps
s:N trl:X lr:X norm:X       training loss of step N, counted from 0
"""

import math
import re
from pathlib import Path

import numpy as np

from handgrad.errors import DataError, storage_errors
from handgrad.reports.runs import DataSource, GpuReadings, Run, Start, Steps, TaskFigure

NUMBER = r"(-?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|-?nan|-?inf)"
LINE = re.compile(rf"s:(\d{{1,15}}) (?:tel:{NUMBER}|eval:{NUMBER}|trl:{NUMBER}(?: lr:{NUMBER})?(?: norm:{NUMBER})?)\s*")


def read_main_log(path: Path, name: str) -> Run:
    """The losses in a main.log. Of a step that a resumed run did again the last line counts. Raises `DataError` for another
    kind of file; a last line without an end is left out if it cannot be read."""
    with storage_errors(f"reading {path}"):
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    steps: dict[int, list[float]] = {}
    validations: dict[int, float] = {}
    accuracies: dict[int, TaskFigure] = {}
    cut = False
    for number, line in enumerate(lines, start=1):
        found = LINE.fullmatch(line)
        if not found and number == len(lines):
            cut = bool(line.strip())
        elif found:
            step = int(found[1])
            validation, accuracy, *training = (math.nan if text is None else float(text) for text in found.groups()[1:])
            if found[2]:
                validations[step] = validation
            elif found[3]:
                accuracies[step] = TaskFigure(accuracy, math.nan, 0)
            else:
                steps[step + 1] = [*training, math.nan, math.nan, math.nan]
        elif line.strip():
            wanted = "a line of llm.c's main.log like 's:0 trl:10.9 lr:0.0006 norm:1.2'"
            raise DataError(f"expected {wanted}, found {line[:60]!r} in line {number} of {path}; repair or remove the line")
    if not steps:
        raise DataError(f"{path} has no finished step ('s:0 trl:...') yet; wait for the first, or name another main.log")
    rows = [[step, *values] for step, values in sorted(steps.items())]
    return Run(
        name=name,
        folder=path,
        config={},
        starts=[unknown_start(max(steps))],
        first_steps=[min(steps)],
        steps=Steps(*np.array(rows, dtype=float).T),
        skipped={},
        validations=sorted(validations.items()),
        tasks={("hellaswag", "acc_norm_llmc"): sorted(accuracies.items())} if accuracies else {},
        samples=[],
        events=[],
        gpu=GpuReadings(*np.empty((3, 0))),
        paces=[],
        fp8=[],
        last_line_cut=cut,
        is_log=True,
    )


def unknown_start(steps: int) -> Start:
    """A launch of which nothing is known but its steps."""
    unknown = {"train_tokens": math.nan, "validation_tokens": math.nan, "validation_text_bytes": math.nan}
    texts = dict.fromkeys(("host", "command", "commit", "handgrad", "torch", "device", "precision", "batch_schedule"), "")
    numbers = ("time", "parameters", "trained_parameters", "vocab_size", "floor_nats_per_token", "flops_per_token")
    data = DataSource(folder="", source="", identity="", tokenizer="", **unknown)
    sizes = dict.fromkeys(numbers, math.nan)
    return Start(**texts, **sizes, tokens_per_step=0, steps=steps, memory_bytes={}, data=data)  # type: ignore
