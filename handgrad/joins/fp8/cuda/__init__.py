"""The operations on quantised tensors, on NVIDIA GPUs. The kernel that computes a tensor also writes its fp8 forms, and
cuBLASLt multiplies them."""

# ruff: noqa: F401
from typing import Any

from handgrad.joins.fp8.cuda.attention import attention_backward, attention_forward
from handgrad.joins.fp8.cuda.classifier import classifier_forward, classifier_forward_backward
from handgrad.joins.fp8.cuda.layernorm import layernorm_backward, layernorm_forward
from handgrad.joins.fp8.cuda.linear import (
    bias_backward,
    gelu_linear_backward,
    linear_backward,
    linear_forward,
    linear_gelu_forward,
    linear_relu2_forward,
    linear_residual_forward,
    linear_swiglu_forward,
    relu2_linear_backward,
    swiglu_linear_backward,
    tuned_keep_bf16,
)
from handgrad.joins.fp8.cuda.mix import mix_rmsnorm_backward, mix_rmsnorm_forward
from handgrad.joins.fp8.cuda.quantizing import fold_statistics, quantize, transpose, update_scaling
from handgrad.joins.fp8.cuda.rmsnorm import rmsnorm_backward, rmsnorm_forward
from handgrad.joins.fp8.cuda.rotary import (
    gained_qk_norm_rotary_backward,
    qk_norm_backward,
    qk_norm_rotary_backward,
    rotary_backward,
)
from handgrad.joins.fp8.formats import on_plain, plain_or_workspace
from handgrad.joins.fp8.sizes import statistics_parts
from handgrad.ops import compose, cuda

# Belongs to a technique that is off by default, and reads 16 bits.
value_embedding_forward = on_plain(cuda.value_embedding_forward)
value_embedding_backward = on_plain(cuda.value_embedding_backward, plain_or_workspace)

compose.bind_norms_and_gemms(__name__)
mix_rmsnorm_linear_forward = compose.after_mix_rmsnorm(mix_rmsnorm_forward, linear_forward)


def __getattr__(name: str) -> Any:
    """Forwards all other operations to the plain backend."""
    return getattr(cuda, name)
