"""A change beside the run that it changes, by the training losses of some first steps: quick, where whole runs take hours.

    python -m benchmarks.first_steps OUT.json 42-61 bf16=runs/a fp8=runs/b e5m2=runs/c ...

The first run is the measure. All have its seed, and so its samples in every step; each may have been stopped after these
steps. Of an fp8 run the record has the last counts of clipped and vanished numbers before the end of the steps.
"""

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.record import write_record
from benchmarks.run_record import lines_of, origin
from handgrad.settings.config import differences, read_toml


def read(folder: Path, first: int, last: int) -> dict[str, Any]:
    """A run's losses up to step `last`, their mean from step `first` on, its counts and its configuration."""
    lines = lines_of(folder)
    steps = [line for line in lines["step"] if line["step"] <= last]
    assert [line["step"] for line in steps] == list(range(1, last + 1)), f"{folder} lacks some of the steps 1 to {last}"
    counts = [line for line in lines["fp8"] if line["step"] <= last]
    return {
        "config": read_toml(str(folder / "config.toml")),
        "commit": lines["run"][0]["commit"],
        "tokens": steps[-1]["tokens"],
        "mean": fmean(line["loss"] for line in steps[first - 1 :]),
        "losses": [round(line["loss"], 4) for line in steps],
        "norms": [round(line["norm"], 3) for line in steps],
        "counts": counts[-1] if counts else None,
    }


def compare(runs: dict[str, Path], first: int, last: int) -> dict[str, Any]:
    """The runs by name, each beside the first."""
    rows = {name: read(folder, first, last) for name, folder in runs.items()}
    measure = next(iter(rows.values()))
    settings = measure["config"]
    for name, row in rows.items():
        config = row.pop("config")
        assert config["seed"] == settings["seed"], f"{name} has seed {config['seed']}, the measure {settings['seed']}"
        row["differs_in"] = differences(settings, config)
        row["difference"] = row["mean"] - measure["mean"]
        print(f"{name:<24} {row['mean']:.4f} ({row['difference']:+.4f}); {', '.join(row['differs_in'])}")
    return rows


def main(out: str, steps: str, texts: list[str]) -> None:
    first, last = map(int, steps.split("-"))
    runs = {name: Path(folder) for name, _, folder in (text.partition("=") for text in texts)}
    start = lines_of(next(iter(runs.values())))["run"][0]
    about = {"first_step": first, "last_step": last, "runs": compare(runs, first, last)}
    write_record(out, torch.device("cpu"), **origin(start), **about)


if __name__ == "__main__":
    main(*sys.argv[1:3], sys.argv[3:])
