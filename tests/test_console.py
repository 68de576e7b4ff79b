"""The lines of a run as a person sees them: on terminals of any width, in a pipe, in a notebook."""

import io
from typing import Any

import pytest
from rich.console import Console

from handgrad.run import console
from handgrad.run.progress import StepFigures
from handgrad.training.step import StepResult


def result(seconds: float = 0.5, **changes: Any) -> StepResult:
    values = {"loss": 3.21, "norm": 0.456, "learning_rate": 6e-4, "elapsed_seconds": seconds, "skipped": None}
    return StepResult(**{**values, "loss_z": 1.25, "norm_z": -0.75, **changes})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


LIVE = {
    60: "1:02:05 left | 45.1k tok/s | loss 3.2100",
    80: "1:02:05 left | 45.1k tok/s | loss 3.2100 | step 8000/10000",
    120: "1:02:05 left | 45.1k tok/s | loss 3.2100 | step 8000/10000 | norm 0.456 | lr 6.00e-04",
}


@pytest.mark.parametrize("width", LIVE)
def test_the_live_line_keeps_its_bar_and_the_time_left(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit goes from the right; z-scores are the first to go."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr(
        console, "Console", lambda **how: Console(**how, file=terminal, width=width, force_terminal=True, color_system=None)
    )
    display = console.Display(10_000, 0, "live")
    display.update(8000, StepFigures(8000, 10_000, result(), 45_100, "38.1% MFU", 3725).live_line)
    display.progress.refresh()
    shown = terminal.getvalue().split("\r")[-1].replace("\x1b[2K", "")
    display.close()
    bar = shown[: min(24, width // 5)]  # four fifths of it are drawn
    assert bar.startswith("━" * int(0.75 * len(bar))) and shown[len(bar) :].strip() == LIVE[width]
    assert len(shown.rstrip()) <= width
