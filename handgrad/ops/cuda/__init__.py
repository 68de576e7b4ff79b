"""The operations on NVIDIA GPUs: cuBLASLt for products, cuDNN or Triton for attention, Triton for the rest.

The names and the contract are those of `handgrad.ops.reference`, against which every kernel is tested. All are
deterministic, allocate nothing, and can be recorded in a CUDA graph.
"""

import triton

from handgrad.errors import UsageError
from handgrad.fp8.cuda.attention import attention_backward, attention_forward
from handgrad.fp8.cuda.quantize import fold_statistics, quantize, update_scaling
from handgrad.ops.cuda import attention_cudnn, cublaslt
from handgrad.ops.cuda.attention import attention_scratch_bytes
from handgrad.ops.cuda.choosing import choose_tokens, choosing_scratch_bytes
from handgrad.ops.cuda.classifier import classifier_forward, classifier_forward_backward
from handgrad.ops.cuda.column_sums import bias_backward
from handgrad.ops.cuda.cublaslt import WORKSPACE_BYTES, tuned_keep_bf16
from handgrad.ops.cuda.decode import (
    attention_decode,
    embedding_decode,
    layernorm_linear_decode,
    layernorm_linear_gelu_decode,
    linear_residual_decode,
)
from handgrad.ops.cuda.embedding import embedding_backward, embedding_forward
from handgrad.ops.cuda.gelu import gelu_backward, gelu_forward
from handgrad.ops.cuda.launch import compile_ahead
from handgrad.ops.cuda.layernorm import layernorm_backward, layernorm_forward
from handgrad.ops.cuda.linear import (
    gelu_linear_backward,
    linear_backward,
    linear_forward,
    linear_gelu_forward,
    linear_residual_forward,
)
from handgrad.ops.cuda.optimizer import adamw_update, loss_sum, squared_norms, verdict
from handgrad.ops.cuda.reduction import checksum, tree_sum
from handgrad.ops.cuda.scratch import scratch_bytes as memory_scratch_bytes
from handgrad.ops.cuda.scratch import statistics_parts
from handgrad.ops.reference import residual_forward, store_keys_values  # plain torch: a sum, copies

WIDEST_HEAD = 128
CAPTURABLE = True  # every operation of a step can be recorded in a CUDA graph


def versions() -> dict[str, str]:
    """What, beside torch and the GPU, the bits depend on."""
    return {"triton": triton.__version__, "products": cublaslt.describe(), "attention": attention_cudnn.describe()}


def check_sizes(*, length: int, num_heads: int, channels: int) -> None:
    """Raises `UsageError` for a model that the kernels do not take."""
    width = channels // num_heads
    problem = ""
    if channels % 8:
        problem = f"channels must be a multiple of 8, found {channels}"
    elif width > WIDEST_HEAD:
        problem = (
            f"heads may have up to {WIDEST_HEAD} channels, found {width} (--num-heads {-(-channels // WIDEST_HEAD)} fits)"
        )
    elif length * 3 * channels >= 1 << 31:
        problem = f"3 * channels * sequence_length must be below 2^31, found {3 * channels * length}"
    if problem:
        raise UsageError(f"the kernels cannot run this model: {problem}; or use --backend reference")


def scratch_bytes(*, batch: int, length: int, channels: int) -> int:
    """Bytes of `scratch`: the largest need of any operation but attention's backward."""
    return max(WORKSPACE_BYTES, memory_scratch_bytes(batch=batch, length=length, channels=channels))


__all__ = [
    "adamw_update",
    "attention_backward",
    "attention_decode",
    "attention_forward",
    "attention_scratch_bytes",
    "bias_backward",
    "check_sizes",
    "checksum",
    "choose_tokens",
    "choosing_scratch_bytes",
    "classifier_forward",
    "classifier_forward_backward",
    "compile_ahead",
    "embedding_backward",
    "embedding_decode",
    "embedding_forward",
    "fold_statistics",
    "gelu_backward",
    "gelu_forward",
    "gelu_linear_backward",
    "layernorm_backward",
    "layernorm_forward",
    "layernorm_linear_decode",
    "layernorm_linear_gelu_decode",
    "linear_backward",
    "linear_forward",
    "linear_gelu_forward",
    "linear_residual_decode",
    "linear_residual_forward",
    "loss_sum",
    "quantize",
    "residual_forward",
    "scratch_bytes",
    "squared_norms",
    "statistics_parts",
    "store_keys_values",
    "tree_sum",
    "tuned_keep_bf16",
    "update_scaling",
    "verdict",
    "versions",
]
