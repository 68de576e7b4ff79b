"""The update of a matrix by Muon (Jordan et al. 2024), in three operations: momentum, polar factor, new weights.

The equations and their sources are in `handgrad.optimizers.muon`.
"""

import torch
from torch import Tensor

from handgrad import ops

# (a, b, c) of each iteration: the polynomial p(x) = a x + b x^3 + c x^5 that brings singular values from a thousandth to
# 1 closest to 1 (Amsel et al. 2025, https://arxiv.org/abs/2505.16932).
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
ABOVE_LARGEST = 1.02  # U is divided by this times its norm, so that rounding lifts no singular value above 1
LEAST_NORM = 1e-7
UPDATE_RMS = 0.2
FIRST_MOMENTUM, WARM_UP_STEPS = 0.85, 300  # momentum grows linearly while the gradient still changes direction quickly


def muon_scratch_bytes(*, matrices: int, rows: int, columns: int) -> int:
    """Bytes of `scratch` that the operations on a batch of matrices need: none here."""
    return 0


# Nesterov's momentum: M = b M + (1 - b) G, U = (1 - b) G + b M.


def muon_momentum(
    update: Tensor, m_inout: Tensor, gradient: Tensor, controls: Tensor, results: Tensor, *, momentum: float
) -> None:
    """update (R, C), any dtype, = U for gradient (R, C) times the clip factor; m_inout (R, C) = M. `momentum`: b after the
    warm-up. If the verdict forbids an update, m_inout stays and `update` is undefined."""
    dtype = gradient.dtype
    warmed = (controls[ops.CONTROL_STEP] / WARM_UP_STEPS).clamp(max=1.0)
    b = (FIRST_MOMENTUM + (momentum - FIRST_MOMENTUM) * warmed).to(dtype)
    scaled = gradient * results[ops.RESULT_SCALE].to(dtype)
    m = torch.lerp(scaled, m_inout, b)
    update.copy_(torch.lerp(scaled, m, b))
    m_inout.copy_(torch.where(results[ops.RESULT_VERDICT] == ops.UPDATE, m, m_inout))


# Polar factor: the nearest matrix whose singular values are 1, Y Z^T for Y S Z^T. Five polynomials, each a X + b (X X^T) X
# + c (X X^T)^2 X, approximate it.


def muon_polar(update_to_polar_inout: Tensor, *, scratch: Tensor | None = None) -> None:
    """Replaces each of the matrices (n, R, C) by its polar factor, with the same bits in any batch."""
    for matrix in update_to_polar_inout:
        matrix.copy_(polar(matrix))


def polar(matrix: Tensor) -> Tensor:
    """The polar factor of one matrix. Transposes a tall one, so that X X^T is as small as possible."""
    X = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    X = X / (torch.linalg.vector_norm(X) * ABOVE_LARGEST + LEAST_NORM)
    for a, b, c in POLAR_EXPRESS:
        A = X @ X.T
        B = torch.addmm(A, A, A, beta=b, alpha=c)
        X = torch.addmm(X, B, X, beta=a)
    return X.T if matrix.shape[0] > matrix.shape[1] else X


# New weights: v = b2 v + (1 - b2) mean_c(O^2), N = O / sqrt(v), s = 0.2 sqrt(R C) / |N|,
# W = W - lr (s N + decay W where N W > 0).


def muon_update(
    published: Tensor,
    weight_inout: Tensor,
    moments_inout: Tensor,
    polar: Tensor,
    controls: Tensor,
    results: Tensor,
    *,
    rate: float,
    beta2: float,
    weight_decay: float,
    scratch: Tensor | None = None,
) -> None:
    """One update of a matrix (R, C) along its `polar` factor O (R, C), unless the verdict in `results` forbids it.
    moments_inout (R): v. `published` (any dtype, possibly `weight_inout` itself) receives the new weights, rounded. `rate`:
    the matrix's learning rate, relative to the one in `controls`."""
    dtype, (rows, columns) = weight_inout.dtype, weight_inout.shape
    learning_rate = rate * controls[ops.CONTROL_LEARNING_RATE].to(dtype)
    direction = polar.to(dtype)
    moments = beta2 * moments_inout + (1 - beta2) * direction.square().mean(dim=1)
    direction = direction / (moments.sqrt() + LEAST_NORM)[:, None]
    direction *= UPDATE_RMS * (rows * columns) ** 0.5 / (torch.linalg.vector_norm(direction) + LEAST_NORM)
    decay = weight_decay * weight_inout * (direction * weight_inout > 0)
    weight = weight_inout - learning_rate * (direction + decay)
    updates = results[ops.RESULT_VERDICT] == ops.UPDATE
    for tensor, value in ((moments_inout, moments), (weight_inout, weight)):
        tensor.copy_(torch.where(updates, value, tensor))
    if published.data_ptr() != weight_inout.data_ptr():
        published.copy_(weight_inout)
