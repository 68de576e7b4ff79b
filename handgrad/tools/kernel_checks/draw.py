"""Inputs, outputs and accumulators for one launch of an operation."""

import math
from typing import Any

import torch
from torch import Tensor

B, T, V, Vp = 2, 96, 300, 384
N, C, H, F = B * T, 128, 2, 512

Arguments = dict[str, Any]


class Draw:
    """Inputs of a precision, outputs full of NaN, accumulators that hold something already."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device, self.generator = dtype, device, torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        return (torch.randn(*shape, generator=self.generator) * scale).to(self.device, dtype or self.dtype)

    def float32(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self(*shape, scale=scale, dtype=torch.float32)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.full(shape, math.nan, dtype=dtype or self.dtype, device=self.device)

    def empty32(self, *shape: int) -> Tensor:
        return self.empty(*shape, dtype=torch.float32)

    def words(self, *shape: int) -> Tensor:
        return torch.randint(V, shape, generator=self.generator).to(self.device)

    def product(self, O: int, I: int) -> Arguments:
        """Input and weight of a product, scaled so that its result is about 1."""
        return {"inp": self(N, I), "weight": self(O, I, scale=I**-0.5)}

    def float64(self, *values: float) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.device)
