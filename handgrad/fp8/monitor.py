"""What an fp8 run says about its quantised tensors: for the record, and when one of them saturates."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from handgrad.config import RunConfig
from handgrad.fp8.formats import AMAX, CLIPPED, LARGEST_EXPONENT, LARGEST_MANTISSA, SATURATED, USED_SCALE, VANISHED
from handgrad.fp8.scaling import Scaling
from handgrad.fp8.tables import WEIGHT, part_of


@dataclass(frozen=True)
class Watched:
    """What a step found out about one quantised tensor."""

    name: str
    amax: float  # the largest magnitude
    limit: float  # the largest magnitude that its scale admits
    scale: float
    saturated_steps: int  # steps in a row, up to this one, whose amax was above the limit
    clipped: float | None  # fraction of the numbers above the limit; None in a step without counts
    vanished: float | None  # fraction of the numbers that became zero


def watched(scaling: Scaling, report: Tensor, micro_steps: int, *, counted: bool) -> tuple[Watched, ...]:
    """The lines of a report (n, REPORT_PLACES) that has come to the host."""
    lines = []
    for row, numbers, line in zip(scaling.table, scaling.numbers, report.tolist(), strict=True):
        scale = line[USED_SCALE]
        limit = LARGEST_MANTISSA * 2.0 ** LARGEST_EXPONENT[row.format] / scale
        seen = numbers * (1 if row.kind == WEIGHT else micro_steps)
        clipped, vanished = (line[place] / seen if counted else None for place in (CLIPPED, VANISHED))
        lines.append(Watched(row.name, line[AMAX], limit, scale, int(line[SATURATED]), clipped, vanished))
    return tuple(lines)


def summary(lines: Iterable[Watched]) -> dict[str, dict[str, Any]]:
    """By class of tensor (its name without the layer): the widest range of scales and the worst fractions of any layer."""
    classes: dict[str, list[Watched]] = {}
    for line in lines:
        classes.setdefault(line.name.rpartition(".")[2], []).append(line)
    return {
        name: {
            "largest_amax": max(line.amax for line in found),
            "smallest_scale": min(line.scale for line in found),
            "largest_scale": max(line.scale for line in found),
            "clipped_fraction": max(line.clipped or 0.0 for line in found),
            "vanished_fraction": max(line.vanished or 0.0 for line in found),
            "most_vanished": max(found, key=lambda line: line.vanished or 0.0).name,
        }
        for name, found in classes.items()
    }


@dataclass
class LeftFp8:
    """Parts of blocks (or the head) that a run has moved to bf16, and those it is about to, with the number of completed
    steps after which it will."""

    left: list[str] = field(default_factory=list)
    leaving: dict[str, int] = field(default_factory=dict)

    def leave(self, part: str, after: int) -> None:
        self.leaving.setdefault(part, after)

    def due(self, completed: int) -> bool:
        return any(after <= completed for after in self.leaving.values())

    def settle(self, completed: int) -> list[str]:
        """The parts that leave now."""
        parts = [part for part, after in self.leaving.items() if after <= completed]
        self.leaving = {part: after for part, after in self.leaving.items() if after > completed}
        self.left += parts
        return parts

    def config(self, config: RunConfig) -> RunConfig:
        """`config` with these products in bf16."""
        blocks = ",".join([config.fp8_keep_bf16, *(part for part in self.left if part != "head")])
        return replace(config, fp8_keep_bf16=blocks, fp8_head="" if "head" in self.left else config.fp8_head)


def saturation_line(line: Watched, step: int, policy: str) -> str:
    """The message about a tensor that has clipped numbers for too many steps."""
    part = part_of(line.name)
    advice = "a --fp8-head without that product" if part == "head" else f"--fp8-keep-bf16 {part}"
    then = {
        "warn": f"a larger --fp8-margin or {advice} would stop it",
        "widen": "its scale gets one binade of margin more",
        "bf16": f"{part} goes to bf16 after the next step",
    }
    return (
        f"step {step}: {line.name} clipped numbers in {line.saturated_steps} steps in a row (largest {line.amax:.3g}, its"
        f" scale admits {line.limit:.3g}): {then[policy]}"
    )
