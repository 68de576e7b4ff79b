"""The same training under two versions of torch on one CPU: where their bits part.

    python -m benchmarks.two_torches OTHER_PYTHON --out benchmarks/results/cpu-two-torches.json

OTHER_PYTHON is the interpreter of an environment with another torch and handgrad's other dependencies. Both train the same
audited runs on one thread; `handgrad diff` compares them. A run of one step says which tensors differ first; the links of a
longer one say how many steps keep their loss.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import ROOT, keep_commit, write_record
from handgrad.joins.audit.chain import differing, meaning
from handgrad.storage import checkpoint
from handgrad.storage.run_files import CHECKPOINTS
from handgrad.tools.diff import tensor_differences
from handgrad.tools.record import open_record

RUNS = {
    "gpt2": ["tiny", "--sequence-length=128"],
    "modern": ["m4", "--sequence-length=128"],
    "llama": ["tiny", "--sequence-length=128", "--architecture=llama", "--llama=kv_heads=2"],
}
STEPS = 20
VERSIONS = """
import json, torch
print(json.dumps({"torch": torch.__version__, "onednn": torch.__config__.show()}))
"""


def versions_of(python: str) -> dict[str, str]:
    """The versions of torch and of its oneDNN."""
    found = json.loads(subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True).stdout)
    onednn = re.search(r"MKL-DNN v([\d.]+)", found["onednn"])
    return {"torch": found["torch"], "onednn": onednn[1] if onednn else "none"}


def train(python: str, options: list[str], data: Path, out: Path, steps: int) -> None:
    settings = {"data": data, "out": out, "steps": steps, "tokens_per_step": 1024, "micro_batch": 4}
    settings |= {"audit_every": 1, "save_every": 0, "eval_every": 0, "sample_tokens": 0, "device": "cpu"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    command = [python, "-m", "handgrad", "train", *options, *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def compare(one: Path, other: Path) -> dict[str, Any]:
    """The first link that differs, and the steps whose losses are equal."""
    mine, theirs = (open_record(folder).steps for folder in (one, other))
    assert mine.keys() == theirs.keys()
    first = next((step for step in sorted(mine) if differing(mine[step], theirs[step])), None)
    fields = differing(mine[first], theirs[first]) if first else []
    return {
        "first_link": first,
        "fields": fields,
        "meaning": meaning(fields, first, first - 1) if fields else "",
        "equal_losses": sum(mine[step]["loss"] == theirs[step]["loss"] for step in mine),
        "steps": len(mine),
    }


def tensors(one: Path, other: Path) -> Iterator[dict[str, Any]]:
    """The tensors that differ after step 1."""
    folders = (next(iter(checkpoint.folders(run / CHECKPOINTS))) for run in (one, other))
    for found in tensor_differences(*map(checkpoint.open_checkpoint, folders)):
        yield {
            "name": found.name,
            "differing": found.differing,
            "elements": found.elements,
            "mean_ulp": round(found.mean, 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other_python")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", default="")
    asked = parser.parse_args()
    keep_commit()
    pythons = (sys.executable, asked.other_python)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "data"
        prepare = ["prepare", "stories", "--documents", "2000", "--tokenizer", "bytes", "--out", str(data)]
        subprocess.run([sys.executable, "-m", "handgrad", *prepare], cwd=ROOT, check=True, capture_output=True)
        for name, options in RUNS.items():
            folders = {steps: [Path(scratch) / f"{name}-{steps}-{k}" for k in (0, 1)] for steps in (1, asked.steps)}
            for steps, pair in folders.items():
                for python, folder in zip(pythons, pair, strict=True):
                    train(python, options, data, folder, steps)
            figures[name] = compare(*folders[asked.steps]) | {"tensors_after_step_1": list(tensors(*folders[1]))}
            row = figures[name]
            print(f"{name:<8} step {row['first_link']}: {row['meaning']}")
            print(f"  {row['equal_losses']} of {row['steps']} losses are equal")
            for found in row["tensors_after_step_1"]:
                print(f"  {found['name']}: {found['differing']} of {found['elements']}, mean {found['mean_ulp']} ulp")
    if asked.out:
        write_record(asked.out, torch.device("cpu"), pythons=[versions_of(python) for python in pythons], figures=figures)


if __name__ == "__main__":
    main()
