"""Step 13: where bf16 may round, and where it may not."""

import torch

from handgrad.ops import reference
from handgrad.tools.climb import Case

TOLERANCE = 1e-5  # of a float32 sum of a thousand numbers


def cases(draw):
    for O, N, lr in ((5, 700, 0.01), (3, 300, 0.0001), (7, 37, 0.1)):
        gradients = [(draw(N, O) + 0.7).bfloat16(), (draw(N, O) + 0.7).bfloat16()]
        yield Case({"N": N, "O": O}, master=draw(O).float(), gradients=gradients, lr=lr)


def answers(c):
    total = torch.zeros(len(c.master), dtype=torch.float64)
    for gradient in c.gradients:
        reference.bias_backward(total, gradient)
    c.total = total
    c.new = (c.master.double() - c.lr * total).float()
    return {"master": c.new, "weight": c.new.bfloat16()}


def one_by_one(c, dtype=torch.bfloat16):
    """The sum in a bf16 accumulator, token by token, as float32."""
    total = torch.zeros(len(c.master), dtype=dtype)
    for gradient in c.gradients:
        for row in gradient:
            total += row
    return total.float()


def rounded_sums(c, start=torch.float32, each=torch.bfloat16):
    """The sum of torch's sums of bf16 tensors, each added in float32 and rounded once to `each`, in a `start` accumulator."""
    total = torch.zeros(len(c.master), dtype=start)
    for gradient in c.gradients:
        total += gradient.to(each).sum(0)
    return total.float()


def in_bf16(c, total):
    """The update of bf16 weights by a bf16 gradient."""
    return c.master.bfloat16() - (c.lr * total.bfloat16()).bfloat16()


def both(words, new):
    return (("master", words, lambda c: new(c).float()), ("weight", words, lambda c: new(c).bfloat16()))


def added(words, total):
    """A mistake in the sum, multiplied by lr in float32 or in bf16."""
    return both(words, lambda c: c.master - c.lr * total(c)) + both(words, lambda c: c.master - c.lr * total(c).bfloat16())


def cut(t):
    """bf16 by cutting off the lower 16 bits."""
    return (t.view(torch.int32) & -65536).view(torch.float32).bfloat16()


MISTAKES = (
    *added("adds the tokens in bf16, one by one: at 256 a sum of ones stands still", one_by_one),
    *both("rounds the sum of each micro-batch to bf16: `gradient.sum(0)` of a bf16 tensor is bf16", lambda c: c.master - c.lr * rounded_sums(c)),
    *added("accumulates the micro-batches in bf16: only the tokens' sum was float32", lambda c: rounded_sums(c, torch.bfloat16)),
    *added("accumulates the micro-batches in bf16: only the tokens' sum was float32", lambda c: rounded_sums(c, torch.bfloat16, torch.float32)),
    *both("rounds the whole gradient to bf16 before the update", lambda c: c.master - c.lr * c.total.bfloat16().float()),
    *both("updates the bf16 weights: an update below half of their spacing is lost", lambda c: (c.master.bfloat16().float() - c.lr * c.total.float())),
    *both("updates in bf16: an update below half of the weights' spacing is lost", lambda c: in_bf16(c, c.total)),
    *both("updates in bf16, by a gradient that was added in bf16", lambda c: in_bf16(c, rounded_sums(c, torch.bfloat16))),
    *both("multiplies by lr in bf16: each token's product is rounded", lambda c: c.master - sum((c.lr * g).float().sum(0) for g in c.gradients)),
    *both("takes the last micro-batch alone", lambda c: c.master - c.lr * c.gradients[-1].float().sum(0)),
    *both("takes the first micro-batch alone", lambda c: c.master - c.lr * c.gradients[0].float().sum(0)),
    *both("takes the mean over the tokens: the sum was asked for", lambda c: c.master - c.lr * (c.total / len(c.gradients[0])).float()),
    *both("takes the mean over the tokens of all micro-batches: the sum was asked for", lambda c: c.master - c.lr * (c.total / len(c.gradients[0]) / 2).float()),
    *both("moves uphill: the update is subtracted", lambda c: c.master + c.lr * c.total.float()),
    *both("lacks lr", lambda c: c.master - c.total.float()),
    *both("has not moved", lambda c: c.master),
    ("master", "is the rounded weight: float32 keeps the exact one", lambda c: c.new.bfloat16().float()),
    ("weight", "cuts bits off, where it rounds to the nearest", lambda c: cut(c.new)),
)  # fmt: skip
