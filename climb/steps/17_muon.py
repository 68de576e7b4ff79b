"""Step 17: read 17_muon.md, write the function, then `handgrad climb check 17`."""

import torch
from torch import Tensor

# (a, b, c) of each iteration, in order: p(X) = a X + b (X X^T) X + c (X X^T)^2 X. Amsel et al. 2025.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def muon(update: Tensor) -> Tensor:
    """Nearly the polar factor of a matrix: its singular vectors, with singular values near 1, by five polynomials.

    update  (R, C)  divided by 1.02 times its norm (of all its numbers) plus 1e-7 before the first polynomial. A tall one
                    (R > C) is transposed first and back at the end, so that X X^T is the smaller of the two squares

    Returns (R, C).
    """
    raise NotImplementedError  # yours to write
