"""Step 6: causal attention, forward."""

import math

import torch

from handgrad.ops import reference
from handgrad.tools.climb import Case


def cases(draw):
    """In the second case a hidden key scores 1000 above all visible ones; in the third the scores are large themselves."""
    for B, H, T, D, size in ((2, 3, 7, 5, 1.0), (1, 2, 5, 4, 1.0), (1, 1, 9, 3, 200.0)):
        c = Case({"B": B, "H": H, "T": T, "D": D}, q=draw(B, H, T, D) * size, k=draw(B, H, T, D) * size, v=draw(B, H, T, D))
        if (B, H) == (1, 2):
            c.q[..., 0], c.k[..., 0] = 1.0, 0.0
            c.k[:, :, -1, 0] = 1000 * math.sqrt(D)
        yield c


def packed(t):
    return t.transpose(1, 2).flatten(0, 1).flatten(1)


def answers(c):
    (B, H, T, D), double = c.q.shape, torch.float64
    out, lse = torch.empty(B * T, H * D, dtype=double), torch.empty(B, H, T, dtype=double)
    reference.attention_forward(out, lse, torch.cat([packed(t) for t in (c.q, c.k, c.v)], 1))
    c.raw, c.later = c.q @ c.k.mT, torch.ones(T, T, dtype=torch.bool).triu(1)
    c.S = (c.raw / math.sqrt(D)).masked_fill(c.later, -math.inf)
    c.y = out.view(B, T, H, D).transpose(1, 2)
    c.lse, c.D = lse, D
    return {"y": c.y, "lse": lse}


def early(c):
    """exp(S - max) where the maximum is taken before the mask."""
    raw = c.raw / math.sqrt(c.D)
    return torch.exp(raw - raw.amax(-1, keepdim=True)).masked_fill(c.later, 0.0)


def softmax(S, c):
    return torch.softmax(S, -1) @ c.v


def hide(S, c, diagonal=1):
    return S.masked_fill(torch.ones_like(S).triu(diagonal).bool(), -math.inf)


EARLY, SCALE = (
    "takes the maximum before the mask: a large hidden score underflows the visible ones",
    "lacks the factor 1 / sqrt(D) of the scores",
)
MISTAKES = (
    ("y", EARLY, lambda c: early(c) @ c.v / early(c).sum(-1, keepdim=True)),
    ("lse", EARLY, lambda c: early(c).sum(-1).log() + (c.raw / math.sqrt(c.D)).amax(-1)),
    ("y", SCALE, lambda c: softmax(hide(c.raw, c), c)),
    ("lse", SCALE, lambda c: hide(c.raw, c).logsumexp(-1)),
    ("y", "divides the scores by D: its root is missing", lambda c: softmax(c.S / math.sqrt(c.D), c)),
    ("lse", "divides the scores by D: its root is missing", lambda c: (c.S / math.sqrt(c.D)).logsumexp(-1)),
    ("y", "multiplies the scores by sqrt(D), where it divides", lambda c: softmax(c.S * c.D, c)),
    ("lse", "multiplies the scores by sqrt(D), where it divides", lambda c: (c.S * c.D).logsumexp(-1)),
    ("y", "has no mask: later keys are seen", lambda c: softmax(c.raw / math.sqrt(c.D), c)),
    ("lse", "has no mask: later keys are seen", lambda c: (c.raw / math.sqrt(c.D)).logsumexp(-1)),
    ("y", "hides a query's own key as well, and the first row has nothing left", lambda c: softmax(hide(c.S, c, 0), c)),
    ("lse", "hides a query's own key as well", lambda c: hide(c.S, c, 0).logsumexp(-1)),
    ("y", "sees one key too far", lambda c: softmax(hide(c.raw / math.sqrt(c.D), c, 2), c)),
    ("y", "hides the earlier keys, and sees the later ones", lambda c: softmax((c.raw / math.sqrt(c.D)).masked_fill(c.later.T, -math.inf), c)),
    ("y", "hides by a score of 0, which is a score like any other: minus infinity hides", lambda c: softmax(c.S.masked_fill(c.later, 0.0), c)),
    ("y", "takes the softmax over all keys, and hides after it: the rows no longer sum to 1", lambda c: torch.softmax(c.raw / math.sqrt(c.D), -1).masked_fill(c.later, 0) @ c.v),
    ("y", "takes the softmax over the queries (axis -2): it runs over the keys", lambda c: softmax_over_queries(c)),
    ("y", "is not divided by the softmax's denominator", lambda c: torch.exp(c.S - c.S.amax(-1, keepdim=True)) @ c.v),
    ("y", "overflows: take the largest visible score of a row away before the exponential", lambda c: torch.exp(c.S) @ c.v / torch.exp(c.S).sum(-1, keepdim=True)),
    ("y", "mixes queries and keys: the scores are k q^T", lambda c: softmax(hide(c.raw.mT / math.sqrt(c.D), c), c)),
    ("lse", "lacks the maximum, which was taken away before the exponential", lambda c: (c.S - c.S.amax(-1, keepdim=True)).exp().sum(-1).log()),
    ("lse", "is the denominator: its logarithm is missing", lambda c: c.lse.exp()),
    ("lse", "is the maximum alone: the logarithm of the sum is missing", lambda c: c.S.amax(-1)),
)  # fmt: skip


def softmax_over_queries(c):
    return torch.softmax(c.S, -2) @ c.v


def operations(f):
    from handgrad.ops.reference.attention import split_heads

    def forward(out, lse, qkv, *, scratch=None, mask=None):
        B, H, T = lse.shape
        y, found = f(*split_heads(qkv, B, H))
        out.view(B, T, H, -1).copy_(y.transpose(1, 2))
        lse.copy_(found)

    return {"attention_forward": forward}
