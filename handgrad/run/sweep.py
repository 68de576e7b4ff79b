"""A sweep: the runs of all combinations of values, each in a folder of its own, resolved before any of them starts."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handgrad.config import RunConfig, convert
from handgrad.errors import UsageError
from handgrad.run.settings import WITH, WITHOUT, run_config

DEFAULT_OUT = "runs/sweep"
SEED = "seed"  # runs that differ in nothing else are repetitions


@dataclass(frozen=True)
class SweepRun:
    """One combination."""

    name: str  # KEY=VALUE,KEY=VALUE
    settings: dict[str, Any]  # the values of the keys that are swept
    config: RunConfig

    @property
    def folder(self) -> Path:
        return Path(self.config.out)

    @property
    def group(self) -> dict[str, Any]:
        """The settings that its repetitions share."""
        return {key: value for key, value in self.settings.items() if key != SEED}


@dataclass(frozen=True)
class Sweep:
    folder: Path
    over: dict[str, list[Any]]
    runs: list[SweepRun]


def resolve_sweep(
    over: Iterable[str], preset: str, recipe_file: str, model: str, settings: Mapping[str, Any], out: str
) -> Sweep:
    """The runs of `over` (like "seed=1,2"); the other arguments as `run_config` takes them. Raises its errors for the first
    run that does not hold."""
    values = parse_over(over)
    folder, runs = Path(out or DEFAULT_OUT), dict[str, SweepRun]()
    for combination in itertools.product(*values.values()):
        chosen = dict(zip(values, combination, strict=True))
        name = ",".join(f"{key}={value_text(value)}" for key, value in chosen.items())
        if name in runs:
            raise UsageError(f"--over gives {name} twice; each run needs a folder of its own")
        config = run_config(preset, recipe_file, model, {**settings, **chosen, "out": str(folder / name)}, "sweep")
        runs[name] = SweepRun(name, chosen, config)
    return Sweep(folder, values, list(runs.values()))


def parse_over(over: Iterable[str]) -> dict[str, list[Any]]:
    """["seed=1,2"] -> {"seed": [1, 2]}, the values as the field's type."""
    values: dict[str, list[Any]] = {}
    for text in over:
        key, equals, listed = text.partition("=")
        name = key.removeprefix("--").replace("-", "_")
        if not equals:
            raise UsageError(f"--over takes KEY=VALUE,VALUE,..., found {text!r}; a preset comes before it")
        if name == "out":
            raise UsageError("--over cannot vary out: each run has a folder of its own in --out")
        if name in values:
            raise UsageError(f"--over names {name} twice; give all its values at once, with commas")
        values[name] = [value if name in (WITHOUT, WITH) else convert(name, value) for value in listed.split(",")]
    return values


def value_text(value: Any) -> str:
    """A value in a folder's name."""
    return str(value).lower() if isinstance(value, bool) else str(value).replace("/", "_")
