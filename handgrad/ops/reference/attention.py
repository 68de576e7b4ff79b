"""Causal attention over packed queries, keys and values."""

import math

import torch
from torch import Tensor

from handgrad.ops.reference import device

aten = torch.ops.aten

# Causal attention (Vaswani et al. 2017), per head: S = q k^T / sqrt(D) for keys at or before the query,
# P = softmax(S) = exp(S - lse),  y = P v.
# Backward: dv = P^T dy,  dP = dy v^T,  dS = P (dP - rowsum(dy y)),  dq = dS k / sqrt(D),  dk = dS^T q / sqrt(D).


def split_heads(packed: Tensor, batch: int, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as views (B, H, T, D) of the packed (N, 3C), whose rows hold q, k, v, each head after head."""
    N, C3 = packed.shape
    q, k, v = packed.view(batch, N // batch, 3, num_heads, C3 // (3 * num_heads)).permute(2, 0, 3, 1, 4)
    return q, k, v


def causal_scores(q: Tensor, k: Tensor) -> Tensor:
    """q k^T / sqrt(D) of (H, T, D) each, minus infinity where the key comes after the query."""
    scores = torch.matmul(q, k.transpose(-1, -2)).mul_(1.0 / math.sqrt(q.shape[-1]))
    T = q.shape[-2]
    later = torch.ones(T, T, dtype=torch.bool, device=q.device).triu_(1)
    return scores.masked_fill_(later, -math.inf)


def attention_scratch_bytes(*, batch: int, length: int, num_heads: int, head_width: int, dtype: torch.dtype) -> int:
    """Bytes of `scratch` that the backward of attention needs: none here."""
    return 0


def attention_forward(out: Tensor, lse: Tensor, qkv: Tensor, *, scratch: Tensor | None = None) -> None:
    """out (N, C), lse (B, H, T) = log of the softmax's denominator, from qkv (N, 3C)."""
    B, H, T = lse.shape
    q, k, v = split_heads(qkv.to(lse.dtype), B, H)  # a CPU's flash attention is 1.6 to 1.9 times slower in bf16
    y = out.view(B, T, H, -1).transpose(1, 2)
    if device.uses_cpu_kernels(qkv):  # the library's flash attention: never forms (T, T)
        result, log_sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        y.copy_(result)
        lse.copy_(log_sums)
        return
    for b in range(B):  # one batch entry at a time bounds the (H, T, T) scores
        scores = causal_scores(q[b], k[b])
        lse[b] = scores.logsumexp(-1)
        weights = torch.exp_(scores.sub_(lse[b].unsqueeze(-1)))
        y[b] = torch.matmul(weights, v[b])


def attention_backward(
    dqkv: Tensor, dout: Tensor, out: Tensor, lse: Tensor, qkv: Tensor, *, scratch: Tensor | None = None
) -> None:
    """dqkv (N, 3C) from dout, out (N, C), lse (B, H, T) and qkv (N, 3C)."""
    B, H, T = lse.shape
    q, k, v = split_heads(qkv.to(lse.dtype), B, H)
    y, dy = (t.to(lse.dtype).view(B, T, H, -1).transpose(1, 2) for t in (out, dout))
    parts = split_heads(dqkv, B, H)
    if device.uses_cpu_kernels(qkv):
        results = aten._scaled_dot_product_flash_attention_for_cpu_backward(dy, q, k, v, y, lse, 0.0, True)
        for part, result in zip(parts, results, strict=True):
            part.copy_(result)
        return
    dq, dk, dv = parts
    scale = 1.0 / math.sqrt(q.shape[-1])
    for b in range(B):
        weights = torch.exp_(causal_scores(q[b], k[b]).sub_(lse[b].unsqueeze(-1)))
        dweights = torch.matmul(dy[b], v[b].transpose(-1, -2))
        dscores = dweights.sub_((dy[b] * y[b]).sum(-1, keepdim=True)).mul_(weights)
        dv[b] = torch.matmul(weights.transpose(-1, -2), dy[b])
        dq[b] = torch.matmul(dscores, k[b]).mul_(scale)
        dk[b] = torch.matmul(dscores.transpose(-1, -2), q[b]).mul_(scale)
