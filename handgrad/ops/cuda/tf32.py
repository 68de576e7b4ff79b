"""The operations on NVIDIA GPUs, with float32 GEMMs in TF32."""

from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

from handgrad.ops import compose, cuda
from handgrad.ops.cuda import linear

BACKEND = replace(cuda.BACKEND, tf32=True)


def __getattr__(name: str) -> Any:
    """Takes all other operations from `handgrad.ops.cuda`."""
    return getattr(cuda, name)


for name in (
    *("linear_forward", "linear_backward", "linear_residual_forward", "linear_gelu_forward", "gelu_linear_backward"),
    *("linear_relu2_forward", "relu2_linear_backward", "linear_swiglu_forward", "swiglu_linear_backward"),
):
    globals()[name] = partial(getattr(linear, name), tf32=True)
compose.bind_norms_and_gemms(__name__)
mix_rmsnorm_linear_forward = compose.after_mix_rmsnorm(cuda.mix_rmsnorm_forward, globals()["linear_forward"])

decode = ModuleType(f"{__name__}.decode")
vars(decode).update(vars(cuda.decode))
for name in (
    *("layernorm_linear_forward", "layernorm_linear_gelu_forward", "linear_residual_forward"),
    *("rmsnorm_linear_forward", "rmsnorm_linear_relu2_forward", "rmsnorm_linear_swiglu_forward"),
    *("linear_forward", "linear_swiglu_forward"),
):
    setattr(decode, name, partial(getattr(cuda.decode, name), tf32=True))
decode.attention_linear_residual_forward = compose.after_attention(decode.attention_decode, decode.linear_residual_forward)  # type: ignore[attr-defined]
decode.mix_rmsnorm_linear_forward = compose.after_mix(cuda.decode.mix_forward, decode.rmsnorm_linear_forward)  # type: ignore[attr-defined]
