"""Step 16: a sum whose bits do not depend on the number of ranks."""

import functools
import operator

import torch

from handgrad.ops import reference
from handgrad.tools.climb import Case

TOLERANCE = 0.0  # bits


def cases(draw):
    for P, n in ((8, 101), (4, 37), (16, 53), (2, 5)):
        yield Case({"P": P}, pieces=[draw(n).float() * 10.0**k for k in range(P)])


def answers(c):
    out = torch.empty_like(c.pieces[0])
    reference.tree_sum(out, torch.stack(c.pieces), rounded=False)
    return {"sum": out}


def call(function, c):
    return function([piece.clone() for piece in c.pieces])


def further(function, cases):
    """Two and four ranks, as the docstring has it."""
    for c in cases:
        whole = function([piece.clone() for piece in c.pieces])
        for ranks in (2, 4):
            share = len(c.pieces) // ranks
            if share:
                parts = [function([p.clone() for p in c.pieces[r * share : (r + 1) * share]]) for r in range(ranks)]
                if not torch.equal(function(parts), whole):
                    return f"has other bits on {ranks} ranks"
    return ""


def halves(pieces):
    """A tree that adds each piece to the one half of the list away."""
    while len(pieces) > 1:
        pieces = [a + b for a, b in zip(pieces[: len(pieces) // 2], pieces[len(pieces) // 2 :], strict=True)]
    return pieces[0]


def in_bf16(pieces):
    while len(pieces) > 1:
        pieces = [(a.bfloat16().float() + b.bfloat16().float()) for a, b in zip(pieces[::2], pieces[1::2], strict=True)]
    return pieces[0]


def rank_sums(c, ranks):
    share = max(1, len(c.pieces) // ranks)
    parts = [functools.reduce(operator.add, c.pieces[n : n + share]) for n in range(0, len(c.pieces), share)]
    return functools.reduce(operator.add, parts)


def tree(pieces):
    out = torch.empty_like(pieces[0])
    reference.tree_sum(out, torch.stack(pieces), rounded=False)
    return out


MISTAKES = (
    ("sum", "adds one after another: two ranks cannot do that, each has a half only; add neighbours, then sums of neighbours", lambda c: functools.reduce(operator.add, c.pieces)),
    ("sum", "adds one after another from the end", lambda c: functools.reduce(operator.add, c.pieces[::-1])),
    ("sum", "is torch's sum of the stacked pieces: its order is its own", lambda c: torch.stack(c.pieces).sum(0)),
    ("sum", "is torch's sum along the last axis: its order is its own", lambda c: torch.stack(c.pieces, 1).sum(1)),
    ("sum", "adds piece p and piece p + P/2, which lie on different ranks: add neighbours", lambda c: halves(c.pieces)),
    ("sum", "is exact in float64 and rounded once: right, but no rank can send that in float32", lambda c: torch.stack(c.pieces).double().sum(0).float()),
    ("sum", "rounds to bf16 on the way", lambda c: in_bf16(c.pieces)),
    ("sum", "is the mean: the divisor is elsewhere", lambda c: tree(c.pieces) / len(c.pieces)),
    ("sum", "adds one after another on each of two ranks, so that two ranks and four differ", lambda c: rank_sums(c, 2)),
    ("sum", "adds one after another on each of four ranks", lambda c: rank_sums(c, 4)),
    ("sum", "is the first piece alone", lambda c: c.pieces[0]),
    ("sum", "is the last piece alone", lambda c: c.pieces[-1]),
    ("sum", "lacks the second half", lambda c: tree(c.pieces[: len(c.pieces) // 2])),
    ("sum", "lacks the first half", lambda c: tree(c.pieces[len(c.pieces) // 2 :])),
    ("sum", "sorts the pieces by size first: ranks hold the lanes in their own order", lambda c: torch.stack(c.pieces).sort(0).values.sum(0)),
    ("sum", "adds the first two pieces alone", lambda c: c.pieces[0] + c.pieces[1]),
)  # fmt: skip


def operations(f):
    def tree_sum(out, pieces, *, rounded):
        out.copy_(f([piece.clone() for piece in pieces]))

    return {"tree_sum": tree_sum}
