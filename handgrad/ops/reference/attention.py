"""Causal attention over packed queries, keys and values."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Causal attention (Vaswani et al. 2017), per head: S = q k^T / sqrt(D) for keys at or before the query,
# P = softmax(S) = exp(S - lse),  y = P v.
# Backward: dv = P^T dy,  dP = dy v^T,  dS = P (dP - rowsum(dy y)),  dq = dS k / sqrt(D),  dk = dS^T q / sqrt(D).
#
# Grouped heads (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245): K heads of keys and values; H / K consecutive query
# heads share each. Its dk and dv are sums over these query heads.
#
# A mask may hide more keys. Nothing else changes: hidden keys get P = 0, hence dS = 0.


@dataclass(frozen=True)
class Mask:
    """Causal. With `document_starts` (B, T) int32, attention also stays within the documents packed in a row. It holds, for
    each position, where its document starts; query i sees key j if document_starts[i] <= j <= i. With a `window` of w keys
    it holds max(start of the document, i - w + 1) instead, which never falls along a row either."""

    document_starts: Tensor | None = None
    window: int = 0  # 0: none
    has_documents: bool = True  # False: `document_starts` is of a window alone

    def hidden(self, sample: int, length: int, device: torch.device) -> Tensor:
        """(T, T) bool, queries by keys of this sample: True where the query does not see the key."""
        hidden = torch.ones(length, length, dtype=torch.bool, device=device).triu_(1)
        if self.document_starts is not None:
            hidden |= torch.arange(length, device=device) < self.document_starts[sample].unsqueeze(1)
        return hidden

    def starts_like(self, lse: Tensor) -> Tensor | None:
        """`document_starts` or None, after checking the shape and dtype that kernels expect for lse (B, H, T)."""
        starts = self.document_starts
        if starts is not None:
            fits = tuple(starts.shape) == (lse.shape[0], lse.shape[2]) and starts.dtype == torch.int32
            message = f"document starts {tuple(starts.shape)} {starts.dtype} for lse {tuple(lse.shape)}"
            assert fits and starts.is_contiguous(), message
        return starts


CAUSAL = Mask()


def split_heads(packed: Tensor, batch: int, num_heads: int, head_width: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, H, T, D), k and v (B, K, T, D) as views of the packed (N, (H + 2K) D). Each row holds the heads of q, then
    of k, then of v. Without a `head_width` D, K is H."""
    N, columns = packed.shape
    heads = columns // head_width if head_width else 3 * num_heads
    every = packed.view(batch, N // batch, heads, columns // heads).transpose(1, 2)
    kv_heads = (heads - num_heads) // 2
    q, k, v = every.split((num_heads, kv_heads, kv_heads), dim=1)
    return q, k, v


def for_queries(keys: Tensor, num_heads: int, dim: int = 0) -> Tensor:
    """Repeats the K heads of keys or values along `dim` so that each of the H query heads has its own."""
    return keys if keys.shape[dim] == num_heads else keys.repeat_interleave(num_heads // keys.shape[dim], dim)


def group_sums(dkeys: Tensor, kv_heads: int, dim: int = 0) -> Tensor:
    """The backward of `for_queries`: sums over the query heads that share keys and values."""
    return dkeys if dkeys.shape[dim] == kv_heads else dkeys.unflatten(dim, (kv_heads, -1)).sum(dim + 1)


def masked_scores(q: Tensor, k: Tensor, hidden: Tensor) -> Tensor:
    """Scores q k^T / sqrt(D) of queries (..., T, D) and keys (..., S, D), minus infinity where `hidden`. Training and
    decoding (`ops.reference.decode`) share this formula."""
    scores = torch.matmul(q, k.transpose(-1, -2)).mul_(1.0 / math.sqrt(q.shape[-1]))
    return scores.masked_fill_(hidden, -math.inf)


def attention_scratch_bytes(
    *,
    batch: int,
    length: int,
    num_heads: int,
    head_width: int,
    dtype: torch.dtype,
    kv_heads: int = 0,
    documents: bool = False,
    window: int = 0,
) -> int:
    """Bytes of `scratch` that attention's backward needs, `documents`: with documents in a row, `window`: also within it.
    None here."""
    return 0


def attention_forward(out: Tensor, lse: Tensor, qkv: Tensor, *, scratch: Tensor | None = None, mask: Mask = CAUSAL) -> None:
    """out (N, C) and lse (B, H, T), the log of the softmax's denominator, from qkv (N, 3C), or (N, (H + 2K) D) with grouped
    heads; C = H D."""
    B, H, T = lse.shape
    q, k, v = split_heads(qkv.to(lse.dtype), B, H, out.shape[1] // H)
    y = out.view(B, T, H, -1).transpose(1, 2)
    for b in range(B):  # one batch entry at a time bounds the (H, T, T) scores
        scores = masked_scores(q[b], for_queries(k[b], H), mask.hidden(b, T, qkv.device))
        lse[b] = scores.logsumexp(-1)
        weights = torch.exp_(scores.sub_(lse[b].unsqueeze(-1)))
        y[b] = torch.matmul(weights, for_queries(v[b], H))


def attention_backward(
    dqkv: Tensor, dout: Tensor, out: Tensor, lse: Tensor, qkv: Tensor, *, scratch: Tensor | None = None, mask: Mask = CAUSAL
) -> None:
    """dqkv (N, 3C) from dout, out (N, C), lse (B, H, T) and qkv (N, 3C) or (N, (H + 2K) D)."""
    B, H, T = lse.shape
    q, k, v = split_heads(qkv.to(lse.dtype), B, H, out.shape[1] // H)
    y, dy = (t.to(lse.dtype).view(B, T, H, -1).transpose(1, 2) for t in (out, dout))
    dq, dk, dv = split_heads(dqkv, B, H, out.shape[1] // H)
    K = k.shape[1]
    scale = 1.0 / math.sqrt(q.shape[-1])
    for b in range(B):
        keys, values = for_queries(k[b], H), for_queries(v[b], H)
        scores = masked_scores(q[b], keys, mask.hidden(b, T, qkv.device))
        weights = torch.exp_(scores.sub_(lse[b].unsqueeze(-1)))
        dweights = torch.matmul(dy[b], values.transpose(-1, -2))
        dscores = dweights.sub_((dy[b] * y[b]).sum(-1, keepdim=True)).mul_(weights)
        dv[b] = group_sums(torch.matmul(weights.transpose(-1, -2), dy[b]), K)
        dq[b] = torch.matmul(dscores, keys).mul_(scale)
        dk[b] = group_sums(torch.matmul(dscores.transpose(-1, -2), q[b]).mul_(scale), K)
