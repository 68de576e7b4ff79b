"""Which path of the reference a tensor takes."""

from torch import Tensor


def uses_cpu_kernels(tensor: Tensor) -> bool:
    """Whether the library's CPU-only kernels apply; elsewhere the same mathematics runs in plain products."""
    return tensor.device.type == "cpu"
