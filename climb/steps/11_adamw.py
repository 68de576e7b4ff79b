"""Step 11: read 11_adamw.md, write the function, then `handgrad climb check 11`."""

import torch
from torch import Tensor


def adamw(
    w: Tensor,
    m: Tensor,
    v: Tensor,
    g: Tensor,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """One update of a tensor of weights by AdamW. Matrices decay; vectors (biases, the weights of norms) do not.

    w      (R, C) or (C)  the weights
    m, v   as w           running means of the gradient and of its square, 0 before the first step
    g      as w           the gradient
    step                  counts from 1
    lr                    the learning rate; `decay` is relative to it

    m and v move by 1 - beta towards g and its square; m' and v' are corrected for their start at 0, the returned ones not;
    the new w is (1 - lr decay) w - lr m' / (sqrt(v') + epsilon).

    Returns the new w, m, v.
    """
    raise NotImplementedError  # yours to write
