"""Generation on a CPU. The host may read tensors here, so attention reads only the tokens that each sequence has."""

import math
from typing import Any

import torch
from torch import Tensor

from handgrad.machine.devices import accumulation_dtype
from handgrad.ops import compose
from handgrad.ops.cpu.linear import (
    geglu_forward,  # noqa: F401
    linear_forward,
    linear_gelu_forward,  # noqa: F401
    linear_relu2_forward,  # noqa: F401
    linear_residual_forward,
    linear_swiglu_forward,  # noqa: F401
)
from handgrad.ops.cpu.norms import layernorm_forward, rmsnorm_forward  # noqa: F401
from handgrad.ops.reference import decode as reference

compose.bind_norms_and_gemms(__name__)
mix_rmsnorm_linear_forward = compose.after_mix(
    reference.mix_forward, compose.after_rmsnorm(rmsnorm_forward, linear_forward, 1)
)


def attention_decode(
    out: Tensor,
    keys_inout: Tensor,
    values_inout: Tensor,
    qkv: Tensor,
    positions: Tensor,
    *,
    window: int = 0,
    scratch: Tensor | None = None,
    arrivals: Tensor | None = None,
) -> None:
    B, K, _, D = keys_inout.shape
    reference.store_keys_values_at(keys_inout, values_inout, qkv, torch.arange(B), positions)
    q = qkv[:, : out.shape[1]].to(accumulation_dtype(qkv.dtype)) / math.sqrt(D)
    q = q.view(B, K, -1, D)  # query heads that share keys and values become rows of one GEMM
    y = out.view(*q.shape)
    for b, position in enumerate(positions.tolist()):
        seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
        keys, values = (cache[b, :, seen].to(q.dtype) for cache in (keys_inout, values_inout))
        y[b] = torch.matmul(torch.softmax(torch.matmul(q[b], keys.transpose(-1, -2)), -1), values)


attention_linear_residual_forward = compose.after_attention(attention_decode, linear_residual_forward)


def __getattr__(name: str) -> Any:
    """Takes all other operations from the reference."""
    return getattr(reference, name)
