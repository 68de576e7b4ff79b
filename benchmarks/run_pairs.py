"""Pairs of runs that differ in a setting or two: how far apart do they end?

    python -m benchmarks.run_pairs OUT.json runs/bf16 runs/fp8 [runs/adamw runs/muon ...]

`handgrad train` makes the runs; of each pair the first is the measure. Writes their curves and differences as a
results file, and a plot beside it.
"""

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.record import write_record
from handgrad.config import differences, read_toml

LATE = 20  # the last steps, whose losses are averaged
EVERY = 10  # steps between the recorded training losses


def read(folder: Path) -> dict[str, Any]:
    """A summary of a run's metrics."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    header = next(line for line in lines if line["kind"] == "run")
    steps = [line for line in lines if line["kind"] == "step"]
    counts = [line for line in lines if line["kind"] == "fp8"]
    return {
        "config": read_toml(str(folder / "config.toml")),
        "device": header["device"],
        "torch": header["torch"],
        "tokens": steps[-1]["tokens"],
        "validation": [[line["step"], round(line["loss"], 4)] for line in lines if line["kind"] == "validation"],
        "final_validation": [line["loss"] for line in lines if line["kind"] == "validation"][-1],
        "late_mean": fmean(line["loss"] for line in steps[-LATE:]),
        "training": [[line["step"], round(line["loss"], 5)] for line in steps if line["step"] % EVERY == 0],
        "skipped_steps": sum(line["skipped"] is not None for line in steps),
        "tokens_per_second": round(fmean(line["tokens_per_second"] for line in steps[len(steps) // 2 :])),
        "events": [line["text"] for line in lines if line["kind"] == "event"],
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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
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
    plt.close(figure)


if __name__ == "__main__":
    made = compare([Path(folder) for folder in sys.argv[2:]])
    # The machine of the runs, not the one that compares them.
    origin = {"machine": made[0]["runs"][0]["device"], "versions": {"torch": made[0]["runs"][0]["torch"]}}
    write_record(sys.argv[1], torch.device("cpu"), **origin, pairs=made)
    plot(made, Path(sys.argv[1]).with_suffix(".png"))
