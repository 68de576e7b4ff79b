"""handgrad plot: the loss of one or more runs, drawn in the terminal, or as the report's plot in a PNG."""

import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from handgrad.reports.reading import read_runs
from handgrad.reports.results import Run, final_training_loss, final_validation, loss_text, steps_done

MARKS, VALIDATION = "*+x#%&", "o"  # a mark for each run; one run shows its validation losses as well
ROWS, MARGIN = 16, 8  # height of the plot, width of the labels to the left


def run(parsed: Namespace) -> int:
    runs = read_runs([Path(folder) for folder in parsed.runs], lambda error: print(f"left out   {error}", file=sys.stderr))
    if not parsed.out:
        print("\n".join(curves(runs, max(20, shutil.get_terminal_size().columns - MARGIN - 1))))
        return 0
    from handgrad.reports.drawing import write_png  # imports matplotlib, which the terminal does not need
    from handgrad.reports.plots import choose_plots

    write_png(Path(parsed.out), choose_plots(runs)[0], runs)
    print(parsed.out)
    return 0


def curves(runs: Sequence[Run], columns: int) -> list[str]:
    """The plot and its legend: of each column the mean loss of its steps, in nats per token."""
    last = max(steps_done(run) for run in runs)
    series = [(MARKS[n % len(MARKS)], run.steps.step, run.steps.loss) for n, run in enumerate(runs)]
    legend = [
        (mark, f"{run.name}, training {loss_text(final_training_loss(run))}")
        for (mark, *_), run in zip(series, runs, strict=True)
    ]
    if len(runs) == 1 and runs[0].validations:
        series.append((VALIDATION, *np.array(runs[0].validations, dtype=float).T))
        legend.append((VALIDATION, f"validation {loss_text(final_validation(runs[0]))}"))
    points = [
        (mark, column, loss[(bins == column) & np.isfinite(loss)].mean())
        for mark, step, loss in series
        for bins in [np.minimum(step / last * columns, columns - 1).astype(int)]
        for column in np.unique(bins[np.isfinite(loss)])
    ]
    high, low = (pick([loss for *_, loss in points], default=0.0) for pick in (max, min))
    cells = np.full((ROWS, columns), " ")
    for mark, column, loss in points:
        cells[round((high - loss) / ((high - low) or 1.0) * (ROWS - 1)), column] = mark
    labels = [f"{high - row / (ROWS - 1) * (high - low):.3g}" if row % 5 == 0 else "" for row in range(ROWS)]
    lines = [f"{label:>{MARGIN - 2}} |{''.join(row)}".rstrip() for label, row in zip(labels, cells, strict=True)]
    lines += [f"{'+':>{MARGIN}}{'-' * columns}", f"{'step':>{MARGIN - 2}}  0{last:>{columns - 1}}"]
    return lines + [f"{mark:>{MARGIN}} {text}" for mark, text in legend]
