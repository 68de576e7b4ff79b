"""The operations on quantised tensors, in plain torch. Each runs the plain operation, then `quantize`; a GEMM of two
quantised tensors multiplies their fp8 numbers."""

# ruff: noqa: F401
from typing import Any

from handgrad.joins.fp8.formats import on_plain, plain_or_workspace
from handgrad.joins.fp8.reference.linear import (
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
)
from handgrad.joins.fp8.reference.quantized import (
    attention_backward,
    attention_forward,
    classifier_forward_backward,
    gained_qk_norm_rotary_backward,
    layernorm_backward,
    layernorm_forward,
    mix_rmsnorm_backward,
    mix_rmsnorm_forward,
    qk_norm_backward,
    qk_norm_rotary_backward,
    rmsnorm_backward,
    rmsnorm_forward,
    rotary_backward,
)
from handgrad.joins.fp8.reference.quantizing import fold_statistics, quantize, transpose, update_scaling
from handgrad.ops import compose, reference

classifier_forward = on_plain(reference.classifier_forward)
value_embedding_forward = on_plain(reference.value_embedding_forward)
value_embedding_backward = on_plain(reference.value_embedding_backward, plain_or_workspace)
compose.bind_norms_and_gemms(__name__)
mix_rmsnorm_linear_forward = compose.after_mix_rmsnorm(mix_rmsnorm_forward, linear_forward)


def statistics_parts(
    *,
    batch: int,
    length: int,
    num_heads: int,
    head_width: int,
    channels: int,
    feed_forward: int,
    widest: int,
    padded_vocab_size: int,
) -> int:
    """Most parts of a tensor's statistics: one, because this backend quantises a whole tensor. `feed_forward`: outputs of a
    nonlinearity per token; `widest`: the longest side of a block's matrices, with `channels` as the other side."""
    return 1


def tuned_keep_bf16(*, tokens: int, channels: int) -> str:
    """GEMMs of fp8 runs that are faster in bf16: none, as no timings exist for this backend."""
    return ""


def __getattr__(name: str) -> Any:
    """Forwards all other operations to the plain backend."""
    return getattr(reference, name)
