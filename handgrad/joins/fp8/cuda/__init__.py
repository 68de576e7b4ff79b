"""The operations on NVIDIA GPUs where tensors may be quantised: the kernel that makes a tensor writes its fp8 forms in the
same pass, and cuBLASLt multiplies them."""

# ruff: noqa: F401
from typing import Any

from handgrad.joins.fp8.cuda.attention import attention_backward, attention_forward
from handgrad.joins.fp8.cuda.classifier import classifier_forward, classifier_forward_backward
from handgrad.joins.fp8.cuda.column_sums import bias_backward
from handgrad.joins.fp8.cuda.gained_qk_norm import gained_qk_norm_rotary_backward
from handgrad.joins.fp8.cuda.gained_rmsnorm import gained_rmsnorm_backward, gained_rmsnorm_forward
from handgrad.joins.fp8.cuda.layernorm import layernorm_backward, layernorm_forward
from handgrad.joins.fp8.cuda.linear import (
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
from handgrad.joins.fp8.cuda.rotary import qk_norm_backward, qk_norm_rotary_backward, rotary_backward
from handgrad.joins.fp8.formats import on_plain, plain_or_workspace
from handgrad.ops import cuda
from handgrad.ops.compose import after_gained_rmsnorm, after_layernorm, after_mix_rmsnorm, after_rmsnorm
from handgrad.ops.sizes import statistics_parts

# Of a technique that is off by default: it reads 16 bits.
value_embedding_forward = on_plain(cuda.value_embedding_forward)
value_embedding_backward = on_plain(cuda.value_embedding_backward, plain_or_workspace)

layernorm_linear_forward = after_layernorm(layernorm_forward, linear_forward)
layernorm_linear_gelu_forward = after_layernorm(layernorm_forward, linear_gelu_forward)
rmsnorm_linear_forward = after_rmsnorm(rmsnorm_forward, linear_forward, None)
rmsnorm_linear_relu2_forward = after_rmsnorm(rmsnorm_forward, linear_relu2_forward)
gained_rmsnorm_linear_forward = after_gained_rmsnorm(gained_rmsnorm_forward, linear_forward, 1)
gained_rmsnorm_linear_swiglu_forward = after_gained_rmsnorm(gained_rmsnorm_forward, linear_swiglu_forward, 2)
mix_rmsnorm_linear_forward = after_mix_rmsnorm(mix_rmsnorm_forward, linear_forward)


def __getattr__(name: str) -> Any:
    """All other operations are the plain ones."""
    return getattr(cuda, name)
