"""The operations on NVIDIA GPUs, with products of float32 numbers in TF32."""

from functools import partial
from typing import Any

from handgrad.ops import cuda
from handgrad.ops.cuda import decode, linear

linear_forward = partial(linear.linear_forward, tf32=True)
linear_backward = partial(linear.linear_backward, tf32=True)
linear_residual_forward = partial(decode.linear_residual_forward, tf32=True)
linear_gelu_forward = partial(linear.linear_gelu_forward, tf32=True)
gelu_linear_backward = partial(linear.gelu_linear_backward, tf32=True)
layernorm_linear_forward = partial(decode.layernorm_linear_forward, tf32=True)
layernorm_linear_gelu_forward = partial(decode.layernorm_linear_gelu_forward, tf32=True)


def __getattr__(name: str) -> Any:
    """All other operations are the plain ones."""
    return getattr(cuda, name)
