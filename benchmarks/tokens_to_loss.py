"""Recipes compared by the tokens and seconds that they take to a loss: runs that differ in seed or lanes form a group.

    python -m benchmarks.tokens_to_loss OUT.json gpt2=runs/a-1,runs/a-2,runs/a-3 modern=runs/b-1,runs/b-2,runs/b-3

Runs that shared a GPU say nothing of seconds: --shared leaves them out. The first group is the measure: the mean of its
last validation losses. A learning rate that falls to zero reaches its loss at its own end, so a shorter run is a run of its
own, not a piece of a longer one. Writes curves, means and standard errors as a results file, and a plot beside it: of the
validation losses, or of the training losses if the runs validated at their ends alone. Without groups it draws the plot of
a file that exists.
"""

import json
import math
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks.record import write_record
from benchmarks.run_pairs import read
from benchmarks.run_record import lines_of, origin, seconds_in_steps
from handgrad.settings.config import RunConfig, differences, to_dict


def group(name: str, folders: list[Path], *, shared: bool) -> dict[str, Any]:
    runs = [read(folder) for folder in folders]
    configs = [run.pop("config") for run in runs]
    for config in configs[1:]:
        # A run on several GPUs has more lanes, which add gradients in another order; the record names them.
        differ = [line for line in differences(configs[0], config) if not line.startswith(("seed:", "lanes:"))]
        assert not differ, f"runs of {name} differ in {', '.join(differ)}"
    finals = [run["final_validation"] for run in runs]
    return {
        "settings": differences(to_dict(RunConfig()), configs[0]),
        "seeds": [config["seed"] for config in configs],
        "lanes": [config["lanes"] for config in configs],
        "tokens": runs[0]["tokens"],
        **({} if shared else {"seconds": round(fmean(seconds_in_steps(lines_of(folder)) for folder in folders), 2)}),
        "mean": fmean(finals),
        "standard_error": stdev(finals) / math.sqrt(len(finals)) if len(finals) > 1 else None,
        "runs": [{key: run[key] for key in ("validation", "training", "skipped_steps")} for run in runs],
    }


def compare(groups: dict[str, list[Path]], *, shared: bool) -> dict[str, Any]:
    """The groups by name, each beside the first. `shared`: the runs shared a GPU."""
    found = {name: group(name, folders, shared=shared) for name, folders in groups.items()}
    first = next(iter(found.values()))
    for name, row in found.items():
        row["tokens_ratio"] = round(row["tokens"] / first["tokens"], 4)
        row["difference"] = row["mean"] - first["mean"]
        error = "" if row["standard_error"] is None else f" +- {row['standard_error']:.4f}"
        line = f"{name:<24} {row['mean']:.4f}{error} ({row['difference']:+.4f}) after {row['tokens'] / 1e6:.1f}M tokens"
        print(line + f" ({row['tokens_ratio']:.3f}); seeds {row['seeds']}", end="")
        if not shared:
            row["seconds_ratio"] = round(row["seconds"] / first["seconds"], 4)
            print(f"; {row['seconds']:.1f} s ({row['seconds_ratio']:.3f})", end="")
        print()
    return found


def plot(found: dict[str, Any], path: Path) -> None:
    """Losses over tokens: every run of a group in one colour, the mean of the first one's last validations dotted."""
    validated = all(len(run["validation"]) > 1 for row in found.values() for run in row["runs"])
    kind, marker = ("validation", "o-") if validated else ("training", "-")
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for index, (name, row) in enumerate(found.items()):
        for number, run in enumerate(row["runs"]):
            steps, losses = zip(*run[kind], strict=True)
            tokens = [step * row["tokens"] / run["validation"][-1][0] / 1e6 for step in steps]
            label = f"{name}: {row['mean']:.3f}" if number == 0 else None
            axes.plot(tokens, losses, marker, markersize=3, linewidth=1.0, color=f"C{index}", label=label)
    axes.axhline(next(iter(found.values()))["mean"], color="C0", linewidth=0.8, linestyle=":")
    axes.set_xlabel("tokens, millions")
    axes.set_ylabel(f"{kind} loss, nats per token")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=120)


def main(out: str, texts: list[str]) -> None:
    shared = "--shared" in texts
    groups = {
        name: [Path(folder) for folder in folders.split(",")]
        for name, _, folders in (text.partition("=") for text in texts if text != "--shared")
    }
    if groups:
        start = lines_of(next(iter(groups.values()))[0])["run"][0]
        write_record(out, torch.device("cpu"), **origin(start), groups=compare(groups, shared=shared))
    plot(json.loads(Path(out).read_text(encoding="utf-8"))["groups"], Path(out).with_suffix(".png"))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
