"""Step 17: Muon's orthogonalisation."""

import torch
from torch.overrides import TorchFunctionMode

from handgrad.ops import reference
from handgrad.ops.reference.muon import POLAR_EXPRESS
from handgrad.tools.climb import Case

TOLERANCE = 1e-8


def cases(draw):
    for R, C, size in ((5, 7, 3.0), (8, 3, 0.01), (4, 4, 1.0)):
        yield Case({"R": R, "C": C}, update=draw(R, C) * size)


def answers(c):
    found = c.update.clone()
    reference.muon_polar(found[None])
    U, _, V = torch.linalg.svd(c.update, full_matrices=False)
    c.exact = U @ V
    return {"polar": found}


class Squares(TorchFunctionMode):
    """Notes the largest tensor."""

    most = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.most = max(self.most, made.numel())
        return made


def further(function, cases):
    with Squares() as squares:
        function(torch.randn(40, 4, dtype=torch.float64))
    return (
        f"makes a tensor of {squares.most} numbers for a (40, 4) matrix, where 160 are enough: transpose a tall one"
        if squares.most > 160
        else ""
    )


def polar(c, *, divisor=lambda X: 1.02 * X.norm() + 1e-7, coefficients=POLAR_EXPRESS, power=2, right=False):
    X = c.update / divisor(c.update)
    X = X.T if X.shape[0] > X.shape[1] else X
    for a, b, third in coefficients:
        A = X.T @ X if right else X @ X.T
        more = third * (A @ A if power == 2 else A)
        X = a * X + (X @ (b * A + more) if right else (b * A + more) @ X)
    return X.T if c.update.shape[0] > c.update.shape[1] else X


MISTAKES = (
    ("polar", "is not divided by its norm first: the polynomials hold for singular values up to 1", lambda c: polar(c, divisor=lambda X: 1.0)),
    ("polar", "is divided by its norm without the factor 1.02", lambda c: polar(c, divisor=lambda X: X.norm() + 1e-7)),
    ("polar", "is divided by its norm exactly, without 1.02 and 1e-7", lambda c: polar(c, divisor=lambda X: X.norm())),
    ("polar", "lacks 1e-7 in the divisor", lambda c: polar(c, divisor=lambda X: 1.02 * X.norm())),
    ("polar", "multiplies 1e-7 by 1.02 as well", lambda c: polar(c, divisor=lambda X: 1.02 * (X.norm() + 1e-7))),
    ("polar", "is divided by its largest singular value, where the norm of all numbers belongs", lambda c: polar(c, divisor=lambda X: 1.02 * torch.linalg.matrix_norm(X, 2) + 1e-7)),
    ("polar", "is divided by its largest number, where the norm belongs", lambda c: polar(c, divisor=lambda X: 1.02 * X.abs().max() + 1e-7)),
    ("polar", "is divided by the squared norm", lambda c: polar(c, divisor=lambda X: 1.02 * X.norm() ** 2 + 1e-7)),
    ("polar", "stops after one polynomial: there are five", lambda c: polar(c, coefficients=POLAR_EXPRESS[:1])),
    ("polar", "stops after four polynomials: there are five", lambda c: polar(c, coefficients=POLAR_EXPRESS[:4])),
    ("polar", "repeats the first polynomial: each has its own coefficients", lambda c: polar(c, coefficients=POLAR_EXPRESS[:1] * 5)),
    ("polar", "repeats the last polynomial: each has its own coefficients", lambda c: polar(c, coefficients=POLAR_EXPRESS[-1:] * 5)),
    ("polar", "takes the polynomials in reversed order", lambda c: polar(c, coefficients=POLAR_EXPRESS[::-1])),
    ("polar", "lacks the fifth power, c (X X^T)^2 X", lambda c: polar(c, coefficients=[(a, b, 0.0) for a, b, _ in POLAR_EXPRESS])),
    ("polar", "grows without bound, as it does without the third power b (X X^T) X or with its sign turned", lambda c: polar(c, coefficients=[(a, 0.0, t) for a, _, t in POLAR_EXPRESS])),
    ("polar", "lacks a X", lambda c: polar(c, coefficients=[(0.0, b, t) for _, b, t in POLAR_EXPRESS])),
    ("polar", "multiplies c by X X^T, where its square belongs", lambda c: polar(c, power=1)),
    ("polar", "is the exact polar factor: five polynomials come near it, without a decomposition", lambda c: c.exact),
    ("polar", "is the matrix divided by its norm: no polynomial has been applied", lambda c: c.update / (1.02 * c.update.norm() + 1e-7)),
)  # fmt: skip
