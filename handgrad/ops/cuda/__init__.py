"""The operations on NVIDIA GPUs: cuBLASLt for GEMMs, cuDNN or Triton for attention, Triton for the rest.

They have the names and the contract of `handgrad.ops.reference`, and the tests compare every kernel with it. All are
deterministic and can be captured in a CUDA graph; only those on pictures allocate.
"""

# ruff: noqa: F401

import triton

from handgrad.errors import UsageError
from handgrad.ops import Backend, compose
from handgrad.ops.cuda import attention, cublaslt, decode
from handgrad.ops.cuda.activations import (
    geglu_backward,
    geglu_forward,
    gelu_backward,
    gelu_forward,
    relu2_backward,
    relu2_forward,
    swiglu_backward,
    swiglu_forward,
)
from handgrad.ops.cuda.attention import attention_backward, attention_forward, attention_scratch_bytes
from handgrad.ops.cuda.attention_tiles import capability_here, widest_head
from handgrad.ops.cuda.classifier import classifier_forward, classifier_forward_backward, softcap_forward
from handgrad.ops.cuda.column_sums import bias_backward
from handgrad.ops.cuda.convolution import conv_backward, conv_forward, transposed_conv_backward, transposed_conv_forward
from handgrad.ops.cuda.cublaslt import tuning
from handgrad.ops.cuda.distill import distill_forward_backward
from handgrad.ops.cuda.embedding import (
    embedding_backward,
    embedding_forward,
    token_embedding_backward,
    token_embedding_forward,
)
from handgrad.ops.cuda.groupnorm import groupnorm_backward, groupnorm_forward
from handgrad.ops.cuda.launch import compile_ahead
from handgrad.ops.cuda.layernorm import layernorm_backward, layernorm_forward
from handgrad.ops.cuda.linear import (
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
from handgrad.ops.cuda.mix import mix_rmsnorm_backward, mix_rmsnorm_forward
from handgrad.ops.cuda.muon import muon_momentum, muon_polar, muon_update
from handgrad.ops.cuda.optimizer import adamw_update, loss_sum, squared_norms, verdict
from handgrad.ops.cuda.reduction import checksum, digest, tree_sum
from handgrad.ops.cuda.rmsnorm import rmsnorm_backward, rmsnorm_forward
from handgrad.ops.cuda.rotary import (
    gained_qk_norm_rotary_backward,
    gained_qk_norm_rotary_forward,
    qk_norm_backward,
    qk_norm_forward,
    qk_norm_rotary_backward,
    qk_norm_rotary_forward,
    rotary_backward,
    rotary_forward,
)
from handgrad.ops.cuda.value_embedding import value_embedding_backward, value_embedding_forward
from handgrad.ops.reference import residual_forward, store_keys_values  # plain torch: a sum, copies
from handgrad.ops.reference.activations import silu_backward, silu_forward  # and more plain torch, for pictures
from handgrad.ops.reference.fsq import fsq_backward, fsq_forward, fsq_round, fsq_values
from handgrad.ops.reference.pixels import pixels_forward, squared_error_forward, squared_error_forward_backward
from handgrad.ops.reference.vq import vq_backward, vq_forward, vq_update, vq_values
from handgrad.ops.sizes import muon_scratch_bytes, scratch_bytes

compose.bind_norms_and_gemms(__name__)
mix_rmsnorm_linear_forward = compose.after_mix_rmsnorm(mix_rmsnorm_forward, linear_forward)

BACKEND = Backend("cuda", capturable=True)


def versions() -> dict[str, str]:
    """Everything that the bits depend on, apart from torch and the GPU."""
    return {"triton": triton.__version__, "products": cublaslt.describe(), "attention": attention.describe()}


def check_sizes(*, length: int, num_heads: int, channels: int, head_width: int = 0) -> None:
    """Raises `UsageError` for a model that the kernels do not support. `head_width`: if not channels / num_heads."""
    width, widest = head_width or channels // num_heads, widest_head(capability_here())
    problem = ""
    if channels % 8:
        problem = f"channels must be a multiple of 8, found {channels}"
    elif width > widest:
        problem = f"heads may have up to {widest} channels, found {width} (--num-heads {-(-channels // widest)} fits)"
    elif num_heads * width % 8:
        problem = f"the channels of all heads must be a multiple of 8, found {num_heads} heads of {width}"
    elif length * 3 * max(channels, num_heads * width) >= 1 << 31:
        problem = f"3 * channels * sequence_length must be below 2^31, found {3 * channels * length}"
    if problem:
        raise UsageError(f"the kernels cannot run this model: {problem}; or use --backend reference")
