"""The scales of an fp8 run: calibration, update after each step, their part of a checkpoint, and findings from their
statistics.

Delayed scaling (Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433): a step quantises with scales from the largest
numbers of earlier steps, so one pass produces and quantises a tensor. Calibration runs one micro-batch before the first
step, in which each tensor sets its own scale. A tensor that is 0 there, like a gradient below a projection that starts at
zero, gets its first scale before the next step or the one after it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.errors import UsageError
from handgrad.joins.fp8 import formats
from handgrad.joins.fp8.formats import (
    AMAX,
    CLIPPED,
    COUNTING,
    E5M2,
    GRADIENT_FORMATS,
    INVERSE,
    LARGEST_EXPONENT,
    MARGIN,
    SATURATED,
    SCALE,
    USED_SCALE,
    VANISHED,
    GradientFormats,
    largest_number,
    largest_scale,
)
from handgrad.joins.fp8.tables import (
    HEAD,
    WEIGHT,
    Forms,
    Fp8Gemms,
    QuantizedRow,
    activation_buffers,
    quantized_table,
    quantized_tensors,
    scaling_buffers,
    weight_buffers,
    without_columns,
)
from handgrad.memory.activations import ActivationRow
from handgrad.memory.arena import Buffer
from handgrad.memory.rows import Table

MOST_CALIBRATIONS = 8  # a tensor that is still 0 after these may stay 0, for example if frozen
FORWARD = frozenset({"forward"})  # the head's GEMMs in a forward pass without backward
UNCALIBRATED = "uncalibrated"  # a checkpoint's mark that the next step calibrates too


@dataclass(frozen=True)
class Fp8Design:
    """The resolved fp8 settings of a run."""

    forms: Forms  # available forms of tensors
    gemms: Fp8Gemms
    gradients: GradientFormats
    table: tuple[QuantizedRow, ...]
    delayed: bool  # delayed scaling; else current
    window: int  # a delayed scale fits the largest number of this many steps
    margin: int  # binades of headroom
    count_every: int  # steps between counts of clipped and vanished numbers
    saturation_steps: int  # clipping in this many steps in a row triggers a reaction
    widen: bool  # give a saturated tensor another binade of margin
    statistics_parts: int  # most parts of a tensor's statistics

    @cached_property
    def first_weight(self) -> int:
        """The index of the first weight in the table. Micro-steps write the tensors before it."""
        return sum(row.kind != WEIGHT for row in self.table)

    def counts(self, step: int) -> bool:
        """True if 0-based `step` counts clipped and vanished numbers."""
        return (step + 1) % self.count_every == 0

    def buffers(self, parameters: Table, ranks: int) -> list[Buffer]:
        count, kind = len(self.table), "fp8 scales"
        if not count:
            return []
        return [
            *weight_buffers(self.table, parameters, self.gemms),
            *scaling_buffers(count, self.statistics_parts),
            Buffer("fp8.history", (count, self.window), torch.float32, kind),
            Buffer("fp8.totals", (count, formats.STATISTICS_PLACES), torch.float64, kind),
            Buffer("fp8.report", (count, formats.REPORT_PLACES), torch.float64, kind),
            Buffer("fp8.largest_exponents", (count,), torch.int32, kind),
            Buffer("fp8.everyone", (ranks, self.first_weight, formats.STATISTICS_PLACES), torch.float64, kind),
        ]


class Scaling:
    """The scales of all quantised tensors, in table order, and the launches that compute and update them."""

    def __init__(self, fp8: Fp8Design, ops: ModuleType, views: Mapping[str, Tensor], weights: Mapping[str, Tensor]):
        """`views`: of the run's plan; `weights`: 16-bit views of the parameters by name."""
        self.fp8, self.ops = fp8, ops
        self.scaling = views["fp8.scaling"]  # (n + 1, SCALING_PLACES); the last row belongs to the logits' gradient
        self.statistics = views["fp8.statistics"]  # (n + 1, STATISTICS_PLACES, parts)
        self.history = views["fp8.history"]  # (n, window) amax of the last steps
        self.totals = views["fp8.totals"]  # (n, STATISTICS_PLACES) of this step
        self.report = views["fp8.report"]  # (n, REPORT_PLACES) of the previous step, for the host
        self.largest_exponents = views["fp8.largest_exponents"]  # (n) int32, of the tensors' formats
        self.everyone = views["fp8.everyone"]  # (ranks, first_weight, STATISTICS_PLACES): the ranks' totals
        self.tensors = quantized_tensors(fp8.table, views, weights, current=not fp8.delayed)
        self.calibrating = quantized_tensors(fp8.table, views, weights, current=True)
        stored = ([f"{row.stored_as}.{form}" for form in ("rows", "columns")] for row in fp8.table)
        self.numbers = [next(views[name].numel() for name in names if name in views) for names in stored]
        self.calibrated_from: int | None = None  # the first step for which every tensor had a number to set its scale

    @property
    def calibrated(self) -> bool:
        return self.calibrated_from is not None

    def calibrates(self, step: int) -> bool:
        """True if `step` calibrates before it begins, also when it begins again."""
        return self.calibrated_from is None or step < self.calibrated_from

    def conclude_calibration(self, step: int) -> None:
        """Records if every tensor had a nonzero number. Clears the statistics: a step may write other parts of them."""
        amax = self.statistics[: len(self.fp8.table), AMAX].amax(-1)
        done = not self.fp8.delayed or step + 1 >= MOST_CALIBRATIONS or bool((amax > 0).all())
        self.calibrated_from = step if done else None
        self.statistics[: self.fp8.first_weight].zero_()

    def quantize_weights(self, *, calibrate: bool = False) -> None:
        """Rounds the weights to fp8, and starts the next step's totals with theirs. Skips weights without a 16-bit form."""
        for weight in weights_of(self.calibrating if calibrate else self.tensors):
            if weight.plain is not None:
                self.ops.quantize(weight, weight.plain)
        first, end = self.fp8.first_weight, len(self.fp8.table)
        self.ops.fold_statistics(self.totals[first:], self.statistics[first:end])

    def requantize(self) -> None:
        """Recomputes the fp8 weights of a resumed run at their saved scales."""
        if self.calibrated:
            totals = self.totals.clone()
            self.quantize_weights()
            self.totals.copy_(totals)  # these already include the weights

    def fold_micro_step(self) -> None:
        """Adds a micro-step's statistics of activations and gradients to the step's totals."""
        first = self.fp8.first_weight
        self.ops.fold_statistics(self.totals[:first], self.statistics[:first])

    def join_ranks(self) -> None:
        """Joins all ranks' totals of the step: maximum of amax, sums of counts, which are integers and so exact."""
        totals = self.totals[: self.fp8.first_weight]
        torch.amax(self.everyone[..., AMAX], 0, out=totals[:, AMAX])
        torch.sum(self.everyone[..., AMAX + 1 :], 0, out=totals[:, AMAX + 1 :])

    def update(self, controls: Tensor) -> None:
        """Computes the next step's scales. Each fits its own micro-batch; larger numbers in others are no saturation."""
        self.ops.update_scaling(
            self.scaling[: len(self.fp8.table)],
            self.history,
            self.totals,
            self.report,
            self.largest_exponents,
            controls,
            count_every=self.fp8.count_every,
            saturation_steps=self.fp8.saturation_steps,
            widen=self.fp8.delayed and self.fp8.widen,
        )
        if not self.fp8.delayed:
            self.scaling[:, formats.SATURATED_STEPS] = 0.0
            self.report[:, SATURATED] = 0.0

    def reset(self, gradient_scale: float) -> None:
        """Sets scales to 1 and clears their history. The logits' gradient, at most `gradient_scale`, has a static scale."""
        self.calibrated_from = None
        for buffer in (self.scaling, self.statistics, self.history, self.totals, self.report):
            buffer.zero_()
        self.scaling[:, [SCALE, INVERSE]] = 1.0
        self.scaling[:, MARGIN] = self.fp8.margin
        exponents = [LARGEST_EXPONENT[row.format] for row in self.fp8.table]
        self.largest_exponents.copy_(torch.tensor(exponents, dtype=torch.int32))
        exponent = LARGEST_EXPONENT[E5M2] - math.ceil(math.log2(gradient_scale))
        self.scaling[-1, SCALE], self.scaling[-1, INVERSE] = 2.0**exponent, 2.0**-exponent

    def set_counting(self, counted: bool) -> None:
        """Turns counting of clipped and vanished numbers on or off for the next step."""
        self.scaling[:, COUNTING] = float(counted)

    # In a checkpoint.

    def saved(self) -> dict[str, Any]:
        """The scales and their history, by tensor name. (JSON represents every float32 exactly.)"""
        rows = zip(self.scaling[:-1].tolist(), self.history.tolist(), self.totals.tolist(), strict=True)
        histories: dict[str, Any] = {row.name: list(parts) for row, parts in zip(self.fp8.table, rows, strict=True)}
        return histories if self.calibrated else {**histories, UNCALIBRATED: True}

    def restore(self, saved: Mapping[str, Any]) -> bool:
        """Loads the result of `saved`. Returns False and changes nothing if a tensor or its complete window is missing."""
        if not saved.keys() >= {row.name for row in self.fp8.table}:
            return False
        scaling, history, totals = zip(*(saved[row.name] for row in self.fp8.table), strict=True)
        if len(history[0]) != self.history.shape[1]:
            return False
        self.scaling[:-1].copy_(torch.tensor(scaling))
        self.history.copy_(torch.tensor(history))
        self.totals.copy_(torch.tensor(totals, dtype=torch.float64))
        self.calibrated_from = None if UNCALIBRATED in saved else 0
        return True


def weights_of(tensors: Mapping[str, Any]) -> list[Any]:
    """The quantised weights: the head's first, then block by block in parameter order."""
    blocks = [tensor for name, tensor in tensors.items() if name.endswith("_weight")]
    return [*([tensors["head"]] if "head" in tensors else []), *blocks]


# Forward without training: fixed weights and the final scales of their training.


class Fp8Forward:
    """The rows of a forward pass in fp8: `activations` replace the plain ones, `beside` has weights and scales."""

    def __init__(self, fp8: Fp8Design, parameters: Table, rows: Sequence[ActivationRow], forms: Forms):
        """`rows` are the activations of a forward pass."""
        gemms, gradients = replace(fp8.gemms, head=fp8.gemms.head & FORWARD), GRADIENT_FORMATS["e4m3"]
        self.current = not fp8.delayed
        self.table = quantized_table(parameters, rows, forms, gemms, gradients)
        self.activations = without_columns(activation_buffers(rows, forms, gemms, gradients, recompute=0))
        weights = without_columns(weight_buffers(self.table, parameters, gemms))
        self.beside = [*weights, *scaling_buffers(len(self.table), fp8.statistics_parts)]

    def tensors(
        self, ops: ModuleType, views: Mapping[str, Tensor], weights: Mapping[str, Tensor], saved: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Quantises `weights` (16-bit, by name); returns all tensors by name, over `views` of both kinds of rows.
        `saved`: a checkpoint's scales (`Scaling.saved`). Raises `UsageError` if a tensor has no scale there."""
        if missing := [row.name for row in self.table if row.name not in saved]:
            raise UsageError(f"the checkpoint has no fp8 scale of {missing[0]}; use --precision bf16")
        for index, row in enumerate(self.table):
            views["fp8.scaling"][index].copy_(torch.tensor(saved[row.name][0]))
        tensors = quantized_tensors(self.table, views, weights, current=self.current)
        for weight in weights_of(tensors):
            ops.quantize(weight, weight.plain)
        return tensors


# Findings about a run's quantised tensors, for the record and for saturation messages.


@dataclass(frozen=True)
class Finding:
    """A step's statistics of one quantised tensor."""

    name: str
    part: str  # of the GEMMs that read it: "3.mlp", "head"
    amax: float  # the largest magnitude
    limit: float  # the largest magnitude that its scale can represent
    scale: float
    saturated_steps: int  # steps in a row, up to this one, whose amax was above the limit
    clipped: float | None  # fraction of numbers above the limit; None without counting
    vanished: float | None  # fraction of numbers rounded to zero


def findings(scaling: Scaling, report: Tensor, micro_steps: int, *, counted: bool) -> tuple[Finding, ...]:
    """Converts a report (n, REPORT_PLACES) on the host to findings. `micro_steps`: over all lanes.

    Recomputes a current scale from the step's amax, because the report has only the last micro-batch's, of one rank."""
    lines = []
    for row, elements, numbers in zip(scaling.fp8.table, scaling.numbers, report.tolist(), strict=True):
        amax, scale = numbers[AMAX], numbers[USED_SCALE]
        if not scaling.fp8.delayed and 0 < amax < math.inf:
            scale = largest_scale(amax, row.format, scaling.fp8.margin)
        limit = largest_number(row.format) / scale
        seen = elements * (1 if row.kind == WEIGHT else micro_steps)
        clipped, vanished = (numbers[column] / seen if counted else None for column in (CLIPPED, VANISHED))
        lines.append(Finding(row.name, row.part, amax, limit, scale, int(numbers[SATURATED]), clipped, vanished))
    return tuple(lines)


def summary(found_tensors: Iterable[Finding]) -> dict[str, dict[str, Any]]:
    """Per class of tensor (name without the layer): the range of scales and the worst fractions over its layers."""
    classes: dict[str, list[Finding]] = {}
    for finding in found_tensors:
        classes.setdefault(finding.name.rpartition(".")[2], []).append(finding)
    return {
        name: {
            "largest_amax": max(line.amax for line in layers),
            "smallest_scale": min(line.scale for line in layers),
            "largest_scale": max(line.scale for line in layers),
            "clipped_fraction": max(line.clipped or 0.0 for line in layers),
            "vanished_fraction": max(line.vanished or 0.0 for line in layers),
            "most_vanished": max(layers, key=lambda line: line.vanished or 0.0).name,
        }
        for name, layers in classes.items()
    }


def saturation_line(finding: Finding, step: int, policy: str) -> str:
    """The message about a tensor that clipped numbers for too many steps."""
    part = finding.part
    advice = "a --fp8-head without that product" if part == HEAD else f"--fp8-keep-bf16 {part}"
    then = {"warn": f"a larger --fp8-margin or {advice} would stop it", "widen": "its scale gets one binade of margin more"}
    return (
        f"step {step}: {finding.name} clipped numbers in {finding.saturated_steps} steps in a row (largest"
        f" {finding.amax:.3g}, its scale admits {finding.limit:.3g}): {then[policy]}"
    )
