"""The quantised tensors of a forward pass alone: weights at rest, at the scales that their training had come to."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.errors import UsageError
from handgrad.joins.fp8.formats import GRADIENT_FORMATS
from handgrad.joins.fp8.scaling import Fp8Design, weights_of
from handgrad.joins.fp8.tables import (
    Forms,
    activation_buffers,
    quantized_table,
    quantized_tensors,
    scaling_buffers,
    weight_buffers,
    without_columns,
)
from handgrad.memory.activations import ActivationRow
from handgrad.memory.rows import Table

FORWARD = frozenset({"forward"})  # of the head's GEMMs


class Fp8Forward:
    """The rows of a forward pass in fp8: `activations` replace the plain ones, `beside` them are weights and scales."""

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
        """The tensors by name, over `views` of both kinds of rows; the `weights` (in 16 bits, by name) are quantised.
        `saved`: of a checkpoint, by `Scaling.saved`. Raises `UsageError` if a tensor has no scale there."""
        missing = [row.name for row in self.table if row.name not in saved]
        if missing:
            raise UsageError(f"the checkpoint has no fp8 scale of {missing[0]}; use --precision bf16")
        for place, row in enumerate(self.table):
            views["fp8.scaling"][place].copy_(torch.tensor(saved[row.name][0]))
        found = quantized_tensors(self.table, views, weights, current=self.current)
        for weight in weights_of(found):
            ops.quantize(weight, weight.plain)
        return found
