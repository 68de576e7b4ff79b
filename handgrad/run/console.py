"""The console of a run: a live progress line on a terminal, plain lines everywhere else."""

import os
import sys
from collections import deque
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from handgrad.format import human_count, human_seconds
from handgrad.training.step import StepResult

SPEED_WINDOW = 20  # steps over which tokens/s and the remaining time are averaged
Shows = Literal["live", "lines", "nothing"]  # on the console: a live line where there is a terminal, plain lines, nothing


def step_line(step: int, steps: int, result: StepResult, seconds: float, tokens_per_second: float, rate: str) -> str:
    """The plain line of one step."""
    loss_z, norm_z = (f" (z {z:+.1f})" if z is not None else "" for z in (result.loss_z, result.norm_z))
    skipped = f" | skipped: {result.skipped}" if result.skipped else ""
    return (
        f"step {step:>{len(str(steps))}}/{steps} | loss {result.loss:.4f}{loss_z} | norm {result.norm:.3f}{norm_z}"
        f" | lr {result.learning_rate:.2e} | {seconds * 1e3:.0f} ms | {human_count(tokens_per_second)} tok/s | {rate}"
        f"{skipped}"
    )


class Pace:
    """The mean length of the last steps."""

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=SPEED_WINDOW)
        self.warming_up = True

    def add(self, elapsed_seconds: float) -> float:
        """Adds a step; returns the mean in seconds."""
        if len(self.seconds) == 1 and self.warming_up:  # the first step also waits for libraries and page faults
            self.seconds.clear()
            self.warming_up = False
        self.seconds.append(elapsed_seconds)
        return sum(self.seconds) / len(self.seconds)


class Display:
    """A live line with a bar on a terminal; nothing but the plain lines otherwise."""

    def __init__(self, steps: int, completed: int, shows: Shows):
        self.console = Console(highlight=False)
        self.live = shows == "live" and sys.stdout.isatty()
        self.closed = shows == "nothing"
        columns = (BarColumn(bar_width=24), TextColumn("{task.description}"))
        self.progress = Progress(*columns, console=self.console, transient=True, refresh_per_second=4)
        self.task = self.progress.add_task("", total=steps, completed=completed)
        if self.live:
            self.progress.start()

    def update(self, completed: int, line: str, eta_seconds: float) -> None:
        if self.live:
            text = f"{line} | {human_seconds(eta_seconds)} left".replace("[", "\\[")
            self.progress.update(self.task, completed=completed, description=text)

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
