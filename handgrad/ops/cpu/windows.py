"""Attention within a window with torch's flash attention, in blocks of queries: each reads its own keys and a window before
them, with a mask that is added to the scores."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from handgrad.ops.reference.attention import Mask, for_queries, group_sums, split_heads

aten = torch.ops.aten
QUERIES = 128  # of a block
Slices = tuple[slice, ...]  # (sequences, heads, positions)


def attention_forward(out: Tensor, lse: Tensor, qkv: Tensor, mask: Mask) -> None:
    B, H, T = lse.shape
    q, k, v = split_heads(qkv.to(lse.dtype), B, H, out.shape[1] // H)
    k, v = (for_queries(t, H, 1) for t in (k, v))
    y = out.view(B, T, H, -1).transpose(1, 2)
    for queries, keys, scores in blocks(mask, q):
        inputs = q[queries], k[keys], v[keys], 0.0, False
        result, log_sums = aten._scaled_dot_product_flash_attention_for_cpu(*inputs, attn_mask=scores)
        y[queries].copy_(result)
        lse[queries].copy_(log_sums)


def attention_backward(dqkv: Tensor, dout: Tensor, out: Tensor, lse: Tensor, qkv: Tensor, mask: Mask) -> None:
    """dk and dv are sums over the blocks in order."""
    B, H, T = lse.shape
    q, k, v = split_heads(qkv.to(lse.dtype), B, H, out.shape[1] // H)
    k, v = (for_queries(t, H, 1) for t in (k, v))
    y, dy = (t.to(lse.dtype).view(B, T, H, -1).transpose(1, 2) for t in (out, dout))
    dq, *gradients = split_heads(dqkv, B, H, out.shape[1] // H)
    sums = torch.zeros_like(k), torch.zeros_like(v)
    for queries, keys, scores in blocks(mask, q):
        inputs = dy[queries], q[queries], k[keys], v[keys], y[queries], lse[queries], 0.0, False
        results = aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, attn_mask=scores)
        dq[queries].copy_(results[0])
        for total, result in zip(sums, results[1:], strict=True):
            total[keys] += result
    for gradient, total in zip(gradients, sums, strict=True):
        gradient.copy_(group_sums(total, gradient.shape[1], 1))


def blocks(mask: Mask, q: Tensor) -> Iterator[tuple[Slices, Slices, Tensor]]:
    """Yields (queries, keys, mask) of each block of each sequence of q (B, H, T, D)."""
    assert mask.document_starts is not None
    every = slice(None)
    for b, starts in enumerate(mask.document_starts):
        row = slice(b, b + 1)
        for first in range(0, q.shape[2], QUERIES):
            end, begin = min(first + QUERIES, q.shape[2]), int(starts[first])
            queries, keys = torch.arange(first, end), torch.arange(begin, end)
            hidden = (keys > queries.unsqueeze(1)) | (keys < starts[first:end].unsqueeze(1))
            scores = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -math.inf)
            yield (row, every, slice(first, end)), (row, every, slice(begin, end)), scores
