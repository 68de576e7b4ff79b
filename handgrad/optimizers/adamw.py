"""AdamW (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101). Vectors do not decay. A parameter's `rate` multiplies
the learning rate lr of its step, but not of its decay.

m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2
w = (1 - lr decay) w - rate lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
"""

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.memory.rows import ParameterRow, Table
from handgrad.optimizers import Owned


@dataclass(frozen=True)
class AdamW:
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    seed: int  # of stochastic rounding

    def state(self, row: ParameterRow) -> dict[str, tuple[int, ...]]:
        return {"m": row.shape, "v": row.shape}

    def whole(self, row: ParameterRow) -> bool:
        return False

    def kind(self, row: ParameterRow) -> tuple[bool, float]:
        """(True if the parameter decays, its rate)."""
        return row.group != "vector", row.rate

    def scratch_bytes(self, ops: Any, table: Table, dtype: torch.dtype, device: torch.device) -> int:
        return 0

    def update(
        self, ops: ModuleType, owned: Iterable[Owned], controls: Tensor, results: Tensor, scratch: Tensor | None
    ) -> None:
        """One call per range. `controls` holds step and learning rate, `results` the verdict and the clip factor."""
        settings = {"beta1": self.beta1, "beta2": self.beta2, "epsilon": self.epsilon, "seed": self.seed}
        for part in owned:
            assert isinstance(part.kind, tuple)
            decays, rate = part.kind
            weight_decay = self.weight_decay / rate if decays else 0.0  # the operation multiplies it by rate
            tensors = part.published, part.weight, part.state["m"], part.state["v"], part.gradient, controls, results
            of_part = {"weight_decay": weight_decay, "rate": rate, "first_element": part.first_element}
            ops.adamw_update(*tensors, **settings, **of_part)
