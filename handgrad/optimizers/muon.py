"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) for the matrices of the blocks, AdamW for the rest.

With the gradient G of a matrix W (R, C), momentum b and learning rate lr:

    M = b M + (1 - b) G,  U = (1 - b) G + b M                         Nesterov's momentum
    O = polar(U)                                                      U with all singular values near 1
    v = b2 v + (1 - b2) mean_c(O^2),  N = O / sqrt(v)                 a second moment for each row (Li et al. 2025)
    W = W - lr (s N + decay W where N W > 0),  s = 0.2 sqrt(R C) / |N|

N is scaled to a root mean square of 0.2, about that of AdamW's updates, so that one learning rate serves both (Liu et al.
2025, https://arxiv.org/abs/2502.16982). The row-wise moment is NorMuon's (https://arxiv.org/abs/2510.05491); weights decay
only where the update shrinks them (Chen et al. 2025, https://arxiv.org/abs/2510.12402).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from handgrad.models.rows import ParameterRow
from handgrad.ops import CONTROL_LEARNING_RATE, CONTROL_STEP, RESULT_SCALE, RESULT_VERDICT, UPDATE
from handgrad.optimizers import Owned
from handgrad.optimizers.adamw import AdamW

# Step by step the polynomial p(x) = a x + b x^3 + c x^5 that brings singular values from a thousandth to 1 closest to 1
# (Amsel et al. 2025, https://arxiv.org/abs/2505.16932).
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
ABOVE_LARGEST = 1.02  # the norm is divided by a bit more than itself: rounding may not lift a singular value above 1
LEAST_NORM = 1e-7
UPDATE_RMS = 0.2
MATRIX = "matrix"
FIRST_MOMENTUM, WARM_UP_STEPS = 0.85, 300  # momentum grows in a straight line, while the gradient still turns quickly


@dataclass(frozen=True)
class Muon:
    adamw: AdamW
    momentum: float
    beta2: float  # of the rows' second moment
    weight_decay: float
    rate: float  # of the matrices, over the learning rate of the step

    state: ClassVar = AdamW.state  # of a matrix: its momentum, and in the first R places of `v` its rows' second moments

    def whole(self, row: ParameterRow) -> bool:
        return row.group == "matrix"

    def kind(self, row: ParameterRow) -> str | bool:
        """`MATRIX`, or AdamW's kind."""
        return MATRIX if self.whole(row) else self.adamw.kind(row)

    def update(self, ops: ModuleType, owned: Iterable[Owned], controls: Tensor, results: Tensor) -> None:
        """A call per range, and one per matrix; `controls` holds the step and the learning rate, `results` the verdict and
        the clip factor."""
        for part in owned:
            if part.kind == MATRIX:
                self.update_matrix(part, controls, results)
            else:
                self.adamw.update(ops, [part], controls, results)

    def update_matrix(self, part: Owned, controls: Tensor, results: Tensor) -> None:
        dtype, (rows, columns) = part.weight.dtype, part.weight.shape
        step, learning_rate = controls[CONTROL_STEP], self.rate * controls[CONTROL_LEARNING_RATE].to(dtype)
        warmed = (step / WARM_UP_STEPS).clamp(max=1.0)
        b = (FIRST_MOMENTUM + (self.momentum - FIRST_MOMENTUM) * warmed).to(dtype)
        gradient = part.gradient * results[RESULT_SCALE].to(dtype)
        momentum = torch.lerp(gradient, part.state["m"], b)
        update = torch.lerp(gradient, momentum, b)
        # On a GPU in 16 bits: the next polynomial sends back towards 1 what rounding moves (docs/operations/muon.md).
        direction = polar(update.bfloat16() if update.is_cuda else update).to(dtype)
        moments = part.state["v"].view(-1)[:rows]
        squares = self.beta2 * moments + (1 - self.beta2) * direction.square().mean(dim=1)
        direction = direction / (squares.sqrt() + LEAST_NORM)[:, None]
        direction *= UPDATE_RMS * (rows * columns) ** 0.5 / (torch.linalg.vector_norm(direction) + LEAST_NORM)
        decay = self.weight_decay * part.weight * (direction * part.weight > 0)
        weight = part.weight - learning_rate * (direction + decay)
        updates = results[RESULT_VERDICT] == UPDATE
        for tensor, value in ((part.state["m"], momentum), (moments, squares), (part.weight, weight)):
            tensor.copy_(torch.where(updates, value, tensor))
        if part.published.data_ptr() != part.weight.data_ptr():
            part.published.copy_(part.weight)


def polar(matrix: Tensor) -> Tensor:
    """The nearest matrix with singular values of 1, about: U V^T of U S V^T, for which five products of the matrix with
    polynomials of X X^T stand. The shorter side comes first, where X X^T is smallest."""
    X = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    X = X / (torch.linalg.vector_norm(X) * ABOVE_LARGEST + LEAST_NORM)
    for a, b, c in POLAR_EXPRESS:
        A = X @ X.T
        B = torch.addmm(A, A, A, beta=b, alpha=c)
        X = torch.addmm(X, B, X, beta=a)
    return X.T if matrix.shape[0] > matrix.shape[1] else X
