"""The log of a run: its files and its console. Only rank 0 logs."""

from pathlib import Path
from typing import Any

import torch

from handgrad import power
from handgrad.parallel.ranks import Ranks
from handgrad.run.console import Display, Shows
from handgrad.run.metrics import Metrics
from handgrad.training.step import StepResult


class RunLog:
    """The metrics, the log files and the console of one run; on other ranks than 0 it does nothing."""

    def __init__(self, folder: Path, steps: int, completed: int, ranks: Ranks, shows: Shows = "live"):
        self.metrics = Metrics(folder, completed) if ranks.is_rank_0 else None
        self.display = Display(steps, completed, shows) if ranks.is_rank_0 else None
        # (kind, step) of the records that exist: a resumed run makes only those that are missing.
        self.recorded: set[tuple[str, int]] = ranks.from_rank_0(
            lambda: set() if self.metrics is None else self.metrics.recorded, "the run's records"
        )

    def line(self, line: str) -> None:
        if self.metrics is not None and self.display is not None:
            self.metrics.text(line)
            self.display.print(line)

    def event(self, step: int, line: str) -> None:
        self.record("event", step=step, text=line)
        self.line(line)

    def record(self, kind: str, **values: Any) -> None:
        if self.metrics is not None:
            self.metrics.record(kind, **values)

    def step(self, step: int, result: StepResult, tokens: int) -> None:
        if self.metrics is not None:
            self.metrics.step(step, result, tokens)

    def main_log(self, line: str) -> None:
        if self.metrics is not None:
            self.metrics.main_line(line)

    def validation(self, step: int, loss: float, bits_per_byte: float | None, line: str) -> None:
        if self.metrics is not None:
            self.metrics.validation(step, loss, bits_per_byte)
            self.line(line)

    def gpu(self, step: int, device: torch.device) -> None:
        """Records the driver's last readings of the GPU's sensors, without waiting for the GPU."""
        if (reading := power.snapshot(device)) is not None:
            self.record("gpu", step=step, **reading)

    def show(self, step: int, line: str, remaining_seconds: float) -> None:
        """Moves the progress line."""
        if self.display is not None:
            self.display.update(step, line, remaining_seconds)

    def sync(self) -> None:
        if self.metrics is not None:
            self.metrics.sync()

    def close(self) -> None:
        if self.metrics is not None and self.display is not None:
            self.display.close()
            self.metrics.close()
