"""Causal attention by the faster of two: cuDNN where it takes the heads, Triton kernels elsewhere, and wherever a row holds
documents: cuDNN's graphs know no such mask."""

import torch
from torch import Tensor

from handgrad.ops import sizes
from handgrad.ops.cuda import attention_cudnn, attention_triton
from handgrad.ops.mask import CAUSAL, Mask


def attention_scratch_bytes(
    *,
    batch: int,
    length: int,
    num_heads: int,
    head_width: int,
    dtype: torch.dtype,
    kv_heads: int = 0,
    documents: bool = False,
) -> int:
    if attention_cudnn.runs(dtype, head_width) and not documents:
        heads = num_heads, kv_heads or num_heads
        return attention_cudnn.backward_graph(batch, *heads, length, head_width, dtype).workspace_bytes
    return sizes.attention_scratch_bytes(batch=batch, length=length, num_heads=num_heads)


def attention_forward(out: Tensor, lse: Tensor, qkv: Tensor, *, scratch: Tensor, mask: Mask = CAUSAL) -> None:
    if attention_cudnn.runs(qkv.dtype, out.shape[1] // lse.shape[1]) and mask.document_starts is None:
        attention_cudnn.attention_forward(out, lse, qkv, scratch=scratch)
    else:
        attention_triton.attention_forward(out, lse, qkv, mask=mask)


def attention_backward(
    dqkv: Tensor,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    qkv: Tensor,
    *,
    scratch: Tensor,
    mask: Mask = CAUSAL,
) -> None:
    inputs = dout, out, lse, qkv
    if attention_cudnn.runs(qkv.dtype, dout.shape[1] // lse.shape[1]) and mask.document_starts is None:
        attention_cudnn.attention_backward(dqkv, *inputs, scratch=scratch)
    else:
        attention_triton.attention_backward(dqkv, *inputs, scratch=scratch, mask=mask)
