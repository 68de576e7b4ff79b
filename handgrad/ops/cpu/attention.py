"""Causal attention with torch's flash attention, which never materializes the (T, T) scores."""

from collections.abc import Iterator

import torch
from torch import Tensor

from handgrad.ops.cpu import windows
from handgrad.ops.reference.attention import CAUSAL, Mask, for_queries, group_sums, split_heads

aten = torch.ops.aten


def attention_forward(out: Tensor, lse: Tensor, qkv: Tensor, *, scratch: Tensor | None = None, mask: Mask = CAUSAL) -> None:
    B, H, T = lse.shape
    if mask.window:
        windows.attention_forward(out, lse, qkv, mask)
        return
    q, k, v = split_heads(qkv.to(lse.dtype), B, H, out.shape[1] // H)  # in bf16 this kernel is 1.6 to 1.9 times slower
    k, v = (for_queries(t, H, 1) for t in (k, v))
    y = out.view(B, T, H, -1).transpose(1, 2)
    for part in causal_slices(mask):
        result, log_sums = aten._scaled_dot_product_flash_attention_for_cpu(q[part], k[part], v[part], 0.0, True)
        y[part].copy_(result)
        lse[part].copy_(log_sums)


def attention_backward(
    dqkv: Tensor, dout: Tensor, out: Tensor, lse: Tensor, qkv: Tensor, *, scratch: Tensor | None = None, mask: Mask = CAUSAL
) -> None:
    B, H, T = lse.shape
    if mask.window:
        windows.attention_backward(dqkv, dout, out, lse, qkv, mask)
        return
    q, k, v = split_heads(qkv.to(lse.dtype), B, H, out.shape[1] // H)
    k, v = (for_queries(t, H, 1) for t in (k, v))
    y, dy = (t.to(lse.dtype).view(B, T, H, -1).transpose(1, 2) for t in (out, dout))
    gradients = split_heads(dqkv, B, H, out.shape[1] // H)
    for part in causal_slices(mask):
        inputs = (t[part] for t in (dy, q, k, v, y, lse))
        results = aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, 0.0, True)
        for gradient, result in zip(gradients, results, strict=True):
            gradient[part].copy_(group_sums(result, gradient.shape[1], 1))


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
