"""Step 4: layer norm."""

import torch

from handgrad.ops import reference
from handgrad.tools.climb import Case


def cases(draw):
    for N, C, size, shift in ((5, 13, 1.0, 0.0), (7, 3, 0.01, 0.0), (4, 9, 3.0, 20.0)):
        yield Case({"N": N, "C": C}, x=draw(N, C) * size + shift, weight=draw(C), bias=draw(C), dy=draw(N, C))


def mean(t):
    return t.mean(1, keepdim=True)


def answers(c):
    N, like = len(c.x), torch.zeros_like
    y, dx, dweight, dbias, stats = like(c.x), like(c.x), like(c.bias), like(c.bias), torch.empty(2, N, dtype=torch.float64)
    reference.layernorm_forward(y, *stats, c.x, c.weight, c.bias)
    reference.layernorm_backward(dx, dweight, dbias, c.dy, c.x, *stats, c.weight, None)
    c.r = stats[1][:, None]
    c.hat = (c.x - mean(c.x)) * c.r
    c.g, c.y, c.variance = c.dy * c.weight, y, c.x.var(1, keepdim=True, correction=0)
    return {"y": y, "dx": dx, "dweight": dweight, "dbias": dbias}


def full(c, g, hat):
    return c.r * (g - mean(g) - hat * mean(g * hat))


def with_deviation(c, r):
    hat = (c.x - mean(c.x)) * r
    return r * (c.g - mean(c.g) - hat * mean(c.g * hat))


TERMS = {
    "y": lambda c: {"the normalised row times weight": c.hat * c.weight, "the bias": c.bias},
    "dx": lambda c: {
        "the direct term": c.r * c.g,
        "the term through the mean": -c.r * mean(c.g),
        "the term through the variance": -c.r * c.hat * mean(c.g * c.hat),
    },
}
MISTAKES = (
    ("y", "divides the variance by C - 1: layer norm divides by C", lambda c: (c.x - mean(c.x)) / (c.x.var(1, keepdim=True) + 1e-5).sqrt() * c.weight + c.bias),
    ("y", "lacks EPSILON", lambda c: (c.x - mean(c.x)) / c.variance.sqrt() * c.weight + c.bias),
    ("y", "adds EPSILON to the deviation: it belongs under the root, to the variance",
     lambda c: (c.x - mean(c.x)) / (c.variance.sqrt() + 1e-5) * c.weight + c.bias),
    ("y", "does not take the mean away: that is RMS norm", lambda c: c.x / (mean(c.x**2) + 1e-5).sqrt() * c.weight + c.bias),
    ("y", "divides by the variance: take its root", lambda c: (c.x - mean(c.x)) / (c.variance + 1e-5) * c.weight + c.bias),
    ("y", "takes the statistics over the tokens (axis 0): each token has its own (axis 1)",
     lambda c: (c.x - c.x.mean(0)) / (c.x.var(0, correction=0) + 1e-5).sqrt() * c.weight + c.bias),
    ("y", "takes the mean and the variance of the whole tensor: each token has its own",
     lambda c: (c.x - c.x.mean()) / (c.x.var(correction=0) + 1e-5).sqrt() * c.weight + c.bias),
    ("dx", "reads dy where dy * weight belongs", lambda c: full(c, c.dy, c.hat)),
    ("dx", "reads dy where dy * weight belongs, in the two means", lambda c: c.r * (c.g - mean(c.dy) - c.hat * mean(c.dy * c.hat))),
    ("dx", "is not divided by the deviation", lambda c: full(c, c.g, c.hat) / c.r),
    ("dx", "reads x where the normalised row belongs", lambda c: full(c, c.g, c.x)),
    ("dx", "reads y where the normalised row belongs", lambda c: full(c, c.g, c.y)),
    ("dx", "takes its means over the tokens (axis 0): they run along a row (axis 1)",
     lambda c: c.r * (c.g - c.g.mean(0) - c.hat * (c.g * c.hat).mean(0))),
    ("dx", "uses sums where means belong: divide both by C", lambda c: c.r * (c.g - c.g.sum(1, keepdim=True) - c.hat * (c.g * c.hat).sum(1, keepdim=True))),
    ("dx", "is right without EPSILON: the backward's deviation is not the forward's", lambda c: with_deviation(c, c.variance.rsqrt())),
    ("dx", "multiplies the term through the variance by the deviation's inverse once too often",
     lambda c: c.r * (c.g - mean(c.g) - c.hat * c.r * mean(c.g * c.hat))),
    ("dweight", "multiplies dy by x: y is weight times the normalised row", lambda c: (c.dy * c.x).sum(0)),
    ("dweight", "multiplies dy by x - mean: the deviation is missing", lambda c: (c.dy * c.hat / c.r).sum(0)),
    ("dweight", "multiplies dy * weight by the normalised row: weight itself is no part of its slope", lambda c: (c.g * c.hat).sum(0)),
    ("dweight", "multiplies dy by y: y has weight and bias in it", lambda c: (c.dy * c.y).sum(0)),
    ("dbias", "sums dy * weight: the bias joins after weight", lambda c: c.g.sum(0)),
)  # fmt: skip


def operations(f):
    def forward(out, mean, rstd, x, weight, bias):
        out.copy_(f(x, weight, bias, torch.zeros_like(x))[0])
        for statistic in (mean, rstd):  # for the package's backward, which the reader's replaces
            statistic.zero_()

    def backward(dresidual_inout, dweight_acc, dbias_acc, dy, x, mean, rstd, weight, dbias_below_acc, *, scratch=None):
        accumulators = dresidual_inout, dweight_acc, dbias_acc
        for acc, gradient in zip(accumulators, f(x, weight, torch.zeros_like(weight), dy)[1:], strict=True):
            acc.add_(gradient)
        if dbias_below_acc is not None:
            dbias_below_acc.add_(dresidual_inout.sum(0))

    return {"layernorm_forward": forward, "layernorm_backward": backward}
