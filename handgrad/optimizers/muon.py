"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) for the matrices of the blocks, AdamW for the rest.

With the gradient G of a matrix W (R, C), momentum b and learning rate lr:

    M = b M + (1 - b) G,  U = (1 - b) G + b M                         Nesterov's momentum
    O = polar(U)                                                      U with all singular values near 1
    v = b2 v + (1 - b2) mean_c(O^2),  N = O / sqrt(v)                 a second moment for each row (Li et al. 2025)
    W = W - lr (s N + decay W where N W > 0),  s = 0.2 sqrt(R C) / |N|

s scales N to a root mean square of 0.2, close to AdamW's updates, so that one learning rate serves both (Liu et al. 2025,
https://arxiv.org/abs/2502.16982). The row-wise moment is NorMuon's (https://arxiv.org/abs/2510.05491). Weights decay only
where the update shrinks them (Chen et al. 2025, https://arxiv.org/abs/2510.12402).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.memory.rows import ParameterRow, Table, rounded_up
from handgrad.ops.sizes import ALIGN_BYTES
from handgrad.optimizers import Owned
from handgrad.optimizers.adamw import AdamW

MATRIX = "matrix"
BATCH_ELEMENTS = 1 << 27  # most elements in one batch of equally shaped matrices


@dataclass(frozen=True)
class Muon:
    adamw: AdamW
    momentum: float
    beta2: float  # of the rows' second moment
    weight_decay: float
    rate: float  # of the matrices: multiplies the step's learning rate

    def state(self, row: ParameterRow) -> dict[str, tuple[int, ...]]:
        """A matrix has a momentum, and a second moment per row."""
        return {"m": row.shape, "v": row.shape[:1]} if self.whole(row) else self.adamw.state(row)

    def whole(self, row: ParameterRow) -> bool:
        return row.group == "matrix"

    def kind(self, row: ParameterRow) -> str | tuple[bool, float]:
        """`MATRIX`, or AdamW's kind."""
        return MATRIX if self.whole(row) else self.adamw.kind(row)

    def scratch_bytes(self, ops: Any, table: Table, dtype: torch.dtype, device: torch.device) -> int:
        """Bytes for the model's largest batch, even if this process owns only a part, and the operations' scratch."""
        needs = [0]
        for (rows, columns), count in Counter(row.shape for row in table if self.whole(row)).items():
            count = min(count, batch_size(rows, columns))
            needs.append(rounded_up(count * rows * columns * polar_dtype(device, dtype).itemsize, ALIGN_BYTES))
            needs[-1] += ops.muon_scratch_bytes(matrices=count, rows=rows, columns=columns)
        return max(needs)

    def update(
        self, ops: ModuleType, owned: Iterable[Owned], controls: Tensor, results: Tensor, scratch: Tensor | None
    ) -> None:
        """Updates vectors and embeddings by AdamW, then the matrices in batches of one shape. `controls` holds step and
        learning rate, `results` the verdict and the clip factor."""
        owned = list(owned)
        self.adamw.update(ops, [part for part in owned if part.kind != MATRIX], controls, results, None)
        for parts in batches([part for part in owned if part.kind == MATRIX]):
            assert scratch is not None
            self.update_batch(ops, parts, controls, results, scratch)

    def update_batch(self, ops: ModuleType, parts: list[Owned], controls: Tensor, results: Tensor, scratch: Tensor) -> None:
        """Updates a batch of matrices. A matrix's bits do not depend on the rest of the batch."""
        weight = parts[0].weight
        dtype, (rows, columns) = polar_dtype(weight.device, weight.dtype), weight.shape
        size = len(parts) * rows * columns * dtype.itemsize
        polar = scratch[:size].view(dtype).view(len(parts), rows, columns)
        scratch = scratch[rounded_up(size, ALIGN_BYTES) :]
        for update, part in zip(polar, parts, strict=True):
            ops.muon_momentum(update, part.state["m"], part.gradient, controls, results, momentum=self.momentum)
        ops.muon_polar(polar, scratch=scratch)
        settings = {"rate": self.rate, "beta2": self.beta2, "weight_decay": self.weight_decay}
        for direction, part in zip(polar, parts, strict=True):
            tensors = part.published, part.weight, part.state["v"], direction
            ops.muon_update(*tensors, controls, results, **settings, scratch=scratch)


def polar_dtype(device: torch.device, exact: torch.dtype) -> torch.dtype:
    """16 bits on a GPU: each polynomial pulls singular values back towards 1 and so corrects the rounding
    (docs/operations/muon.md). "meta" stands for a GPU that this machine lacks."""
    return torch.bfloat16 if device.type in ("cuda", "meta") else exact


def batch_size(rows: int, columns: int) -> int:
    """The most matrices of a shape in one batch."""
    return max(1, BATCH_ELEMENTS // (rows * columns))


def batches(parts: list[Owned]) -> Iterator[list[Owned]]:
    """The matrices of each shape, `batch_size` at a time."""
    shapes = defaultdict[tuple[int, ...], list[Owned]](list)
    for part in parts:
        shapes[tuple(part.weight.shape)].append(part)
    for (rows, columns), of_shape in shapes.items():
        size = batch_size(rows, columns)
        yield from (of_shape[first : first + size] for first in range(0, len(of_shape), size))
