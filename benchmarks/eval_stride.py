"""The loss of finished runs by the distance between validation windows and by the position in a window; their seconds.

    handgrad demo && python -m benchmarks.eval_stride runs/demo --out benchmarks/results/cpu-eval-stride.json

The windows of a split that overlap score each token once, after at least a window less the stride of context.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

import handgrad
from benchmarks.record import write_record
from benchmarks.run_record import lines_of, seconds_in_steps
from handgrad.data.batches import Batches
from handgrad.data.shards import open_dataset

SHARES = (0, 16, 4)  # strides, of a window in 32 parts; 0: side by side
BLOCK = 32  # positions


def figures_of(folder: Path) -> dict[str, Any]:
    model = handgrad.load(folder, device="cpu")
    dataset, length = open_dataset(model.data), model.shape.sequence_length
    floor = dataset.floor("validation")
    assert floor is not None, f"the entropy of {model.data} is not known"
    lines, strides = lines_of(folder), []
    for stride in (share * length // 32 for share in SHARES):
        found = handgrad.evaluate(model, eval_stride=stride)
        strides.append(
            {"stride": stride, "tokens": found.tokens, "loss": found.loss, "above_floor": found.loss / floor - 1}
        )
    return {
        "architecture": model.shape.architecture,
        "num_layers": model.shape.num_layers,
        "steps": len(lines["step"]),
        "seconds_in_steps": seconds_in_steps(lines),
        "floor_nats_per_token": floor,
        "strides": strides,
        "above_floor_by_position": by_position(
            model, Batches(dataset.splits["validation"], length, 0, shuffle=False), floor
        ),
    }


def by_position(model: handgrad.Model, batches: Batches, floor: float) -> list[float]:
    """Of windows side by side, the loss of each `BLOCK` positions over the floor, less 1."""
    sums = torch.zeros(batches.sequence_length, dtype=torch.float64)
    for sample in range(batches.samples_per_epoch):
        sums += model.losses(batches.window(sample).astype("int64"))[0].cpu().double()
    means = sums.view(-1, BLOCK).mean(1) / batches.samples_per_epoch
    return [mean / floor - 1 for mean in means.tolist()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", required=True)
    asked = parser.parse_args()
    write_record(asked.out, torch.device("cpu"), figures={run.name: figures_of(run) for run in asked.runs})
