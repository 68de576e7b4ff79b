"""The lines of a run as a person sees them: on terminals of any width, in a pipe, in a notebook."""

import dataclasses
import io
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

import handgrad
from handgrad.data import canvas
from handgrad.errors import print_message
from handgrad.run import console, header
from handgrad.run.console import Cadence, StepFigures, WordWrap
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from handgrad.training.step import StepResult
from tests.terminal_pictures import markup, seen


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
    """Figures that do not fit go from the right, z-scores first."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr(
        console,
        "Console",
        lambda **how: Console(**how | {"file": terminal}, width=width, force_terminal=True, color_system=None),
    )
    display = console.Display(10_000, 0, "live")
    display.update(8000, StepFigures(8000, 10_000, result(), 45_100, "38.1% MFU", 3725).live_line)
    display.progress.refresh()
    shown = terminal.getvalue().split("\r")[-1].replace("\x1b[2K", "")
    display.close()
    bar = shown[: min(24, width // 5)]  # four fifths of it are drawn
    assert bar.startswith("━" * int(0.75 * len(bar))) and shown[len(bar) :].strip() == LIVE[width]
    assert len(shown.rstrip()) <= width


LINES = {
    None: "step  8000/10000 | loss 3.2100 (z +1.2) | norm 0.456 (z -0.8) | lr 6.00e-04 | 500 ms | 45.1k tok/s | 38.1% MFU",
    100: "step  8000/10000 | loss 3.2100 (z +1.2) | norm 0.456 (z -0.8) | lr 6.00e-04 | 500 ms | 45.1k tok/s",
    80: "step  8000/10000 | loss 3.2100 | norm 0.456 | lr 6.00e-04 | 500 ms | 45.1k tok/s",
    72: "step  8000/10000 | loss 3.2100 | norm 0.456 | lr 6.00e-04 | 45.1k tok/s",
    40: "step  8000/10000 | loss 3.2100 | norm 0.456 | lr 6.00e-04 | 45.1k tok/s",
}


@pytest.mark.parametrize("width", LINES)
def test_a_line_of_a_step_fits_the_terminal(width: int | None) -> None:
    """The log and pipes get it whole; an update that was skipped is named at any width."""
    figures = StepFigures(8000, 10_000, result(), 45_100, "38.1% MFU", 3725)
    assert figures.line(width) == LINES[width]
    skipped = dataclasses.replace(figures, result=result(skipped="loss z 7.1"))
    assert skipped.line(width).endswith(" | skipped: loss z 7.1")


TEXT = "data       shards/mine: 65.8k training and 5.6k validation tokens, bpe vocabulary of 4096 (padded to 4096) 🦉🦉"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_break_between_words(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal: a header's further lines below its text, a sample's with its own breaks. None in a pipe."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr(
        console,
        "Console",
        lambda **how: Console(**how | {"file": terminal}, width=width, force_terminal=True, color_system=None),
    )
    display = console.Display(10, 0, "lines")
    sample = "step 10, the model writes: " + "once upon a time " * 9 + "\n\n  def f():\n" + "x" * 200
    display.print(TEXT)
    display.print(sample)
    display.close()
    header, _, rest = terminal.getvalue().partition("\nstep 10")
    lines = header.split("\n")
    assert all(cell_len(line) <= width for line in lines) and len(lines) == {60: 3, 80: 2, 120: 1}[width]
    assert all(line.startswith(" " * 11) and line[11] != " " for line in lines[1:])
    assert " ".join(line.strip() for line in lines) == TEXT
    assert all(cell_len(line) <= width for line in rest.splitlines() if "x" * 200 not in line)
    assert "\n\n  def f():\n" in rest and ("step 10" + rest).split() == sample.split()


@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_streamed_text_breaks_between_words(size: int) -> None:
    """Whatever the pieces; nothing is lost or added but the line breaks, and a pipe gets none."""
    text = "The owl 🦉 of the old tower,  all of it\n\n  was awake.\n" + "y" * 45 + " " + "two words " * 9
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    for width in (20, 33, 80):
        wrap = WordWrap(width)
        shown = "".join([*map(wrap.feed, pieces), wrap.feed("", ends=True)])
        assert "".join(shown.split()) == "".join(text.split()) and "tower,  all" in shown + "tower,  all" * (width < 33)
        assert all(cell_len(line) <= width for line in shown.split("\n") if "y" * 9 not in line)
    whole = WordWrap(0)
    assert "".join([*map(whole.feed, pieces), whole.feed("", ends=True)]) == text


def test_pictures_show_a_terminal_as_wide_as_asked() -> None:
    command = [sys.executable, "-c", "print('a' * 100); print('\\x1b[1;31m<b>\\x1b[0m')"]
    bold = '<span style="color:#e06c6c;font-weight:bold">'
    assert markup(seen(command, 80, seconds=60)).splitlines() == [
        "a" * 80,
        "a" * 20,
        f"{bold}&lt;</span>{bold}b</span>{bold}&gt;</span>",
    ]


def lines_of(seconds_per_step: float, every: int, first: int = 1, last: int = 100) -> list[int]:
    """The steps with a line."""
    now = 1000.0
    cadence = Cadence(every, lambda: now)
    shown = []
    for step in range(first, last + 1):
        now += seconds_per_step
        if cadence.due(step, always=step == last):
            shown.append(step)
    return shown


def test_a_slow_run_does_not_look_hung() -> None:
    assert lines_of(15, every=10, last=12) == list(range(1, 13)), "every step of 15 s"
    assert lines_of(4, every=100, last=12) == [1, 2, 5, 8, 11, 12], "a line every ten seconds or so"
    assert lines_of(4, every=4, last=12) == [1, 2, 4, 7, 8, 11, 12], "beside every fourth step"


def test_lines_between_the_regular_ones_stand_at_round_steps() -> None:
    assert lines_of(0.15, every=100, last=300) == [1, 2, 80, 100, 180, 200, 280, 300], "after ten seconds, 67 steps"
    assert lines_of(0.0999, every=100, first=1201, last=1400) == [1201, 1202, 1300, 1400], "not also at 1302"


def test_a_quick_run_says_little() -> None:
    assert lines_of(0.05, every=40) == [1, 2, 40, 80, 100]
    assert lines_of(0.05, every=40, first=71) == [71, 72, 80, 100], "resumed: it shows its first steps again"


def test_a_skipped_step_has_a_line() -> None:
    cadence = Cadence(1000, lambda: 0.0)
    shown = [cadence.due(step, always=step == 7) for step in range(1, 10)]
    assert [step for step, line in enumerate(shown, 1) if line] == [1, 2, 7]


def test_lines_are_the_same_in_the_log(config: RunConfig, capsys: pytest.CaptureFixture) -> None:
    train(dataclasses.replace(config, log_every=5))
    shown = capsys.readouterr().out
    assert (Path(config.out) / "log.txt").read_text() == shown
    assert re.findall(r"^step +(\d+)/12", shown, re.MULTILINE) == ["1", "2", "5", "10", "12"]


class ZMQInteractiveShell:
    """The class of a shell in a notebook's kernel."""


def on_the_page(output: str) -> list[str]:
    """The lines of a cell's output: after a carriage return characters take the place of those before."""
    lines = []
    for line in output.split("\n"):
        shown = ""
        for piece in line.split("\r"):
            shown = piece + shown[len(piece) :]
        lines.append(shown.rstrip())
    return lines


def test_a_notebook_has_one_line_that_is_redrawn(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    ipython = types.ModuleType("IPython")
    setattr(ipython, "get_ipython", ZMQInteractiveShell)  # noqa: B010 - for type checkers
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    with handgrad.Training(dataclasses.replace(config, log_every=1)) as run:
        capsys.readouterr()
        run.steps(3)
        print("mine")
        first = capsys.readouterr().out
        run.steps()
        rest = capsys.readouterr().out
    assert first.count("\r") == 3, "drawn once a step"
    live, *others = on_the_page(first)
    assert re.fullmatch(r"0:\d\d left \| \S+ tok/s \| loss \S+ \| step 3/12 \| .*", live)
    assert others == ["mine", ""], "what follows the steps begins a line"
    page = on_the_page(rest)
    assert [line for line in page if " left | " in line] == [], "a line that stays takes the place of the live one"
    assert [re.split(r":| \d+\.", line)[0] for line in page if "validation" in line] == [
        "step 6",
        "step 12",
        "result     reached validation loss",
    ]
    log = (Path(config.out) / "log.txt").read_text()
    assert log.count("tok/s") == 12, "the log has a line a step"


def test_ipython_in_a_terminal_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not console.in_notebook()
    ipython = types.ModuleType("IPython")
    setattr(ipython, "get_ipython", lambda: None)  # noqa: B010 - for type checkers
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert not console.in_notebook(), "IPython was imported by a program"


def test_output_that_nobody_reads_any_more_does_not_fail_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that wait in the buffer as the reader goes: Python would flush them at its end, and exit with 120."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w", encoding="utf-8") as out:
        monkeypatch.setattr("sys.stdout", out)
        display = console.Display(10, 0, "lines")
        out.write("step 1")
        os.close(reading)
        display.close()
        out.flush()
        assert display.closed


def test_a_line_that_nobody_reads_any_more_does_not_fail_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line on stderr that says why a run ends."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", encoding="utf-8") as out:
        monkeypatch.setattr("sys.stderr", out)
        print_message("stopped")
        out.flush()


def test_settings_that_the_run_does_not_read(config: RunConfig) -> None:
    """The header names each of them with the setting that would read it, and none that the run reads, nor e4m3, which
    runs of before have as their default."""
    unread: dict[str, Any] = {"rollouts": 4, "reward_seconds": 5, "dpo_beta": 0.2, "clip_ratio": 0.1}
    unread |= {"cooldown_fraction": 0.3, "fp8_window": 8, "fp8_gradients": "e4m3", "eval_task_examples": 7}
    lines = [
        "no effect  dpo_beta: read only with objective dpo",
        "no effect  rollouts, reward_seconds: read only with a reward",
        "no effect  clip_ratio: read only with updates above 1",
        "no effect  cooldown_fraction: read only with schedule wsd or trapezoid",
        "no effect  fp8_window: read only with precision fp8",
        "no effect  eval_task_examples: read only with eval_tasks",
    ]
    train(dataclasses.replace(config, **unread, steps=1))
    log = (Path(config.out) / "log.txt").read_text().splitlines()
    assert [line for line in log if line.startswith("no effect")] == lines
    reading: dict[str, Any] = {"objective": "dpo", "reward": "exact", "updates": 2, "schedule": "wsd"}
    reading |= {"precision": "fp8", "eval_tasks": "x"}
    assert header.unread_lines(dataclasses.replace(config, **unread, **reading)) == []


@pytest.mark.parametrize(
    ("terminal", "mode", "drawn"), [(True, "lines", True), (True, "nothing", False), (False, "lines", False)]
)
def test_a_picture_is_drawn_on_a_terminal_alone(
    terminal: bool, mode: console.ConsoleMode, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(
        console, "Console", lambda **how: Console(**how | {"file": out}, force_terminal=terminal, color_system="truecolor")
    )
    console.Display(10, 0, mode).draw(canvas.blocks(np.full((2, 3, 3), (1, 2, 3), np.uint8)))
    assert out.getvalue().count("\u2580") == 3 * drawn and ("38;2;1;2;3" in out.getvalue()) is drawn
