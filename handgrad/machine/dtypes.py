"""Accumulator dtype for a given tensor dtype."""

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float32, or float64 for float64: of statistics, gradient accumulators, master weights, and formulas that round once,
    at their end."""
    return torch.float64 if dtype == torch.float64 else torch.float32
