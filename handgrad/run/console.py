"""The console of a run: a live progress line on a terminal, one line that is redrawn in a notebook, plain lines everywhere
else; the figures of a step as a person follows them."""

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from handgrad import errors
from handgrad.format import human_count, human_seconds
from handgrad.training.step import StepResult

ConsoleMode = Literal["live", "lines", "nothing"]  # a live line where there is a terminal, plain lines, nothing
NOTEBOOK_WIDTH = 100  # characters; a cell's output shows some more
SPEED_WINDOW = 20  # steps over which tokens/s and the remaining time are averaged
FIRST_STEPS = 2  # of a process that have a line each: the first waits for libraries, the second shows the speed
QUIET_SECONDS = 10  # without a line, after which the next step has one


def in_notebook() -> bool:
    """True in a kernel of Jupyter, whose output is a web page. IPython is there already, or this is none."""
    ipython = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"


class Display:
    """A live line with a bar on a terminal, one without a bar in a notebook; nothing but the plain lines otherwise."""

    def __init__(self, steps: int, completed: int, mode: ConsoleMode):
        self.console = Console(highlight=False, file=getattr(sys.stdout, "terminal", None))
        self.live = mode == "live" and sys.stdout.isatty()
        self.closed = mode == "nothing"
        self.redraws = not self.closed and in_notebook()
        self.drawn = 0  # characters of the line that a notebook redraws
        self.bar = BarColumn()
        columns = (self.bar, TextColumn("{task.description}", markup=False))
        self.progress = Progress(*columns, console=self.console, transient=True, refresh_per_second=4)
        self.task = self.progress.add_task("", total=steps, completed=completed)
        if self.live:
            self.progress.start()

    def update(self, completed: int, line: Callable[[int], str]) -> None:
        """Redraws the live line, if there is one. `line`: its figures for a width in characters."""
        if self.redraws:
            text = line(NOTEBOOK_WIDTH)
            print("\r" + text.ljust(self.drawn), end="", flush=True)
            self.drawn = len(text)
        elif self.live:
            width = self.console.width
            self.bar.bar_width = bar_width = min(24, width // 5)
            self.progress.update(self.task, completed=completed, description=line(width - bar_width - 1))

    def print_step(self, line: Callable[[int | None], str]) -> None:
        """The plain line of a step, no wider than the terminal; a notebook shows it in the line that it redraws."""
        if not self.redraws:
            self.print(line(self.console.width if self.live else None))

    def print(self, text: str) -> None:
        """A line on the console. When its reader has gone (`| head`, a lost connection), the run continues; the log has
        every line."""
        if self.closed:
            return
        if self.redraws or self.console.is_terminal:
            text = errors.shown(text)
        if self.redraws:  # without rich, which makes a block of HTML of each line
            print("\r" * bool(self.drawn) + text.ljust(self.drawn))
            self.drawn = 0
            return
        try:
            self.console.print(text, markup=False, soft_wrap=True)
        except (OSError, SystemExit):  # rich turns a broken pipe into the second
            self.stop_printing()

    def stop_printing(self) -> None:
        """Sends stdout to devnull from now on: its reader has gone."""
        self.closed = True
        errors.send_to_devnull(sys.stdout)

    def keep_line(self) -> None:
        """Ends the line that a notebook redraws; the next output begins another one."""
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


@dataclass(frozen=True)
class StepFigures:
    """One step: its result, the speed of the last steps, and the time that is left at that speed."""

    step: int  # counted from 1
    steps: int
    result: StepResult
    tokens_per_second: float
    rate: str  # of the model's arithmetic
    seconds_left: float

    def line(self, width: int | None = None) -> str:
        """The plain line, without the least important figures where it is wider than `width` characters."""
        for without in range(4):
            line = " | ".join(self.parts(without))
            if width is None or len(line) <= width:
                break
        return line

    def parts(self, without: int = 0) -> list[str]:
        """The parts of the plain line, `without` the first 0 to 3 of: the arithmetic's rate, z-scores, milliseconds."""
        result = self.result
        loss_z, norm_z = (f" (z {z:+.1f})" if z is not None and without < 2 else "" for z in (result.loss_z, result.norm_z))
        return [
            f"step {self.step:>{len(str(self.steps))}}/{self.steps}",
            f"loss {result.loss:.4f}{loss_z}",
            f"norm {result.norm:.3f}{norm_z}",
            f"lr {result.learning_rate:.2e}",
            *([f"{result.elapsed_seconds * 1e3:.0f} ms"] if without < 3 else []),
            f"{human_count(self.tokens_per_second)} tok/s",
            *([self.rate] if without < 1 else []),
            *([f"skipped: {result.skipped}"] if result.skipped else []),
        ]

    def live_line(self, width: int) -> str:
        """The figures that fit into `width` characters, most important first."""
        result = self.result
        parts = [
            f"{human_seconds(self.seconds_left)} left",
            f"{human_count(self.tokens_per_second)} tok/s",
            f"loss {result.loss:.4f}",
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
    """The speed of the last steps."""

    def __init__(self) -> None:
        self.steps: deque[tuple[int, float]] = deque(maxlen=SPEED_WINDOW)  # tokens, seconds
        self.warming_up = True

    def add(self, tokens: int, elapsed_seconds: float) -> float:
        """Adds a step; returns the mean in tokens per second."""
        if len(self.steps) == 1 and self.warming_up:  # the first step also waits for libraries and page faults
            self.steps.clear()
            self.warming_up = False
        self.steps.append((tokens, elapsed_seconds))
        return sum(tokens for tokens, _ in self.steps) / sum(seconds for _, seconds in self.steps)


class Cadence:
    """Chooses the steps that have a plain line: the first of a process, every n-th, and enough of slow ones that no reader
    takes the run for hung."""

    def __init__(self, every: int, clock: Callable[[], float] = time.monotonic):
        """`clock`: seconds."""
        self.every, self.clock = every, clock
        self.lines, self.last = 0, clock()

    def due(self, step: int, *, always: bool = False) -> bool:
        """True if a step, counted from 1, has a line now; `always`: whatever the time."""
        now = self.clock()
        if not (always or self.lines < FIRST_STEPS or step % self.every == 0 or now - self.last >= QUIET_SECONDS):
            return False
        self.lines, self.last = self.lines + 1, now
        return True
