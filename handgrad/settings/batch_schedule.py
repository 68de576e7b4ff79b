"""The tokens of each optimizer step: one number for the whole run, or stages in which the batch grows.

A stage applies from its first step on. The step alone gives the position in the data: the tokens of all steps before it.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from handgrad.errors import UsageError


class Stage(NamedTuple):
    """Steps of one size."""

    first_step: int  # 0-based: the number of steps before it
    tokens_per_step: int

    def __str__(self) -> str:
        return f"{self.first_step}:{self.tokens_per_step}"


@dataclass(frozen=True)
class BatchSchedule:
    """The stages of a run in order; the first starts at step 0."""

    stages: tuple[Stage, ...]

    def tokens(self, step: int) -> int:
        """The tokens of 0-based `step`."""
        return next(stage.tokens_per_step for stage in reversed(self.stages) if stage.first_step <= step)

    def spans(self, steps: int) -> list[tuple[Stage, int]]:
        """The stages of the first `steps` steps, each with its number of steps."""
        return [
            (stage, min(end, steps) - stage.first_step)
            for stage, end in zip(self.stages, [*(stage.first_step for stage in self.stages[1:]), steps], strict=True)
            if stage.first_step < steps
        ]

    def tokens_before(self, step: int) -> int:
        """The tokens of all steps before 0-based `step`."""
        return sum(stage.tokens_per_step * steps for stage, steps in self.spans(step))

    @property
    def largest(self) -> int:
        """The tokens of the largest step."""
        return max(stage.tokens_per_step for stage in self.stages)

    @property
    def common(self) -> int:
        """The greatest common divisor of all steps' tokens: a micro-batch divides every step if it divides this."""
        return math.gcd(*(stage.tokens_per_step for stage in self.stages))


def parse_schedule(tokens_per_step: int, text: str) -> BatchSchedule:
    """`tokens_per_step`, changed to TOKENS after STEP steps by `text`: STEP:TOKENS with commas. Raises `UsageError`."""
    stages = [Stage(0, tokens_per_step)]
    for entry in filter(None, (entry.strip() for entry in text.split(","))):
        step, colon, tokens = (part.strip() for part in entry.partition(":"))
        if not (colon and step.isdecimal() and tokens.isdecimal() and int(tokens)):
            raise UsageError(
                f"batch_schedule must be STEP:TOKENS with commas, such as 1000:262144,4000:524288, found {entry!r}"
            )
        stage = Stage(int(step), int(tokens))
        if stage.first_step == 0:
            raise UsageError(
                f"batch_schedule changes the batch after step 1 or later, found {entry!r}; the first steps' size is"
                f" --tokens-per-step {stage.tokens_per_step}"
            )
        if stage.first_step <= stages[-1].first_step:
            raise UsageError(f"the steps of batch_schedule must rise, found {stage} after {stages[-1]}")
        stages.append(stage)
    return BatchSchedule(tuple(stages))
