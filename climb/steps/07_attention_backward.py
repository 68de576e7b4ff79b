"""Step 7: read 07_attention_backward.md, write the function, then `handgrad climb check 7`."""

import torch
from torch import Tensor


def attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of step 6. The softmax was not kept: P = exp(q k^T / sqrt(D) - lse) where a query sees the key, else 0.

    dy       (B, H, T, D)  the gradient of the loss with respect to y
    q, k, v  (B, H, T, D)  as in the forward
    y        (B, H, T, D)  and lse (B, H, T): what the forward returned

    Returns dq, dk, dv, each (B, H, T, D).
    """
    raise NotImplementedError  # yours to write
