"""The figures of a step as a person follows them: a plain line for the log, a live line that fits the terminal;
in fp8 its quantised tensors."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from handgrad.format import human_count, human_seconds, speed
from handgrad.joins.fp8.bind import REPORT
from handgrad.joins.fp8.scaling import findings, saturation_line, summary
from handgrad.machine import devices
from handgrad.run.log import RunLog
from handgrad.settings.config import RunConfig
from handgrad.training.design import Design
from handgrad.training.step import StepResult

SPEED_WINDOW = 20  # steps over which tokens/s and the remaining time are averaged
FIRST_STEPS = 2  # of a process that have a line each: the first waits for libraries, the second shows the speed
QUIET_SECONDS = 10  # without a line, after which the next step has one


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


class StepLines:
    """Shows the steps of one process, and puts some of them into the log."""

    def __init__(self, log: RunLog, config: RunConfig, design: Design, ranks: int):
        self.log, self.pace, self.cadence = log, Pace(), Cadence(config.log_every)
        self.steps, self.batch = config.steps, config.batch
        self.tokens = self.batch.tokens_before(self.steps)
        peak = devices.peak_flops(design.device)
        self.peak = peak and peak * ranks
        self.flops_per_token = design.flops_per_token

    def show(self, step: int, result: StepResult) -> None:
        """`step` is counted from 1."""
        tokens_per_second = self.pace.add(self.batch.tokens(step - 1), result.elapsed_seconds)
        rate = speed(tokens_per_second, self.flops_per_token, self.peak)
        seconds_left = (self.tokens - self.batch.tokens_before(step)) / tokens_per_second
        figures = StepFigures(step, self.steps, result, tokens_per_second, rate, seconds_left)
        self.log.display.update(step, figures.live_line)
        if self.cadence.due(step, always=step == self.steps or bool(result.skipped)):
            self.log.step_line(figures.line)


def record_fp8(design: Design, scaling: Any, config: RunConfig, result: StepResult, completed: int, log: RunLog) -> None:
    """Records the quantised tensors of a step that counted their numbers, and names the saturated ones. `scaling`: None
    without fp8."""
    if scaling is None:
        return
    counted = design.fp8.counts(completed - 1)
    micro_steps = design.batch.micro_steps(completed - 1) * design.batch.lanes
    tensors = findings(scaling, result.reports[REPORT], micro_steps, counted=counted)
    if counted:
        log.record("fp8", step=completed, tensors=summary(tensors))
    for finding in tensors:
        if finding.saturated_steps == config.fp8_saturation_steps:
            log.event(completed, saturation_line(finding, completed, config.fp8_on_saturation))
