"""The operations on NVIDIA GPUs: cuBLASLt for products, cuDNN or Triton for attention, Triton for the rest.

The names and the contract are those of `handgrad.ops.reference`, against which every kernel is tested. All are
deterministic, allocate nothing, and can be recorded in a CUDA graph.
"""

# ruff: noqa: F401

import torch
import triton
from torch import Tensor

from handgrad.dropout.cuda import dropout_backward, dropout_forward, dropout_residual_forward
from handgrad.dropout.masks import Dropout
from handgrad.errors import UsageError
from handgrad.fp8.formats import Form
from handgrad.ops.cuda import attention_cudnn, cublaslt
from handgrad.ops.cuda.choosing import choose_tokens
from handgrad.ops.cuda.classifier import classifier_forward, classifier_forward_backward
from handgrad.ops.cuda.column_sums import bias_backward
from handgrad.ops.cuda.decode import (
    attention_decode,
    embedding_decode,
    layernorm_linear_forward,
    layernorm_linear_gelu_forward,
    linear_residual_forward,
)
from handgrad.ops.cuda.embedding import embedding_backward, embedding_forward
from handgrad.ops.cuda.gelu import gelu_backward, gelu_forward
from handgrad.ops.cuda.launch import compile_ahead
from handgrad.ops.cuda.layernorm import layernorm_backward, layernorm_forward
from handgrad.ops.cuda.linear import gelu_linear_backward, linear_backward, linear_forward, linear_gelu_forward
from handgrad.ops.cuda.optimizer import adamw_update, loss_sum, squared_norms, verdict
from handgrad.ops.cuda.reduction import checksum, tree_sum
from handgrad.ops.cuda.scratch import scratch_bytes
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


def attention_scratch_bytes(
    *, batch: int, length: int, num_heads: int, channels: int, dtype: torch.dtype, dropout: bool = False
) -> int:
    """Bytes of `scratch` that the backward of attention needs, of one with `dropout` or without."""
    from handgrad.ops.cuda import attention

    if not dropout and attention_cudnn.runs(dtype, channels // num_heads):
        sizes = {"batch": batch, "length": length, "num_heads": num_heads, "channels": channels}
        return attention_cudnn.attention_scratch_bytes(dtype=dtype, **sizes)
    return attention.attention_scratch_bytes(batch, num_heads, length)


# cuDNN draws dropout's masks from a generator of its own, which the reference could not repeat: with dropout our own
# kernels serve heads of any width.


def attention_forward(out: Form, lse: Tensor, qkv: Tensor, *, dropout: Dropout | None = None, scratch: Tensor) -> None:
    """out (N, C), lse (B, H, T) = log of the softmax's denominator, from qkv (N, 3C). A quantised out has a plain form,
    too, for the backward. `dropout` is that of the probabilities, each head with masks of its own."""
    from handgrad.ops.cuda import attention

    if isinstance(out, Tensor) and dropout is None and attention_cudnn.runs(qkv.dtype, out.shape[1] // lse.shape[1]):
        attention_cudnn.attention_forward(out, lse, qkv, scratch=scratch)
    else:
        attention.attention_forward(out, lse, qkv, dropout=dropout)


def attention_backward(
    dqkv: Form, dout: Tensor, out: Form, lse: Tensor, qkv: Tensor, *, dropout: Dropout | None = None, scratch: Tensor
) -> None:
    """dqkv (N, 3C) from dout, out (N, C), lse (B, H, T) and qkv (N, 3C), with the `dropout` of the forward. What is
    quantised comes from our own kernels, of any head width, which write it in the same pass."""
    from handgrad.ops.cuda import attention

    if (
        isinstance(dqkv, Tensor)
        and isinstance(out, Tensor)
        and dropout is None
        and attention_cudnn.runs(qkv.dtype, dout.shape[1] // lse.shape[1])
    ):
        attention_cudnn.attention_backward(dqkv, dout, out, lse, qkv, scratch=scratch)
    else:
        attention.attention_backward(dqkv, dout, out, lse, qkv, dropout=dropout, scratch=scratch)
