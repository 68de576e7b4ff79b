"""The choice of the module of operations that a run uses."""

import importlib
import importlib.util
from types import ModuleType

import torch

from handgrad.errors import UsageError

REQUIRED = {"triton": "triton", "nvmath": "nvmath-python"}  # module: package on the index
# Precisions with a module of operations of their own. (For TF32 the reference follows torch's switch.)
KERNELS = {"fp8": "handgrad.joins.fp8.cuda", "tf32": "handgrad.ops.cuda.tf32"}
REFERENCE = {"fp8": "handgrad.joins.fp8.reference"}
OLDEST_CAPABILITY = (7, 5)  # Turing: the oldest GPU that Triton compiles for


def choose_backend(name: str, device: torch.device, precision: str = "") -> ModuleType:
    """The module of operations for a backend, `kernels` or `reference`, and a precision (fp8, tf32 or any other).
    "auto" takes the kernels on a CUDA GPU, the CPU operations on a CPU (the reference for fp8) and the reference
    elsewhere. Raises `UsageError` with the reason and the alternative when the kernels cannot run: a run never turns
    slow silently."""
    if name == "auto" and device.type == "cpu" and precision not in REFERENCE:
        return importlib.import_module("handgrad.ops.cpu")
    if name == "auto":
        name = "kernels" if device.type == "cuda" else "reference"
    if name == "reference":
        return importlib.import_module(REFERENCE.get(precision, "handgrad.ops.reference"))
    if problem := why_no_kernels(device):
        raise UsageError(f"the kernels cannot run here: {problem}; or use --backend reference")
    try:
        kernels = importlib.import_module(KERNELS.get(precision, "handgrad.ops.cuda"))
        kernels.versions()  # loads the libraries
        importlib.import_module("handgrad.ops.cuda.launch").load_ahead()
    except (ImportError, OSError, RuntimeError) as failure:  # a library that does not load, a driver that is too old
        message = " ".join(f"{type(failure).__name__}: {failure}".split())
        raise UsageError(f"the kernels cannot run here: {message:.200}; or use --backend reference") from failure
    return kernels


def plain_backend(name: str, device: torch.device, precision: str) -> ModuleType:
    """The module of operations without fp8: an fp8 run gets the bf16 operations."""
    return choose_backend(name, device, "bf16" if precision == "fp8" else precision)


def invariant_backend(ops: ModuleType) -> ModuleType:
    """The operations `ops`; where `ops.cuda.invariant` has them, a token's bits do not depend on the tokens beside it."""
    return importlib.import_module(f"{ops.__name__}.invariant") if ops.__name__ == "handgrad.ops.cuda" else ops


def why_no_kernels(device: torch.device) -> str:
    """Why the kernels cannot run on this device, with the remedy; "" if they can."""
    if device.type != "cuda":
        return f"expected a CUDA GPU, found device {device.type}"
    for module, package in REQUIRED.items():
        if importlib.util.find_spec(module) is None:
            return f"{package} is not installed (pip install 'handgrad[gpu]')"
    if (capability := torch.cuda.get_device_capability(device)) < OLDEST_CAPABILITY:
        actual, least = (".".join(map(str, c)) for c in (capability, OLDEST_CAPABILITY))
        return f"{torch.cuda.get_device_name(device)} has compute capability {actual}, Triton needs {least}"
    return ""
