"""The console of a run: a live progress line on a terminal, plain lines everywhere else."""

import os
import sys
from collections.abc import Callable
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

Shows = Literal["live", "lines", "nothing"]  # on the console: a live line where there is a terminal, plain lines, nothing


class Display:
    """A live line with a bar on a terminal; nothing but the plain lines otherwise."""

    def __init__(self, steps: int, completed: int, shows: Shows):
        self.console = Console(highlight=False)
        self.live = shows == "live" and sys.stdout.isatty()
        self.closed = shows == "nothing"
        self.bar = BarColumn()
        columns = (self.bar, TextColumn("{task.description}", markup=False))
        self.progress = Progress(*columns, console=self.console, transient=True, refresh_per_second=4)
        self.task = self.progress.add_task("", total=steps, completed=completed)
        if self.live:
            self.progress.start()

    def update(self, completed: int, line: Callable[[int], str]) -> None:
        """Redraws the live line, if there is one. `line`: its figures for a width in characters."""
        if self.live:
            width = self.console.width
            self.bar.bar_width = bar_width = min(24, width // 5)
            self.progress.update(self.task, completed=completed, description=line(width - bar_width - 1))

    def print(self, text: str) -> None:
        """A line on the console. When its reader has gone (`| head`), the run goes on without it; the log has it all."""
        if self.closed:
            return
        try:
            self.console.print(text, markup=False, soft_wrap=True)
        except (BrokenPipeError, SystemExit):  # rich turns the first into the second
            self.closed = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def close(self) -> None:
        if self.live:
            self.progress.stop()
