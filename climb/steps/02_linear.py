"""Step 2: read 02_linear.md, write the function, then `handgrad climb check 2`."""

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A linear layer, forward and backward: y = x weight^T + bias.

    x       (N, I)  N tokens, I input channels
    weight  (O, I)
    bias    (O)
    dy      (N, O)  the gradient of the loss with respect to y

    Returns y (N, O), dx (N, I), dweight (O, I), dbias (O).
    """
    raise NotImplementedError  # yours to write
