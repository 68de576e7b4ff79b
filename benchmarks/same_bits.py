"""One run on different numbers of ranks: are weights, moments, losses and norms the same, bit by bit?

    python -m benchmarks.same_bits d12 --data shards --ranks 1,2,4 --precisions bf16,fp8 --out FILE
    python -m benchmarks.same_bits tiny --data shards --ranks 1,2 --precisions fp32 --device cpu

Every run has as many lanes as the largest has ranks. On GPUs, runs go side by side as long as some are free. Ends with 1 if
two of a precision differ.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any

import safetensors.torch
import torch

from benchmarks.record import write_record
from handgrad.settings.config import read_toml

QUIET = {"save_every": 0, "sample_tokens": 0, "warmup_steps": 2}


@dataclass(frozen=True)
class Found:
    """The bits of a finished run, and its speed."""

    bits: str  # SHA-256 of the tensors and of the numbers of all steps
    tensors: int
    numbers: int
    tokens_per_second: float


def found_in(folder: Path) -> Found:
    digest, count = hashlib.sha256(), 0
    (last,) = (folder / "checkpoints").glob("step_*")
    tensors = {
        name: tensor for path in last.glob("*.safetensors") for name, tensor in safetensors.torch.load_file(path).items()
    }
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for line in (line for line in lines if line["kind"] in ("step", "validation")):
        digest.update(json.dumps([line["step"], line["loss"], line.get("norm")]).encode())
        count += 1
    speed = median(line["tokens_per_second"] for line in lines if line["kind"] == "step")
    return Found(digest.hexdigest(), len(tensors), count, speed)


def train(settings: dict[str, Any], ranks: int, preset: str, folder: Path, gpus: "SimpleQueue[str] | None") -> Found:
    """Makes the run. `gpus`: those that are free; the run takes as many as it has ranks."""
    flags = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "handgrad", "train", preset, *flags, "--ranks", str(ranks), "--out", str(folder)]
    mine = [gpus.get() for _ in range(ranks)] if gpus else []
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(mine)} if mine else {"OMP_NUM_THREADS": "1"})}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    finally:
        for gpu in mine:
            gpus.put(gpu)  # type: ignore[union-attr]
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return found_in(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("--data", required=True)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--precisions", default="bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tokens-per-step", type=int, default=0, help="(default: the preset's)")
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--out", default="", help="file for the record")
    asked = parser.parse_args()
    counts, precisions = [int(text) for text in asked.ranks.split(",")], asked.precisions.split(",")
    settings = {"data": asked.data, "device": asked.device, "steps": asked.steps, "lanes": max(counts), "zero": asked.zero}
    settings |= QUIET | {"eval_every": asked.steps, "eval_tokens": 1 << 19}
    settings |= {"tokens_per_step": asked.tokens_per_step} if asked.tokens_per_step else {}
    free: SimpleQueue[str] | None = SimpleQueue() if asked.device == "cuda" else None
    for number in range(torch.cuda.device_count() if free else 0):
        free.put(str(number))  # type: ignore[union-attr]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        for count in counts:  # a run waits for GPUs with none in its hands: those of a count go together
            together = max(1, torch.cuda.device_count() // count) if free else 1
            with ThreadPoolExecutor(together) as pool:
                made = {}
                for precision in precisions:
                    folder, changed = Path(work) / f"{precision}-{count}", {**settings, "precision": precision}
                    made[precision] = pool.submit(train, changed, count, asked.preset, folder, free)
            for precision, future in made.items():
                row = {"precision": precision, "ranks": count, **vars(future.result())}
                rows.append(row)
                print(f"{precision} on {count}: {row['bits'][:16]}, {row['tokens_per_second']:,.0f} tok/s", flush=True)
        config = read_toml(str(Path(work) / f"{precisions[0]}-{counts[0]}" / "config.toml"))
    equal = {p: len({row["bits"] for row in rows if row["precision"] == p}) == 1 for p in precisions}
    for precision, same in equal.items():
        print(f"{precision}: {'the same bits' if same else 'OTHER BITS'} on {asked.ranks} ranks")
    if asked.out:
        names = "num_layers", "channels", "micro_batch", "tokens_per_step", "lanes", "zero"
        sizes = {name: config[name] for name in names}
        write_record(asked.out, torch.device(asked.device), config=sizes, steps=asked.steps, equal=equal, rows=rows)
    sys.exit(0 if all(equal.values()) else 1)


if __name__ == "__main__":
    main()
