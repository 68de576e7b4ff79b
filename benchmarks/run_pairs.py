"""Pairs of runs that differ in a setting or two: how far apart do they end?

    python -m benchmarks.run_pairs OUT.json runs/bf16 runs/fp8 [runs/adamw runs/muon ...]

`handgrad train` makes the runs; of each pair the first is the measure. Writes their curves and differences as a
results file, and a plot beside it.
"""

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks.record import write_record
from benchmarks.run_record import lines_of, losses, origin
from handgrad.settings.config import differences, read_toml

LATE = 20  # the last steps, whose losses are averaged
EVERY = 10  # steps between the recorded training losses


def read(folder: Path) -> dict[str, Any]:
    """A summary of a run's metrics."""
    lines = lines_of(folder)
    steps, counts = lines["step"], lines["fp8"]
    return {
        "config": read_toml(str(folder / "config.toml")),
        "device": lines["run"][0]["device"],
        "torch": lines["run"][0]["torch"],
        "tokens": steps[-1]["tokens"],
        "validation": losses(lines["validation"]),
        "final_validation": lines["validation"][-1]["loss"],
        "late_mean": fmean(line["loss"] for line in steps[-LATE:]),
        "training": losses([line for line in steps if line["step"] % EVERY == 0], 5),
        "skipped_steps": sum(line["skipped"] is not None for line in steps),
        "tokens_per_second": round(fmean(line["tokens_per_second"] for line in steps[len(steps) // 2 :])),
        "events": [line["text"] for line in lines["event"]],
        "largest_clipped_fraction": max(
            (t["clipped_fraction"] for c in counts for t in c["tensors"].values()), default=None
        ),
        "last_counts": counts[-1]["tensors"] if counts else None,
    }


def compare(folders: list[Path]) -> list[dict[str, Any]]:
    """One record per pair, with the relative difference of the last validation losses."""
    pairs = []
    for measure, other in zip(folders[::2], folders[1::2], strict=True):
        a, b = read(measure), read(other)
        differ = differences(a["config"], b["config"])
        final = a.pop("final_validation"), b.pop("final_validation")
        pairs.append(
            {
                "differ_in": differ,
                "final_validation": final,
                "relative_difference": final[1] / final[0] - 1,
                "late_mean_difference": b["late_mean"] - a["late_mean"],
                "runs": [a, b],
            }
        )
        print(
            f"{measure.name} {final[0]:.5f}, {other.name} {final[1]:.5f}: {final[1] / final[0] - 1:+.3%} after"
            f" {a['tokens'] / 1e6:.1f}M tokens; {a['tokens_per_second']} and {b['tokens_per_second']} tokens/s;"
            f" {len(b['events'])} events; differ in {', '.join(differ)}"
        )
    return pairs


def plot(pairs: list[dict[str, Any]], path: Path) -> None:
    """Training and validation losses of every pair, the second of each dashed."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for index, pair in enumerate(pairs):
        for record, line in zip(pair["runs"], ("-", "--"), strict=True):
            label = f"{record['config']['precision']}, seed {record['config']['seed']}: {record['validation'][-1][1]:.4f}"
            axes.plot(*zip(*record["training"], strict=True), line, linewidth=1.0, color=f"C{index}", label=label)
            axes.plot(*zip(*record["validation"], strict=True), "o", markersize=3, color=f"C{index}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token (points: validation)")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    made = compare([Path(folder) for folder in sys.argv[2:]])
    write_record(sys.argv[1], torch.device("cpu"), **origin(made[0]["runs"][0]), pairs=made)
    plot(made, Path(sys.argv[1]).with_suffix(".png"))
