"""The path of the reference that a tensor takes."""

from torch import Tensor


def uses_cpu_kernels(tensor: Tensor) -> bool:
    """True where the library's CPU-only kernels apply; elsewhere the same mathematics runs in plain products."""
    return tensor.device.type == "cpu"
