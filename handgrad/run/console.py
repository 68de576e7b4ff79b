"""The console of a run: a live progress line on a terminal, a single redrawn line in a notebook, plain lines everywhere
else. Formats a step's figures for people."""

import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from handgrad import errors
from handgrad.format import human_count, human_seconds, round_number
from handgrad.training.step import StepResult

ConsoleMode = Literal["live", "lines", "nothing"]  # "live": a live line if there is a terminal
NOTEBOOK_WIDTH = 100  # characters; a notebook cell shows a few more
SPEED_WINDOW = 20  # steps over which tokens/s and the remaining time are averaged
FIRST_STEPS = 2  # steps of a process that always print: the first waits for libraries, the second shows the speed
QUIET_SECONDS = 10  # after this long without a line, the next round step prints one
LABEL = re.compile(r"(?:[a-z0-9-]+| ) +")  # of a header's line, like "model      4 layers"
LABEL_WIDTH = 11


def in_notebook() -> bool:
    """True in a Jupyter kernel, whose output is a web page. A kernel has already imported IPython."""
    ipython = sys.modules.get("IPython")
    return type(ipython and ipython.get_ipython()).__name__ == "ZMQInteractiveShell"


class Display:
    """Draws a live line with a bar on a terminal, without a bar in a notebook; elsewhere prints only plain lines."""

    def __init__(self, steps: int, completed: int, mode: ConsoleMode):
        self.console = Console(highlight=False, file=getattr(sys.stdout, "terminal", None))
        self.live = mode == "live" and sys.stdout.isatty()
        self.closed = mode == "nothing"
        self.redraws = not self.closed and in_notebook()
        self.drawn = 0  # characters of the notebook's current line
        self.bar = BarColumn()
        columns = (self.bar, TextColumn("{task.description}", markup=False))
        self.progress = Progress(*columns, console=self.console, transient=True, refresh_per_second=4)
        self.task = self.progress.add_task("", total=steps, completed=completed)
        if self.live:
            self.progress.start()

    def update(self, completed: int, line: Callable[[int], str]) -> None:
        """Redraws the live line, if there is one. `line(width)`: its figures in at most `width` characters."""
        if self.redraws:
            text = line(NOTEBOOK_WIDTH)
            print("\r" + text.ljust(self.drawn), end="", flush=True)
            self.drawn = len(text)
        elif self.live:
            width = self.console.width
            self.bar.bar_width = bar_width = min(24, width // 5)
            self.progress.update(self.task, completed=completed, description=line(width - bar_width - 1))

    def print_step(self, line: Callable[[int | None], str]) -> None:
        """Prints a step's plain line, no wider than the terminal. A notebook shows the redrawn line instead."""
        if not self.redraws:
            self.print(line(self.console.width if self.live else None))

    def print(self, text: str) -> None:
        """Prints a line. If the reader is gone (`| head`, a lost connection), the run continues, and the log has it."""
        if self.closed:
            return
        if self.redraws or self.console.is_terminal:
            text = errors.shown(text)
            label = LABEL.match(text)
            indent = LABEL_WIDTH if label and label.end() == LABEL_WIDTH else 0
            text = text if self.redraws else WordWrap(self.console.width, indent).feed(text, ends=True)
        if self.redraws:  # bypass rich, which turns each line into a block of HTML
            print("\r" * bool(self.drawn) + text.ljust(self.drawn))
            self.drawn = 0
            return
        try:
            self.console.print(text, markup=False, soft_wrap=True)
        except (OSError, SystemExit):  # rich turns a broken pipe into SystemExit
            self.stop_printing()

    def draw(self, blocks: str) -> None:
        """Prints lines of coloured blocks, on a terminal alone."""
        if self.console.is_terminal and not self.closed and not self.redraws:
            try:
                self.console.print(Text.from_ansi(blocks), soft_wrap=True)
            except (OSError, SystemExit):
                self.stop_printing()

    def stop_printing(self) -> None:
        """Redirects stdout to devnull, because its reader is gone."""
        self.closed = True
        errors.send_to_devnull(sys.stdout)

    def keep_line(self) -> None:
        """Ends the notebook's redrawn line; the next output starts a new one."""
        if self.drawn:
            print()
            self.drawn = 0

    def close(self) -> None:
        self.keep_line()
        try:
            if self.live:
                self.progress.stop()
            sys.stdout.flush()
        except OSError:  # the terminal is gone
            self.stop_printing()


class WordWrap:
    """Breaks a text between words, as it comes, for a terminal of `width` characters; 0: no terminal, no breaks. Later
    lines begin with `indent` spaces. A longer word is cut, here or by the terminal."""

    def __init__(self, width: int, indent: int = 0):
        self.width, self.indent, self.column, self.word = width, indent, 0, ""

    def feed(self, piece: str, *, ends: bool = False) -> str:
        """The text that can be printed after this piece: all but the word in progress, unless the text `ends`."""
        if not self.width:
            return piece
        piece = errors.shown(piece)
        *words, self.word = re.findall(r"\n|[^\S\n]*\S+|[^\S\n]+", self.word + piece) or [""]
        if ends or self.word == "\n" or cell_len(self.word) >= self.width:
            words, self.word = [*words, self.word], ""
        return "".join(map(self.placed, words))

    def placed(self, word: str) -> str:
        """A word with the spaces before it, or with a new line instead of these."""
        size = cell_len(word)
        if word == "\n":
            self.column = 0
        elif self.column and self.column + size > self.width:
            word = "\n" + " " * self.indent + word.lstrip()
            self.column = self.indent + cell_len(word.lstrip())
        else:
            self.column += size
        return word


def output_wrap(indent: int = 0) -> WordWrap:
    """For a text on standard output."""
    return WordWrap(shutil.get_terminal_size().columns if sys.stdout.isatty() else 0, indent)


@dataclass(frozen=True)
class StepFigures:
    """One step: its result, the speed over the last steps, and the remaining time at that speed."""

    step: int  # counted from 1
    steps: int
    result: StepResult
    tokens_per_second: float
    rate: str  # arithmetic rate of the model
    seconds_left: float
    reward: float | None = None  # mean of the answers that it trains

    def line(self, width: int | None = None) -> str:
        """The plain line. Drops the least important figures to fit `width` characters."""
        for without in range(4):
            line = " | ".join(self.parts(without))
            if width is None or len(line) <= width:
                break
        return line

    def parts(self, without: int = 0) -> list[str]:
        """The parts of the plain line. `without`: 0 to 3; drops the first n of arithmetic rate, z-scores, milliseconds."""
        result = self.result
        loss_z, norm_z = (f" (z {z:+.1f})" if z is not None and without < 2 else "" for z in (result.loss_z, result.norm_z))
        return [
            f"step {self.step:>{len(str(self.steps))}}/{self.steps}",
            f"loss {result.loss:.4f}{loss_z}",
            *([] if self.reward is None else [f"reward {self.reward:.4f}"]),
            f"norm {result.norm:.3f}{norm_z}",
            f"lr {result.learning_rate:.2e}",
            *([f"{result.elapsed_seconds * 1e3:.0f} ms"] if without < 3 else []),
            f"{human_count(self.tokens_per_second)} tok/s",
            *([self.rate] if without < 1 else []),
            *([f"skipped: {result.skipped}"] if result.skipped else []),
        ]

    def live_line(self, width: int) -> str:
        """The figures that fit in `width` characters, most important first."""
        result = self.result
        parts = [
            f"{human_seconds(self.seconds_left)} left",
            f"{human_count(self.tokens_per_second)} tok/s",
            f"loss {result.loss:.4f}" if self.reward is None else f"reward {self.reward:.4f}",
            f"step {self.step}/{self.steps}",
            f"norm {result.norm:.3f}",
            f"lr {result.learning_rate:.2e}",
            self.rate,
            f"{result.elapsed_seconds * 1e3:.0f} ms",
        ]
        if result.loss_z is not None and result.norm_z is not None:
            parts.append(f"z {result.loss_z:+.1f}, {result.norm_z:+.1f}")
        while len(parts) > 1 and len(" | ".join(parts)) > width:
            parts.pop()
        return " | ".join(parts)


class Pace:
    """The speed over the last steps."""

    def __init__(self) -> None:
        self.steps: deque[tuple[int, float]] = deque(maxlen=SPEED_WINDOW)  # tokens, seconds
        self.warming_up = True

    def add(self, tokens: int, elapsed_seconds: float) -> float:
        """Adds a step; returns the mean speed in tokens per second."""
        if len(self.steps) == 1 and self.warming_up:  # the first step includes library loading and page faults
            self.steps.clear()
            self.warming_up = False
        self.steps.append((tokens, elapsed_seconds))
        return sum(tokens for tokens, _ in self.steps) / sum(seconds for _, seconds in self.steps)


class Cadence:
    """The steps that print a plain line: a process's first, every n-th, and enough round ones that no run looks hung."""

    def __init__(self, every: int, clock: Callable[[], float] = time.monotonic):
        """`clock`: returns seconds."""
        self.every, self.clock = every, clock
        self.lines, self.last, self.last_step = 0, clock(), 0

    def due(self, step: int, *, always: bool = False) -> bool:
        """True if `step`, counted from 1, prints a line now; `always`: regardless of time."""
        now = self.clock()
        regular = always or self.lines < FIRST_STEPS or step % self.every == 0
        # The next multiple of half the quiet steps is at most half as long again away.
        quiet = now - self.last >= QUIET_SECONDS and step % round_number((step - self.last_step) / 2) == 0
        if not (regular or quiet):
            return False
        self.lines, self.last, self.last_step = self.lines + 1, now, step
        return True
