"""A launch, its results, the right ones, and how far these may differ."""

import inspect
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from handgrad.ops import rounding
from handgrad.ops.cases import Arguments, copies

SCRATCH_BYTES = 64 << 20  # more than any operation needs at these sizes
LEAST_ROUNDINGS = 4
SMALLEST = 1e-30  # the norm of zeros

Compared = Iterator[tuple[Tensor, Tensor, float]]  # found, right, the allowed relative error


def attempt(line: str, compared: Callable[[], Compared]) -> tuple[bool, str]:
    """(it works, line). The tensor whose error exceeds the allowed one by the largest factor counts."""
    worst = (0.0, 0.0)
    try:
        for result, exact, allowed in compared():
            error = relative_error(result, exact)
            if beyond(error, allowed) > beyond(*worst):
                worst = error, allowed
    # The compiler, cuBLASLt, cuDNN and the driver have no exception in common. Nothing is hidden: each failure is a
    # line of its own that makes `doctor` fail, and the cases after it still run.
    except Exception as failure:  # reported by its type
        message = " ".join(f"{type(failure).__name__}: {failure}".split())
        return False, f"{line} failed: {message:.200}; use --backend reference"
    error, allowed = worst
    figures = f"relative error {error:.1e}, at most {allowed:.1e} expected" if error else "no difference"
    if error <= allowed:
        return True, f"{line} works ({figures})"
    return False, f"{line} failed: {figures}; use --backend reference"


def beyond(error: float, allowed: float) -> float:
    """The ratio of an error to the allowed one."""
    return 0.0 if error == 0 else error / allowed if allowed else math.inf


def launch(operation: Callable[..., None], arguments: Arguments) -> None:
    if "scratch" in inspect.signature(operation).parameters:
        tensors = (getattr(value, "scaling", value) for value in arguments.values())  # of a quantised one
        device = next(t.device for t in tensors if isinstance(t, Tensor))
        arguments = {**arguments, "scratch": torch.full((SCRATCH_BYTES,), 255, dtype=torch.uint8, device=device)}
    operation(**arguments)


def compare(kernel: Callable[..., None], specified: Callable[..., None], make: Callable[[], Arguments]) -> Compared:
    """Compares the kernel with the reference in float64, as the tests do (`ops.rounding`), but for a floor of at least two
    units of the precision: the tests have not seen every GPU. Integers must be equal."""
    arguments = make()
    results, own, exact = (copies(arguments, dtype) for dtype in (None, None, torch.float64))
    for operation, values in ((kernel, results), (specified, own), (specified, exact)):
        launch(operation, values)
    for name, tensor in exact.items():
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            dtype, size = results[name].dtype, max(rounding.norm(tensor), SMALLEST)
            floor = max(rounding.floor(name, arguments, exact, dtype), LEAST_ROUNDINGS * rounding.ROUNDING[dtype] * size)
            yield results[name], tensor, rounding.allowed(own[name], tensor, floor) / size
        elif isinstance(tensor, Tensor):
            yield results[name], own[name], 0.0


def relative_error(result: Tensor, exact: Tensor) -> float:
    return rounding.error(result, exact) / max(rounding.norm(exact), SMALLEST)
