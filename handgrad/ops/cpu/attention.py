"""Causal attention by torch's flash attention, which never forms the (T, T) scores."""

from collections.abc import Iterator

import torch
from torch import Tensor

from handgrad.ops.reference.attention import for_queries, group_sums, split_heads

aten = torch.ops.aten


def attention_forward(
    out: Tensor,
    lse: Tensor,
    qkv: Tensor,
    *,
    scratch: Tensor | None = None,
    document_starts: Tensor | None = None,
) -> None:
    B, H, T = lse.shape
    q, k, v = split_heads(qkv.to(lse.dtype), B, H, out.shape[1] // H)  # in bf16 this kernel is 1.6 to 1.9 times slower
    k, v = (for_queries(t, H, 1) for t in (k, v))
    y = out.view(B, T, H, -1).transpose(1, 2)
    for part in document_slices(document_starts):
        result, log_sums = aten._scaled_dot_product_flash_attention_for_cpu(q[part], k[part], v[part], 0.0, True)
        y[part].copy_(result)
        lse[part].copy_(log_sums)


def attention_backward(
    dqkv: Tensor,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    qkv: Tensor,
    *,
    scratch: Tensor | None = None,
    document_starts: Tensor | None = None,
) -> None:
    B, H, T = lse.shape
    q, k, v = split_heads(qkv.to(lse.dtype), B, H, out.shape[1] // H)
    k, v = (for_queries(t, H, 1) for t in (k, v))
    y, dy = (t.to(lse.dtype).view(B, T, H, -1).transpose(1, 2) for t in (out, dout))
    gradients = split_heads(dqkv, B, H, out.shape[1] // H)
    for part in document_slices(document_starts):
        inputs = (t[part] for t in (dy, q, k, v, y, lse))
        results = aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, 0.0, True)
        for gradient, result in zip(gradients, results, strict=True):
            gradient[part].copy_(group_sums(result, gradient.shape[1], 1))


def document_slices(document_starts: Tensor | None) -> Iterator[tuple[slice, ...]]:
    """The parts (sequences, heads, positions) that attention stays within: everything, or one document after another. With
    a mask the kernel would form all scores of a row."""
    if document_starts is None:
        yield (slice(None),)
        return
    for b, row in enumerate(document_starts):
        end = 0
        for length in row.unique_consecutive(return_counts=True)[1].tolist():
            start, end = end, end + length
            yield slice(b, b + 1), slice(None), slice(start, end)
