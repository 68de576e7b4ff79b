"""Dropout's operations in 16 or 32 bits, beside the reference in float64."""

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType

import torch

from handgrad.dropout import reference
from handgrad.dropout.masks import Dropout
from handgrad.tools.kernel_checks.checking import attempt, compare
from handgrad.tools.kernel_checks.draw import Arguments, C, Draw, H, N
from handgrad.tools.kernel_checks.operations import attention


def site(d: Draw) -> Dropout:
    """Samples on both sides of 2^32."""
    return Dropout(torch.tensor([7, (1 << 32) + 7], device=d.device), 0.1, 1337, 2)


def attention_backward(d: Draw) -> Arguments:
    forward: Arguments = {**attention(d, H), "dropout": site(d)}
    reference.attention_forward(**forward)
    return {"dqkv": d.empty(N, 3 * C), "dout": d(N, C), **forward}


DROPOUT_CASES: dict[str, Callable[[Draw], Arguments]] = {
    "dropout_forward": lambda d: {"out": d.empty(N, C), "inp": d(N, C), "dropout": site(d)},
    "dropout_backward": lambda d: {"dinp": d.empty(N, C), "dout": d(N, C), "dropout": site(d)},
    "dropout_residual_forward": lambda d: {"branch_to_out_inout": d(N, C), "residual": d(N, C), "dropout": site(d)},
    "attention_forward": lambda d: {**attention(d, H), "dropout": site(d)},
    "attention_backward": attention_backward,
}


def check_dropout_kernels(kernels: ModuleType, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[bool, str]]:
    """(whether it works, line) for each case."""
    for operation, make in DROPOUT_CASES.items():
        line = operation if operation.startswith("dropout") else f"{operation}, with dropout"
        made = partial(make, Draw(dtype, device))
        yield attempt(line, partial(compare, getattr(kernels, operation), getattr(reference, operation), made))
