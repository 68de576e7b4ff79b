"""Step 7: causal attention, backward."""

import math

import torch

from handgrad.ops import reference
from handgrad.ops.reference.attention import split_heads
from handgrad.tools.climb import Case, table_of

FORWARD = table_of("06_attention_forward")


def cases(draw):
    for B, H, T, D in ((2, 3, 7, 5), (1, 2, 4, 6), (1, 1, 9, 3)):
        q, k, v, dy = (draw(B, H, T, D) for _ in range(4))
        kept = FORWARD.answers(Case({}, q=q, k=k, v=v))
        yield Case({"B": B, "H": H, "T": T, "D": D}, dy=dy, q=q, k=k, v=v, **kept)


def answers(c):
    B, H, T, D = c.q.shape
    qkv = torch.cat([FORWARD.packed(t) for t in (c.q, c.k, c.v)], 1)
    dqkv = torch.empty_like(qkv)
    reference.attention_backward(dqkv, FORWARD.packed(c.dy), FORWARD.packed(c.y), c.lse, qkv)
    dq, dk, dv = split_heads(dqkv, B, H)
    c.scale, c.later = 1 / math.sqrt(D), torch.ones(T, T, dtype=torch.bool).triu(1)
    c.full = torch.exp(c.q @ c.k.mT * c.scale - c.lse[..., None])
    c.P = c.full.tril()
    c.dP, c.delta = c.dy @ c.v.mT, (c.dy * c.y).sum(-1, keepdim=True)
    return {"dq": dq, "dk": dk, "dv": dv}


def both(words, dS):
    """A mistake in dS, seen in dq and in dk."""
    return (("dq", words, lambda c: dS(c) @ c.k * c.scale), ("dk", words, lambda c: dS(c).mT @ c.q * c.scale))


def right(c):
    return c.P * (c.dP - c.delta)


TERMS = {
    "dq": lambda c: {"the term P dP": (c.P * c.dP) @ c.k * c.scale, "the row sum delta": -(c.P * c.delta) @ c.k * c.scale},
    "dk": lambda c: {
        "the term P dP": (c.P * c.dP).mT @ c.q * c.scale,
        "the row sum delta": -(c.P * c.delta).mT @ c.q * c.scale,
    },
}
MISTAKES = (
    ("dq", "lacks the factor 1 / sqrt(D) of the scores", lambda c: right(c) @ c.k),
    ("dk", "lacks the factor 1 / sqrt(D) of the scores", lambda c: right(c).mT @ c.q),
    ("dq", "has the factor 1 / sqrt(D) twice", lambda c: right(c) @ c.k * c.scale**2),
    ("dk", "has the factor 1 / sqrt(D) twice", lambda c: right(c).mT @ c.q * c.scale**2),
    *both("takes dP for dS: the softmax has no part in it", lambda c: c.dP),
    *both("treats the softmax as elementwise, dS = P (1 - P) dP: the numbers of a row depend on each other", lambda c: c.P * (1 - c.P) * c.dP),
    *both("takes the row sum of dP without P as weights", lambda c: c.P * (c.dP - c.dP.sum(-1, keepdim=True))),
    *both("takes the mean of the row of P dP, where its sum belongs", lambda c: c.P * (c.dP - (c.P * c.dP).mean(-1, keepdim=True))),
    *both("sums P dP over the queries (axis -2): the row sum runs over the keys", lambda c: c.P * (c.dP - (c.P * c.dP).sum(-2, keepdim=True))),
    *both("forgets P before the row sum: dS = P dP - delta", lambda c: c.P * c.dP - c.delta),
    *both("has no mask: P of a later key is 0", lambda c: c.full * (c.dP - c.delta)),
    *both("takes the row sum with y, where dy y belongs", lambda c: c.P * (c.dP - c.y.sum(-1, keepdim=True))),
    *both("sums dy y over all heads: each head has its own row sum", lambda c: c.P * (c.dP - c.delta.sum(1, keepdim=True))),
    ("dq", "multiplies by q: dq = dS k", lambda c: right(c) @ c.q * c.scale),
    ("dk", "multiplies by k: dk = dS^T q", lambda c: right(c).mT @ c.k * c.scale),
    ("dq", "transposes dS: dq = dS k", lambda c: right(c).mT @ c.k * c.scale),
    ("dk", "does not transpose dS: dk = dS^T q", lambda c: right(c) @ c.q * c.scale),
    ("dv", "does not transpose P: dv = P^T dy", lambda c: c.P @ c.dy),
    ("dv", "has no mask: P of a later key is 0", lambda c: c.full.mT @ c.dy),
    ("dv", "multiplies by dP's softmax term: dv = P^T dy needs P alone", lambda c: right(c).mT @ c.dy),
    ("dv", "has the factor 1 / sqrt(D): the values have no scale", lambda c: c.P.mT @ c.dy * c.scale),
    ("dv", "multiplies P by y, where dy belongs", lambda c: c.P.mT @ c.y),
    ("dv", "multiplies P by v, where dy belongs", lambda c: c.P.mT @ c.v),
)  # fmt: skip


def operations(f):
    def heads(t, lse):
        B, H, T = lse.shape
        return t.view(B, T, H, -1).transpose(1, 2)

    def backward(dqkv, dy, y, lse, qkv, *, scratch=None, mask=None):
        B, H, _ = lse.shape
        found = f(heads(dy, lse), *split_heads(qkv, B, H), heads(y, lse), lse)
        for part, gradient in zip(split_heads(dqkv, B, H), found, strict=True):
            part.copy_(gradient)

    return {"attention_backward": backward}
