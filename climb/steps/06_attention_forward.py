"""Step 6: read 06_attention_forward.md, write the function, then `handgrad climb check 6`."""

import torch
from torch import Tensor


def attention_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention: y = softmax(q k^T / sqrt(D)) v, where a query sees the keys at and before its own position.

    q, k, v  (B, H, T, D)  B sequences, H heads, T positions, D channels of a head

    Returns y (B, H, T, D) and lse (B, H, T), the logarithm of each row's softmax denominator.
    """
    raise NotImplementedError  # yours to write
