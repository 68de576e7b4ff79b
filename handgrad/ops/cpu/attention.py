"""Causal attention with torch's flash attention, which never materializes the (T, T) scores."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from handgrad.ops.reference.attention import CAUSAL, Mask, for_queries, group_sums, split_heads

aten = torch.ops.aten
QUERIES = 128  # of a block of queries within a window: it reads as many keys and a window


def attention_forward(out: Tensor, lse: Tensor, qkv: Tensor, *, scratch: Tensor | None = None, mask: Mask = CAUSAL) -> None:
    B, H, T = lse.shape
    q, k, v = split_heads(qkv.to(lse.dtype), B, H, out.shape[1] // H)  # in bf16 this kernel is 1.6 to 1.9 times slower
    k, v = (for_queries(t, H, 1) for t in (k, v))
    y = out.view(B, T, H, -1).transpose(1, 2)
    for queries, keys, hidden in parts_of(mask, q):
        inputs, options = (q[queries], k[keys], v[keys], 0.0, hidden is None), {"attn_mask": hidden}
        result, log_sums = aten._scaled_dot_product_flash_attention_for_cpu(*inputs, **options)
        y[queries].copy_(result)
        lse[queries].copy_(log_sums)


def attention_backward(
    dqkv: Tensor, dout: Tensor, out: Tensor, lse: Tensor, qkv: Tensor, *, scratch: Tensor | None = None, mask: Mask = CAUSAL
) -> None:
    B, H, T = lse.shape
    q, k, v = split_heads(qkv.to(lse.dtype), B, H, out.shape[1] // H)
    k, v = (for_queries(t, H, 1) for t in (k, v))
    y, dy = (t.to(lse.dtype).view(B, T, H, -1).transpose(1, 2) for t in (out, dout))
    dq, *dkv = split_heads(dqkv, B, H, out.shape[1] // H)
    sums = [torch.zeros_like(k), torch.zeros_like(v)] if mask.window else []  # blocks of queries share keys
    for queries, keys, hidden in parts_of(mask, q):
        inputs = dy[queries], q[queries], k[keys], v[keys], y[queries], lse[queries], 0.0, hidden is None
        results = aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, attn_mask=hidden)
        dq[queries].copy_(results[0])
        for gradient, total, result in zip(dkv, sums or dkv, results[1:], strict=True):
            if mask.window:
                total[keys] += result
            else:
                gradient[keys].copy_(group_sums(result, gradient.shape[1], 1))
    for gradient, total in zip(dkv, sums, strict=False):
        gradient.copy_(group_sums(total, gradient.shape[1], 1))


Slices = tuple[slice, ...]  # (sequences, heads, positions)


def parts_of(mask: Mask, q: Tensor) -> Iterator[tuple[Slices, Slices, Tensor | None]]:
    """Yields (queries, keys, mask) of the calls that compute attention, q (B, H, T, D): a document each, causally and
    without a mask; within a window, blocks of queries with a mask (queries, keys) that is added to their scores."""
    if not mask.window:
        for part in causal_slices(mask):
            yield part, part, None
        return
    assert mask.document_starts is not None
    for b, starts in enumerate(mask.document_starts):
        for first in range(0, q.shape[2], QUERIES):
            rows = torch.arange(first, min(first + QUERIES, q.shape[2]), dtype=torch.int32)
            begin, end = int(starts[first]), first + len(rows)
            keys = torch.arange(begin, end, dtype=torch.int32)
            hidden = (keys > rows.unsqueeze(1)) | (keys < starts[first:end].unsqueeze(1))
            scores = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -math.inf)
            sequence, heads = slice(b, b + 1), slice(None)
            yield (sequence, heads, slice(first, end)), (sequence, heads, slice(begin, end)), scores


def causal_slices(mask: Mask) -> Iterator[tuple[slice, ...]]:
    """Yields the slices (sequences, heads, positions) that attend causally: the whole batch, or each document in turn.
    Given an explicit mask, the kernel would materialize all scores of a row."""
    if mask.document_starts is None:
        yield (slice(None),)
        return
    for b, row in enumerate(mask.document_starts):
        end = 0
        for length in row.unique_consecutive(return_counts=True)[1].tolist():
            start, end = end, end + length
            yield slice(b, b + 1), slice(None), slice(start, end)
