"""What a run says, shows and writes down. Of several ranks the first one speaks; the others are silent."""

from pathlib import Path
from typing import Any

import torch

from handgrad import power
from handgrad.parallel.ranks import Ranks
from handgrad.run.console import Display, Shows
from handgrad.run.metrics import Metrics
from handgrad.training.step import StepResult


class Voice:
    """The metrics, the logs and the console of one run."""

    def __init__(self, folder: Path, steps: int, completed: int, ranks: Ranks, shows: Shows = "live"):
        self.metrics = Metrics(folder, completed) if ranks.is_rank_0 else None
        self.display = Display(steps, completed, shows) if ranks.is_rank_0 else None
        # (kind, step) of what the record already says: a resumed run does only what is missing.
        self.recorded: set[tuple[str, int]] = ranks.from_rank_0(
            lambda: set() if self.metrics is None else self.metrics.recorded, "what the record says"
        )

    def say(self, line: str) -> None:
        if self.metrics is not None and self.display is not None:
            self.metrics.text(line)
            self.display.print(line)

    def event(self, step: int, line: str) -> None:
        self.record("event", step=step, text=line)
        self.say(line)

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
            self.say(line)

    def gpu(self, step: int, device: torch.device) -> None:
        """Records what the GPU's sensors say now: the driver's last readings, without waiting for the GPU's work."""
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
