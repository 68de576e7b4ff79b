"""The scales of an fp8 run: how they begin, how they follow the numbers, what is kept of them in a checkpoint.

Delayed scaling (Micikevicius et al. 2022): a step quantises with scales that follow from the largest numbers of the steps
before, so that producing a tensor and quantising it are one pass. The first step has no steps before it; there one
micro-batch is run ahead with scales made from the very tensors they are for.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.arena import Buffer
from handgrad.config import ModelShape, RunConfig
from handgrad.fp8.formats import (
    AMAX,
    COUNTING,
    E5M2,
    INVERSE,
    LARGEST_EXPONENT,
    MARGIN,
    REPORT_PLACES,
    SATURATED,
    SATURATED_STEPS,
    SCALE,
    STATISTICS_PLACES,
    Quantized,
)
from handgrad.fp8.tables import WEIGHT, Forms, QuantizedRow, quantized_table, scaling_buffers, weight_buffers
from handgrad.models.activations import Activations, activations
from handgrad.models.parameters import ModelTensors, ParameterRow, model_tensors

# Settings that the scales in a checkpoint depend on.
SCALING_RULES = ("fp8_gradients", "fp8_scaling", "fp8_window", "fp8_margin", "fp8_count_every")


def fp8_buffers(config: RunConfig, shape: ModelShape, ops: ModuleType, ranks: int) -> list[Buffer]:
    """The rows of the plan that an fp8 run has beside its activations."""
    count = len(quantized_table(config))
    if not count:
        return []
    parts = ops.statistics_parts(
        batch=config.micro_batch,
        length=shape.sequence_length,
        num_heads=shape.num_heads,
        head_width=shape.channels // shape.num_heads,
        channels=shape.channels,
        widest=shape.feed_forward,
        padded_vocab_size=shape.padded_vocab_size,
    )
    kind = "fp8 scales"
    return [
        *weight_buffers(config, shape),
        *scaling_buffers(config, parts),
        Buffer("fp8.history", (count, config.fp8_window), torch.float32, kind),
        Buffer("fp8.totals", (count, STATISTICS_PLACES), torch.float64, kind),
        Buffer("fp8.report", (count, REPORT_PLACES), torch.float64, kind),
        Buffer("fp8.largest_exponents", (count,), torch.int32, kind),
        Buffer("fp8.everyone", (ranks, made_in_step(config), STATISTICS_PLACES), torch.float64, kind),
    ]


@dataclass
class Scaling:
    """The scales of all quantised tensors, in the order of their table."""

    table: tuple[QuantizedRow, ...]
    first_weight: int  # where the weights begin in the table
    scaling: Tensor  # (n + 1, SCALING_PLACES); the last row belongs to the logits' gradient
    statistics: Tensor  # (n + 1, STATISTICS_PLACES, parts)
    history: Tensor  # (n, window) largest numbers of the last steps
    totals: Tensor  # (n, STATISTICS_PLACES) of this step
    report: Tensor  # (n, REPORT_PLACES) of the step before, for the host
    largest_exponents: Tensor  # (n) int32, of the tensors' formats
    everyone: Tensor  # (ranks, first_weight, STATISTICS_PLACES): the ranks' totals
    numbers: list[int]  # in each tensor
    weights: list[Quantized]  # of this step
    calibrating_weights: list[Quantized]  # the same, which make their own scales
    calibrating_activations: Activations  # the run's activations, which make their own scales
    calibrated: bool = False

    def quantize_weights(self, ops: ModuleType, *, calibrate: bool = False) -> None:
        """Rounds the weights to fp8, and begins the next step's totals with theirs."""
        for weight in self.calibrating_weights if calibrate else self.weights:
            assert weight.plain is not None
            ops.quantize(weight, weight.plain)
        ops.fold_statistics(self.totals[self.first_weight :], self.statistics[self.first_weight : len(self.table)])

    def fold_micro_step(self, ops: ModuleType) -> None:
        """Adds what a micro-step found in activations and gradients to the step's totals."""
        ops.fold_statistics(self.totals[: self.first_weight], self.statistics[: self.first_weight])

    def join_ranks(self) -> None:
        """The step's totals from those of all ranks: the largest amax, the sums of the counts, which are whole numbers; so
        they do not depend on how many ranks there are."""
        totals = self.totals[: self.first_weight]
        torch.amax(self.everyone[..., AMAX], 0, out=totals[:, AMAX])
        torch.sum(self.everyone[..., AMAX + 1 :], 0, out=totals[:, AMAX + 1 :])

    def update(self, ops: ModuleType, controls: Tensor, config: RunConfig) -> None:
        """The next step's scales. A current scale admits its own micro-batch, however large another one's numbers are: that
        is no saturation."""
        delayed = config.fp8_scaling == "delayed"
        ops.update_scaling(
            self.scaling[: len(self.table)],
            self.history,
            self.totals,
            self.report,
            self.largest_exponents,
            controls,
            count_every=config.fp8_count_every,
            saturation_steps=config.fp8_saturation_steps,
            widen=delayed and config.fp8_on_saturation == "widen",
        )
        if not delayed:
            self.scaling[:, SATURATED_STEPS] = 0.0
            self.report[:, SATURATED] = 0.0

    def reset(self, config: RunConfig, gradient_scale: float) -> None:
        """Scales of 1 and no history; of the logits' gradient, at most `gradient_scale`, its static one."""
        self.calibrated = False
        for buffer in (self.scaling, self.statistics, self.history, self.totals, self.report):
            buffer.zero_()
        self.scaling[:, [SCALE, INVERSE]] = 1.0
        self.scaling[:, MARGIN] = config.fp8_margin
        exponents = [LARGEST_EXPONENT[row.format] for row in self.table]
        self.largest_exponents.copy_(torch.tensor(exponents, dtype=torch.int32))
        exponent = LARGEST_EXPONENT[E5M2] - math.ceil(math.log2(gradient_scale))
        self.scaling[-1, SCALE], self.scaling[-1, INVERSE] = 2.0**exponent, 2.0**-exponent

    def count(self, counted: bool) -> None:
        """Whether the step whose scales these are counts its clipped and vanished numbers."""
        self.scaling[:, COUNTING] = float(counted)

    # In a checkpoint.

    def saved(self) -> dict[str, Any]:
        """What a resumed run goes on with, by the tensors' names. (JSON keeps every digit of a float32.)"""
        rows = zip(self.scaling[:-1].tolist(), self.history.tolist(), self.totals.tolist(), strict=True)
        return {row.name: list(parts) for row, parts in zip(self.table, rows, strict=True)}

    def restore(self, saved: Mapping[str, Any]) -> bool:
        """Takes up what `saved` returned; False, and nothing changed, if a tensor or its whole window is not in it."""
        if not saved.keys() >= {row.name for row in self.table}:
            return False
        scaling, history, totals = zip(*(saved[row.name] for row in self.table), strict=True)
        if len(history[0]) != self.history.shape[1]:
            return False
        self.scaling[:-1].copy_(torch.tensor(scaling))
        self.history.copy_(torch.tensor(history))
        self.totals.copy_(torch.tensor(totals, dtype=torch.float64))
        self.calibrated = True
        return True


def made_in_step(config: RunConfig) -> int:
    """How many quantised tensors a micro-step makes: all but the weights, which come last in the table."""
    return sum(row.kind != WEIGHT for row in quantized_table(config))


def make_scaling(config: RunConfig, table: tuple[ParameterRow, ...], views: dict[str, Tensor]) -> Scaling:
    """The run's scales over the arena's views."""
    rows = quantized_table(config)

    def weights(*, current: bool) -> list[Quantized]:
        model = tensors_of(config, table, views, current=current)
        found = (model.head, *(getattr(block, name) for block in model.blocks for name in vars(block)))
        return [form for form in found if isinstance(form, Quantized)]

    return Scaling(
        table=rows,
        first_weight=made_in_step(config),
        scaling=views["fp8.scaling"],
        statistics=views["fp8.statistics"],
        history=views["fp8.history"],
        totals=views["fp8.totals"],
        report=views["fp8.report"],
        largest_exponents=views["fp8.largest_exponents"],
        everyone=views["fp8.everyone"],
        numbers=[numbers_of(row, views) for row in rows],
        weights=weights(current=config.fp8_scaling == "current"),
        calibrating_weights=weights(current=True),
        calibrating_activations=activations(views, Forms(rows, views, current=True)),
    )


def numbers_of(row: QuantizedRow, views: Mapping[str, Tensor]) -> int:
    """How many numbers a quantised tensor has. The forms of a gradient are stored once for all blocks."""
    for name in (row.name, row.name.rpartition(".")[2]):
        for form in ("rows", "columns"):
            if f"{name}.{form}" in views:
                return views[f"{name}.{form}"].numel()
    raise AssertionError(f"{row.name} has no fp8 form")


def tensors_of(
    config: RunConfig, table: tuple[ParameterRow, ...], views: dict[str, Tensor], *, current: bool
) -> ModelTensors:
    """The weights as the model's products read them."""
    return model_tensors(views["parameters"], table, Forms(quantized_table(config), views, current=current))
