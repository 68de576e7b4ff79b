"""Step 14: attention in one pass over blocks of keys."""

import math
from functools import partial

import torch
from torch.overrides import TorchFunctionMode

from handgrad.tools.climb import Case, table_of

FORWARD = table_of("06_attention_forward")


def cases(draw):
    """In the last case all scores are below -1000."""
    for B, H, T, D, block, size, shift in (
        (2, 2, 11, 5, 4, 1.0, 0.0),
        (1, 3, 8, 4, 4, 2.0, 0.0),
        (1, 1, 13, 3, 5, 20.0, 0.0),
        (1, 1, 7, 3, 3, 1.0, 50.0),
    ):
        q, k, v = (draw(B, H, T, D) for _ in range(3))
        yield Case({"T": T, "D": D, "block": block}, q=q * size + shift, k=k * size - shift, v=v, block=block)


def answers(c):
    return FORWARD.answers(c)


class Watched(TorchFunctionMode):
    """Notes the largest tensor that an operation makes."""

    largest = torch.Size()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor) and tensor.numel() > self.largest.numel():
                self.largest = tensor.shape
        return made


def further(function, cases):
    T, D, block = 96, 4, 8
    q, k, v = torch.randn(3, 1, 1, T, D, dtype=torch.float64)
    with Watched() as watched:
        function(q, k, v, block)
    if watched.largest.numel() < T * T // 2:
        return ""
    return f"keeps the scores: with T = {T} and blocks of {block} it made a tensor of {tuple(watched.largest)} numbers"


def flash(
    c, *, old_total=True, old_y=True, scale=None, mask=1, partial=True, each=False, add=False, start=-math.inf, only=None
):
    """(y, lse) where a mistake may leave a part out."""
    (B, H, T, D), block = c.q.shape, c.block
    most, total, y = (
        torch.full((B, H, T, 1), start, dtype=torch.float64),
        torch.zeros(B, H, T, 1, dtype=torch.float64),
        c.q * 0,
    )
    for first in range(0, T if partial else T // block * block, block):
        if only is not None and first // block != only % -(-T // block):
            continue
        keys = torch.arange(first, min(first + block, T))
        scores = c.q @ c.k[:, :, keys].mT * (1 / math.sqrt(D) if scale is None else scale)
        scores = scores.masked_fill(keys >= torch.arange(T)[:, None] + mask, -math.inf)
        found = scores.amax(-1, keepdim=True)
        new = found if each else torch.maximum(most, found)
        weights, old = torch.exp(scores - new), torch.exp(most - new)
        total = total * (old if old_total else 1) + weights.sum(-1, keepdim=True)
        y = y * (old if old_y else 1) + weights @ c.v[:, :, keys]
        most = new
    return y / total, (most + total.log()).squeeze(-1)


def both(words, **changed):
    return (("y", words, lambda c: flash(c, **changed)[0]), ("lse", words, lambda c: flash(c, **changed)[1]))


def blockwise(c):
    """The mean of the blocks' own softmaxes."""
    blocks = -(-c.q.shape[2] // c.block)
    return sum(flash(c, only=n)[0].nan_to_num(0.0) for n in range(blocks))


MISTAKES = (
    *both("does not rescale what earlier blocks left when the maximum grows", old_total=False, old_y=False),
    ("y", "rescales the output, but not the denominator when the maximum grows", lambda c: flash(c, old_total=False)[0]),
    ("y", "rescales the denominator, but not the output when the maximum grows", lambda c: flash(c, old_y=False)[0]),
    *both("lacks the factor 1 / sqrt(D) of the scores", scale=1.0),
    *both("has no mask: later keys are seen", mask=10**6),
    *both("hides a query's own key as well", mask=0),
    *both("sees one key too far", mask=2),
    *both("leaves the last, shorter block out: T need not be a multiple", partial=False),
    *both("takes the maximum of each block alone: it has to run over all blocks so far", each=True),
    *both("holds the last block alone", only=-1),
    *both("holds the first block alone", only=0),
    *both("begins with a maximum of 0: scores far below it underflow; begin with minus infinity", start=0.0),
    ("y", "adds the blocks' own softmaxes: they share one denominator", blockwise),
    ("y", "is not divided by the denominator", lambda c: c.y * torch.exp(c.lse - c.S.amax(-1))[..., None]),
    ("lse", "lacks the maximum, which was taken away before the exponential", lambda c: c.lse - c.S.amax(-1)),
    ("lse", "is the denominator: its logarithm and the maximum are missing", lambda c: torch.exp(c.lse - c.S.amax(-1))),
    ("lse", "is the maximum alone", lambda c: c.S.amax(-1)),
)  # fmt: skip


def operations(f):
    return FORWARD.operations(partial(f, block=64))
