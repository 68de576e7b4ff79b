"""A finished training run as a results file: its settings, losses, last text and log.

    handgrad demo && python -m benchmarks.run_record runs/demo benchmarks/results/cpu-demo.json

On the machine that made the run, at the commit that made it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import write_record
from handgrad.config import read_toml

EVERY = 25  # of these many parts of the run the record has one training loss each


def record_of(folder: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    kinds = {kind: [line for line in lines if line["kind"] == kind] for kind in ("run", "step", "validation", "sample")}
    start, steps, validations = kinds["run"][0], kinds["step"], kinds["validation"]
    log = (folder / "log.txt").read_text(encoding="utf-8").splitlines()
    begins = next(number for number, line in enumerate(log) if line.startswith("step "))
    return {
        "config": read_toml(str(folder / "config.toml")),
        "parameters": start["parameters"],
        "data": start["data"],
        "floor_nats_per_token": start["floor_nats_per_token"],
        "validation": [[line["step"], round(line["loss"], 4)] for line in validations],
        "training": [[line["step"], round(line["loss"], 4)] for line in steps[:: max(1, len(steps) // EVERY)]],
        "seconds_in_steps": round(sum(line["step_ms"] for line in steps) / 1e3, 1),
        "last_sample": [line["text"] for line in kinds["sample"][-1:]],
        "log": log[begins:],
    }


if __name__ == "__main__":
    run, out = map(Path, sys.argv[1:])
    write_record(out, torch.device("cpu"), **record_of(run))
