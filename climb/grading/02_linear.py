"""Step 2: a linear layer."""

import torch

from handgrad.ops import reference
from handgrad.tools.climb import Case


def cases(draw):
    for N, I, O in ((7, 3, 5), (6, 5, 5), (1, 4, 2)):
        yield Case({"N": N, "I": I, "O": O}, x=draw(N, I), weight=draw(O, I), bias=draw(O), dy=draw(N, O))


def answers(c):
    y, dx, dweight, dbias = (torch.zeros_like(t) for t in (c.dy, c.x, c.weight, c.bias))
    reference.linear_forward(y, c.x, c.weight, c.bias)
    reference.linear_backward(dx, dweight, dbias, c.dy, c.x, c.weight)
    c.y, c.dx, c.dweight, c.dbias = y, dx, dweight, dbias
    return {"y": y, "dx": dx, "dweight": dweight, "dbias": dbias}


def square(matrix):
    """Transposed if the shape allows it: a mistake that only a square layer hides."""
    return matrix.T if matrix.shape[0] == matrix.shape[1] else matrix


TERMS = {"y": lambda c: {"the product x weight^T": c.x @ c.weight.T, "the bias": c.bias}}
MISTAKES = (
    ("dx", "has the bias added: a constant has no gradient with respect to x", lambda c: (c.dy + c.bias) @ c.weight),
    ("dx", "is the product of y, where dy belongs", lambda c: c.y @ c.weight),
    ("dx", "reads dy as its mean over the tokens: every token has its own", lambda c: (c.dy.mean(0) @ c.weight).expand_as(c.x)),
    ("dx", "reads dy as its sum over the tokens: every token has its own", lambda c: (c.dy.sum(0) @ c.weight).expand_as(c.x)),
    ("dx", "is multiplied by x, as if the layer were a power: in y = x W^T the slope is W", lambda c: c.dx * c.x),
    ("dweight", "is a mean over the tokens: the weight serves all of them, so it takes their sum", lambda c: c.dweight / len(c.x)),
    ("dweight", "holds the last token alone: it has to be summed over the tokens", lambda c: torch.outer(c.dy[-1], c.x[-1])),
    ("dweight", "holds the first token alone: it has to be summed over the tokens", lambda c: torch.outer(c.dy[0], c.x[0])),
    ("dweight", "multiplies sums: the sum over tokens of products is not the product of the sums",
     lambda c: torch.outer(c.dy.sum(0), c.x.sum(0))),
    ("dweight", "reads y where dy belongs", lambda c: c.y.T @ c.x),
    ("dweight", "has weight added: weight decay belongs to the optimizer", lambda c: c.dweight + c.weight),
    ("dweight", "is transposed: a square layer hides it, values do not", lambda c: square(c.dweight)),
    ("dbias", "is a mean over the tokens: the bias serves all of them, so it takes their sum", lambda c: c.dy.mean(0)),
    ("dbias", "is the last token's row: it has to be summed over the tokens", lambda c: c.dy[-1]),
    ("dbias", "sums y, where dy belongs", lambda c: c.y.sum(0)),
    ("dbias", "is multiplied by bias: the slope of y by its bias is 1", lambda c: c.dbias * c.bias),
    ("dbias", "is 1 for every token: each token counts by its dy", lambda c: torch.full_like(c.bias, len(c.x))),
)  # fmt: skip


def operations(f):
    def forward(out, x, weight, bias, *, scratch=None):
        zeros = torch.zeros_like(weight[:, 0])
        out.copy_(f(x, weight, zeros if bias is None else bias, torch.zeros_like(out))[0])

    def backward(dx, dweight_acc, dbias_acc, dy, x, weight, *, scratch=None):
        found, *gradients = f(x, weight, torch.zeros_like(weight[:, 0]), dy)[1:]
        dx.copy_(found)
        for acc, gradient in zip((dweight_acc, dbias_acc), gradients, strict=True):
            if acc is not None:
                acc.add_(gradient)

    return {"linear_forward": forward, "linear_backward": backward}
