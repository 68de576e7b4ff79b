"""report, plot, compare: pages, curves and tables about runs, from their records."""

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from handgrad.errors import HandgradError, UsageError
from handgrad.format import table
from handgrad.names import check_choice
from handgrad.reports import comparing, results
from handgrad.reports.drawing import LARGE, SMALL, figure, own_settings, png, write_png
from handgrad.reports.page import write_report
from handgrad.reports.plots import Plot, choose_plots
from handgrad.reports.reading import read_runs
from handgrad.reports.results import Run
from handgrad.storage.run_files import REPORT_FILE

RunFolder = str | os.PathLike[str]
RESULTS: dict[str, Callable[[Run], float]] = {
    "validation_loss": results.final_validation,
    "best_validation_loss": lambda run: results.best_validation(run)[1],
    "training_loss": results.final_training_loss,
    "bits_per_byte": lambda run: results.bits_per_byte(run, results.final_validation(run)),
    "steps": results.steps_done,
    "tokens": results.tokens_seen,
    "tokens_per_second": comparing.speed,
    "elapsed_seconds": results.seconds_in_steps,
    "parameters": lambda run: run.start.parameters,
}


@dataclass(frozen=True)
class Curves:
    """A drawn plot. A notebook shows it; `save` writes it as a PNG; `figure` is a matplotlib figure that you can change."""

    plot: Plot
    runs: Sequence[Run]

    @property
    def figure(self) -> Figure:
        with own_settings():
            return figure(self.plot, self.runs, LARGE if self.plot.wide else SMALL)

    def save(self, path: RunFolder) -> Path:
        write_png(out := Path(path), self.plot, self.runs)
        return out

    def _repr_png_(self) -> bytes:
        return png(self.plot, self.runs)

    def __repr__(self) -> str:
        return f"<handgrad curves: {self.plot.title}, of {', '.join(run.name for run in self.runs)}>"


class Comparison(list[dict[str, Any]]):
    """A dictionary per run: its results, and the settings that differ. It prints as a table; a DataFrame accepts it."""

    def __repr__(self) -> str:
        names = list(self[0])
        rows = [names, *([cell_text(row.get(name)) for name in names] for row in self)]
        return "\n".join(line.rstrip() for line in table(rows, left=len(names)))


def cell_text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)


def warn_of(error: HandgradError) -> None:
    """Warns of a run that a page, a plot or a table leaves out."""
    warnings.warn(f"left out: {error}", stacklevel=4)


def report(*runs: RunFolder, out: RunFolder = "") -> Path:
    """`handgrad report`: writes the page about one or several run folders, or a folder of runs; returns its path. `out`: by
    default RUN/report.html of a single folder, report.html of several.

    Warns of a run that it leaves out. Raises `UsageError` if no runs are given, `DataError` if none of them is readable."""
    folders = given(runs)
    default = folders[0] / REPORT_FILE if len(folders) == 1 else Path(REPORT_FILE)
    return write_report(folders, Path(out) if os.fspath(out) else default, warn_of)


def plot(*runs: RunFolder, curve: str = "loss") -> Curves:
    """Draws one plot of the report, for run folders or a folder of runs. `curve`: its name, such as loss, gradient_norm,
    learning_rate, tokens_per_second, step_time.

    Raises `UsageError` for a curve that these runs do not have, and the errors of `report`; warns as it does."""
    read = read_runs(given(runs), warn_of)
    plots = {plot.name: plot for plot in choose_plots(read)}
    check_choice("curve", curve, plots)
    return Curves(plots[curve], read)


def compare(*runs: RunFolder) -> Comparison:
    """Compares run folders, or all runs in a folder: a row per run, with its results, then the settings that differ. Losses
    are in nats per token, the training loss is a mean over the last steps, speeds are medians; NaN if a run has none.

    Raises the errors of `report`, and warns as it does."""
    read = read_runs(given(runs), warn_of)
    return Comparison(
        {"run": run.name}
        | {name: result(run) for name, result in RESULTS.items()}
        | {key: run.config.get(key) for key in comparing.differing_settings(read)}
        for run in read
    )


def given(runs: Sequence[RunFolder]) -> list[Path]:
    if not runs:
        raise UsageError("expected at least one run folder, as in handgrad.compare('runs/a', 'runs/b')")
    for run in runs:
        if not isinstance(run, str | os.PathLike):
            raise UsageError(f"expected each run folder as its own argument, found {run!r:.60}; write *runs for a list")
    return [Path(run) for run in runs]
