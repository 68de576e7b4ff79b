"""Step 8: the residual stream's gradient, in one buffer."""

import torch

from handgrad.ops import reference
from handgrad.tools.climb import Case

IN_PLACE = True  # the point of it


def cases(draw):
    for N, C, L in ((3, 5, 3), (2, 4, 4), (1, 3, 2)):
        matrices = [draw(C, C) for _ in range(L)]
        yield Case(
            {"N": N, "C": C, "L": L},
            dstream=draw(N, C),
            branches=[draw_branch(m, N, C) for m in matrices],
            matrices=matrices,
        )


def draw_branch(matrix, N, C):
    return lambda gradient: gradient @ matrix


def answers(c):
    stream = c.dstream.clone()
    for matrix in reversed(c.matrices):
        reference.residual_forward(stream, stream, stream @ matrix)
    c.L = len(c.matrices)
    return {"dstream": stream}


def call(function, c):
    """All branches write to one scratch buffer, and refuse one that is not the stream."""
    stream, scratch = c.dstream.clone(), torch.empty_like(c.dstream)

    def branch(matrix):
        def backward(gradient):
            scratch.copy_(gradient @ matrix)
            return scratch

        return backward

    found = function(stream, [branch(matrix) for matrix in c.matrices])
    c.returned = found
    return stream


def further(function, cases):
    if any(isinstance(c.returned, torch.Tensor) for c in cases):
        return "must return nothing: the caller's buffer is the result"
    return ""


def walked(c, matrices, update):
    stream = c.dstream.clone()
    for matrix in matrices:
        stream = update(stream, stream @ matrix)
    return stream


def plus(stream, more):
    return stream + more


MISTAKES = (
    ("dstream", "has not changed: `dstream = dstream + ...` makes a new tensor, and the caller's buffer keeps the old one", lambda c: c.dstream),
    ("dstream", "goes through the branches in the forward's order: the last branch comes first", lambda c: walked(c, c.matrices, plus)),
    ("dstream", "lacks the identity: the stream flows past the branch as well as through it", lambda c: walked(c, c.matrices[::-1], lambda s, m: m)),
    ("dstream", "stops before the first branch", lambda c: walked(c, c.matrices[:0:-1], plus)),
    ("dstream", "skips the last branch", lambda c: walked(c, c.matrices[-2::-1], plus)),
    ("dstream", "gives every branch the gradient of the end: each must read what the later ones have added", lambda c: c.dstream + sum(c.dstream @ m for m in c.matrices)),
    ("dstream", "counts the last branch called for all: the branches share one scratch buffer, add before the next call",
     lambda c: c.dstream + c.L * c.dstream @ c.matrices[0]),
    ("dstream", "counts the last branch called for all: the branches share one scratch buffer, add before the next call",
     lambda c: c.dstream + c.L * c.dstream @ c.matrices[-1]),
    ("dstream", "subtracts the branches, which the forward added", lambda c: walked(c, c.matrices[::-1], lambda s, m: s - m)),
    ("dstream", "halves the sum: a sum hands its whole gradient to both sides", lambda c: walked(c, c.matrices[::-1], lambda s, m: (s + m) / 2)),
    ("dstream", "counts the stream twice at each branch", lambda c: walked(c, c.matrices[::-1], lambda s, m: 2 * s + m)),
    ("dstream", "adds each branch twice", lambda c: walked(c, c.matrices[::-1], lambda s, m: s + 2 * m)),
    ("dstream", "goes through the first branch alone", lambda c: walked(c, c.matrices[:1], plus)),
    ("dstream", "goes through the last branch alone", lambda c: walked(c, c.matrices[-1:], plus)),
)  # fmt: skip
