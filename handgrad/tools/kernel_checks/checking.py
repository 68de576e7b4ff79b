"""A launch, its results, the right ones, and how far these may differ."""

import inspect
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from handgrad.ops.cases import Arguments, copies

SCRATCH_BYTES = 64 << 20  # more than any operation needs at these sizes

Compared = Iterator[tuple[Tensor, Tensor, float]]  # found, right, the allowed relative error


def attempt(line: str, compared: Callable[[], Compared]) -> tuple[bool, str]:
    """(it works, line). The tensor whose error exceeds the allowed one by the largest factor counts."""
    worst = (0.0, 0.0)
    try:
        for found, exact, allowed in compared():
            error = relative_error(found, exact)
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
    if error == 0:
        return 0.0
    return error / allowed if allowed else math.inf


def launch(operation: Callable[..., None], arguments: Arguments) -> None:
    if "scratch" in inspect.signature(operation).parameters:
        tensors = (getattr(value, "scaling", value) for value in arguments.values())  # of a quantised one
        device = next(t.device for t in tensors if isinstance(t, Tensor))
        arguments = {**arguments, "scratch": torch.full((SCRATCH_BYTES,), 255, dtype=torch.uint8, device=device)}
    operation(**arguments)


def compare(kernel: Callable[..., None], specified: Callable[..., None], make: Callable[[], Arguments]) -> Compared:
    """Compares the kernel with the reference in float64; allows two units of the precision, and twice the reference's own
    error in it. Integers must be equal."""
    arguments = make()
    found, own, exact = (copies(arguments, dtype) for dtype in (None, None, torch.float64))
    for operation, values in ((kernel, found), (specified, own), (specified, exact)):
        launch(operation, values)
    for name, tensor in exact.items():
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            yield found[name], tensor, 2 * torch.finfo(found[name].dtype).eps + 2 * relative_error(own[name], tensor)
        elif isinstance(tensor, Tensor):
            yield found[name], own[name], 0.0


def relative_error(found: Tensor, exact: Tensor) -> float:
    """The norm of the difference over the norm of `exact`; infinite where one is finite and the other is not."""
    exact = exact.double()
    finite = exact.isfinite()
    if not (torch.equal(found.isfinite(), finite) and torch.equal(found.double()[~finite], exact[~finite])):
        return math.inf  # a NaN here would get lost in the largest of several errors
    difference = (found.double() - exact)[finite].norm().item()
    return difference / max(exact[finite].norm().item(), 1e-30)
