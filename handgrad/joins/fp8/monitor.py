"""Findings about an fp8 run's quantised tensors: for the record, and when one of them saturates."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from handgrad.joins.fp8.formats import AMAX, CLIPPED, SATURATED, USED_SCALE, VANISHED, largest_number, largest_scale
from handgrad.joins.fp8.scaling import Scaling
from handgrad.joins.fp8.tables import HEAD, WEIGHT


@dataclass(frozen=True)
class Finding:
    """A step's statistics of one quantised tensor."""

    name: str
    part: str  # of the GEMMs that read it: "3.mlp", "head"
    amax: float  # the largest magnitude
    limit: float  # the largest magnitude that its scale admits
    scale: float
    saturated_steps: int  # steps in a row, up to this one, whose amax was above the limit
    clipped: float | None  # fraction of the numbers above the limit; None in a step without counts
    vanished: float | None  # fraction of the numbers that became zero


def findings(scaling: Scaling, report: Tensor, micro_steps: int, *, counted: bool) -> tuple[Finding, ...]:
    """The rows of a report (n, REPORT_PLACES) on the host. `micro_steps`: of all lanes.

    A current scale is made again from the step's largest number: the report has only the last one of a single rank.
    """
    found = []
    for row, elements, numbers in zip(scaling.fp8.table, scaling.numbers, report.tolist(), strict=True):
        amax, scale = numbers[AMAX], numbers[USED_SCALE]
        if not scaling.fp8.delayed and 0 < amax < math.inf:
            scale = largest_scale(amax, row.format, scaling.fp8.margin)
        limit = largest_number(row.format) / scale
        seen = elements * (1 if row.kind == WEIGHT else micro_steps)
        clipped, vanished = (numbers[place] / seen if counted else None for place in (CLIPPED, VANISHED))
        found.append(Finding(row.name, row.part, amax, limit, scale, int(numbers[SATURATED]), clipped, vanished))
    return tuple(found)


def summary(found_tensors: Iterable[Finding]) -> dict[str, dict[str, Any]]:
    """By class of tensor (its name without the layer): the widest range of scales and the worst fractions of any layer."""
    classes: dict[str, list[Finding]] = {}
    for finding in found_tensors:
        classes.setdefault(finding.name.rpartition(".")[2], []).append(finding)
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


def saturation_line(finding: Finding, step: int, policy: str) -> str:
    """The message about a tensor that has clipped numbers for too many steps."""
    part = finding.part
    advice = "a --fp8-head without that product" if part == HEAD else f"--fp8-keep-bf16 {part}"
    then = {
        "warn": f"a larger --fp8-margin or {advice} would stop it",
        "widen": "its scale gets one binade of margin more",
    }
    return (
        f"step {step}: {finding.name} clipped numbers in {finding.saturated_steps} steps in a row (largest"
        f" {finding.amax:.3g}, its scale admits {finding.limit:.3g}): {then[policy]}"
    )
