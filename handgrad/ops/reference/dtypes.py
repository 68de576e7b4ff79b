"""The dtype in which the formulas are computed."""

import torch
from torch import Tensor


def statistics_dtype(tensor: Tensor) -> torch.dtype:
    """Float32, or float64 for tensors of float64: of statistics, and of all that is rounded once, at its end."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
