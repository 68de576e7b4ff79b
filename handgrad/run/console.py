"""The console of a run: a live progress line on a terminal, one line that is redrawn in a notebook, plain lines everywhere
else."""

import sys
from collections.abc import Callable
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from handgrad import errors

ConsoleMode = Literal["live", "lines", "nothing"]  # a live line where there is a terminal, plain lines, nothing
NOTEBOOK_WIDTH = 100  # characters; a cell's output shows some more


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
