"""A finished training run as a results file: its settings, losses, last text and log.

    handgrad demo && python -m benchmarks.run_record runs/demo benchmarks/results/cpu-demo.json

At the commit that made the run and, unless a GPU made it, on the same machine.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import write_record
from handgrad.settings.config import read_toml

EVERY = 25  # of these many parts of the run the record has one training loss each

Lines = dict[str, list[dict[str, Any]]]  # of a metrics.jsonl by kind, in order


def lines_of(folder: Path) -> Lines:
    found: Lines = {kind: [] for kind in ("run", "step", "validation", "sample", "event", "fp8")}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        found.setdefault(record["kind"], []).append(record)
    return found


def losses(lines: list[dict[str, Any]], digits: int = 4) -> list[list[Any]]:
    """[step, loss] of each of these lines."""
    return [[line["step"], round(line["loss"], digits)] for line in lines]


def seconds_in_steps(lines: Lines) -> float:
    """Without validations and saves."""
    return sum(line["step_ms"] for line in lines["step"]) / 1e3


def origin(start: dict[str, Any]) -> dict[str, Any]:
    """The machine of a run, in the place of the one that writes its record."""
    return {"machine": start["device"], "versions": {"torch": start["torch"]}}


def record_of(folder: Path) -> dict[str, Any]:
    lines = lines_of(folder)
    start, steps = lines["run"][0], lines["step"]
    log = (folder / "log.txt").read_text(encoding="utf-8").splitlines()
    begins = next(number for number, line in enumerate(log) if line.startswith("step "))
    return {
        **({} if start["device"].startswith("cpu") else origin(start)),
        "config": read_toml(str(folder / "config.toml")),
        "parameters": start["parameters"],
        "data": start["data"],
        "floor_nats_per_token": start["floor_nats_per_token"],
        "validation": losses(lines["validation"]),
        "training": losses(steps[:: max(1, len(steps) // EVERY)]),
        "seconds_in_steps": round(seconds_in_steps(lines), 1),
        "last_sample": [line["text"] for line in lines["sample"][-1:]],
        "log": log[begins:],
    }


if __name__ == "__main__":
    run, out = map(Path, sys.argv[1:])
    write_record(out, torch.device("cpu"), **record_of(run))
