"""The operations on NVIDIA GPUs, with products of float32 numbers in TF32."""

from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

from handgrad.ops import cuda
from handgrad.ops.compose import after_gained_rmsnorm, after_layernorm, after_mix, after_mix_rmsnorm, after_rmsnorm
from handgrad.ops.cuda import linear

BACKEND = replace(cuda.BACKEND, tf32=True)
linear_forward = partial(linear.linear_forward, tf32=True)
linear_backward = partial(linear.linear_backward, tf32=True)
linear_residual_forward = partial(linear.linear_residual_forward, tf32=True)
linear_gelu_forward = partial(linear.linear_gelu_forward, tf32=True)
gelu_linear_backward = partial(linear.gelu_linear_backward, tf32=True)
linear_relu2_forward = partial(linear.linear_relu2_forward, tf32=True)
relu2_linear_backward = partial(linear.relu2_linear_backward, tf32=True)
linear_swiglu_forward = partial(linear.linear_swiglu_forward, tf32=True)
swiglu_linear_backward = partial(linear.swiglu_linear_backward, tf32=True)
layernorm_linear_forward = after_layernorm(cuda.layernorm_forward, linear_forward)
layernorm_linear_gelu_forward = after_layernorm(cuda.layernorm_forward, linear_gelu_forward)
rmsnorm_linear_forward = after_rmsnorm(cuda.rmsnorm_forward, linear_forward, None)
rmsnorm_linear_relu2_forward = after_rmsnorm(cuda.rmsnorm_forward, linear_relu2_forward)
gained_rmsnorm_linear_forward = after_gained_rmsnorm(cuda.gained_rmsnorm_forward, linear_forward, 1)
gained_rmsnorm_linear_swiglu_forward = after_gained_rmsnorm(cuda.gained_rmsnorm_forward, linear_swiglu_forward, 2)
mix_rmsnorm_linear_forward = after_mix_rmsnorm(cuda.mix_rmsnorm_forward, linear_forward)

decode = ModuleType(f"{__name__}.decode")
vars(decode).update(vars(cuda.decode))
for name in (
    *("layernorm_linear_forward", "layernorm_linear_gelu_forward", "linear_residual_forward"),
    *("rmsnorm_linear_forward", "rmsnorm_linear_relu2_forward"),
    *("gained_rmsnorm_linear_forward", "gained_rmsnorm_linear_swiglu_forward", "attention_linear_residual_forward"),
):
    setattr(decode, name, partial(getattr(cuda.decode, name), tf32=True))
decode.mix_rmsnorm_linear_forward = after_mix(cuda.decode.mix_forward, decode.rmsnorm_linear_forward)  # type: ignore[attr-defined]


def __getattr__(name: str) -> Any:
    """All other operations are the plain ones."""
    return getattr(cuda, name)
