"""A run's curve as a results file: python -m benchmarks.curve RUN results/NAME.json"""

import json
import sys
from pathlib import Path

import torch

from benchmarks.record import provenance
from handgrad.config import read_toml


def record_curve(run: Path, out: Path) -> None:
    """Writes the run's configuration, its validation curve and every hundredth training loss."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    header = next(line for line in lines if line["kind"] == "run")
    steps = [line for line in lines if line["kind"] == "step"]
    origin = provenance(torch.device("cpu"))  # the run has its own machine
    content = {
        **origin,
        "machine": header["device"],
        "versions": {**origin["versions"], "torch": header["torch"]},
        "config": read_toml(str(run / "config.toml")),
        "parameters": header["parameters"],
        "data": header["data"],
        "floor_nats_per_token": header["floor_nats_per_token"],
        "validation": [[line["step"], round(line["loss"], 4)] for line in lines if line["kind"] == "validation"],
        "training": [[line["step"], round(line["loss"], 4)] for line in steps if line["step"] % 100 == 0],
        "seconds_in_steps": round(sum(line["step_ms"] for line in steps) / 1e3, 1),
        "last_sample": [line["text"] for line in lines if line["kind"] == "sample"][-1:],
    }
    out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record_curve(Path(sys.argv[1]), Path(sys.argv[2]))
