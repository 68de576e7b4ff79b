"""Every operation in 16 or 32 bits, also with dropout, beside the reference in float64: `checking.compare` tells how far it
may be off.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch

from handgrad.joins.dropout import reference as dropout_reference
from handgrad.joins.dropout.reference import Dropout
from handgrad.ops import PICTURE_OPERATIONS, reference
from handgrad.ops.cases import CALLS, OPTIMIZING, Arguments, B, C, Draw, F, N, T
from handgrad.ops.reference.attention import Mask
from handgrad.tools.kernel_checks.checking import attempt, compare

# Line: the arguments by name of the operation that its name begins with; `scratch` is added where that takes one.
Cases = dict[str, Callable[[Draw], Arguments]]


def case(operation: str, **changes: Any) -> Callable[[Draw], Arguments]:
    return lambda d: d.arguments(operation, **changes)


def within_documents(operation: str, **changes: Any) -> Callable[[Draw], Arguments]:
    return lambda d: d.arguments(operation, **changes, **documents(d))


def documents(d: Draw) -> Arguments:
    """Three in the first row, one of them a token; one in the second."""
    starts = torch.zeros(B, T, dtype=torch.int32, device=d.device)
    starts[0, 40:], starts[0, 41:] = 40, 41
    return {"mask": Mask(starts)}


GROUPED = {"H": 2, "K": 1, "D": 64}  # two heads of queries share one of keys and values
TURNED = {**GROUPED, "frequencies": tuple(500000.0 ** (-pair / 32) for pair in range(32)), "scale": 1.2}
NOT_KERNELS = {"residual_forward", *PICTURE_OPERATIONS}
CASES: Cases = {operation: case(operation) for operation in (*CALLS, *OPTIMIZING) if operation not in NOT_KERNELS}
CASES["rmsnorm_forward, without a gain"] = case("rmsnorm_forward", gain=None)
CASES["rmsnorm_backward, without a gain"] = case("rmsnorm_backward", gain=None, dgain_acc=None)
for operation in ("attention_forward", "attention_backward"):
    CASES |= {
        f"{operation}, heads of 128 channels": case(operation, H=1),
        f"{operation}, of grouped heads": case(operation, **GROUPED),
        f"{operation}, within documents": within_documents(operation),
        f"{operation}, of grouped heads within documents": within_documents(operation, **GROUPED),
    }
for way in ("forward", "backward"):
    CASES[f"rotary_{way}, of grouped heads"] = case(f"rotary_{way}", **TURNED)
    CASES[f"gained_qk_norm_rotary_{way}"] = case(f"gained_qk_norm_rotary_{way}", **GROUPED)
for operation in ("classifier_forward", "classifier_forward_backward", "distill_forward_backward"):
    CASES[f"{operation}, with a cap"] = case(operation, softcap=15.0)
    CASES[f"{operation}, some untrained"] = case(operation, untrained=True)
CASES["distill_forward_backward, reverse"] = case("distill_forward_backward", reverse=True)
CASES["tree_sum, rounded"] = lambda d: d.arguments("tree_sum", pieces=d.float32(16, 2 * 4096), rounded=True)
CASES["muon_polar, tall"] = lambda d: {"update_to_polar_inout": d(2, F, C)}


def site(d: Draw) -> Arguments:
    """A site of dropout whose samples lie on both sides of 2^32."""
    return {"dropout": Dropout(torch.tensor([7, (1 << 32) + 7], device=d.device), 0.1, 1337, 2)}


def attention_with_dropout(d: Draw, *, backward: bool, **more: Any) -> Arguments:
    arguments = d.arguments("attention_backward" if backward else "attention_forward", **more) | site(d)
    forward = {name: value for name, value in arguments.items() if name not in ("dqkv", "dout")}
    if backward:
        dropout_reference.attention_forward(**forward)
    return arguments


DROPOUT_CASES: Cases = {
    "dropout_forward": lambda d: {"out": d.empty(N, C), "inp": d(N, C), **site(d)},
    "dropout_backward": lambda d: {"dinp": d.empty(N, C), "dout": d(N, C), **site(d)},
    "dropout_residual_forward": lambda d: {"branch_to_out_inout": d(N, C), "residual": d(N, C), **site(d)},
    "attention_forward, with dropout": partial(attention_with_dropout, backward=False),
    "attention_backward, with dropout": partial(attention_with_dropout, backward=True),
    "attention_forward, with dropout within documents": lambda d: attention_with_dropout(d, backward=False, **documents(d)),
    "attention_backward, with dropout within documents": lambda d: attention_with_dropout(d, backward=True, **documents(d)),
}


def operation_of(line: str) -> str:
    return line.split(",")[0]


def check_kernels(
    kernels: ModuleType, device: torch.device, dtype: torch.dtype, cases: Cases = CASES, specified: ModuleType = reference
) -> Iterator[tuple[bool, str]]:
    """(it works, line) for each case."""
    for line, make in cases.items():
        kernel, right = (getattr(ops, operation_of(line)) for ops in (kernels, specified))
        yield attempt(line, partial(compare, kernel, right, partial(make, Draw(dtype, device))))


def check_dropout_kernels(kernels: ModuleType, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[bool, str]]:
    yield from check_kernels(kernels, device, dtype, DROPOUT_CASES, dropout_reference)
