"""Step 4: read 04_layer_norm.md, write the function, then `handgrad climb check 4`."""

import torch
from torch import Tensor

EPSILON = 1e-5  # added to the variance


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Layer norm of each row, forward and backward: y = (x - mean) / sqrt(variance + EPSILON) * weight + bias.

    x       (N, C)  a row of C channels for each of N tokens; the variance divides by C
    weight  (C)
    bias    (C)
    dy      (N, C)  the gradient of the loss with respect to y

    Returns y (N, C), dx (N, C), dweight (C), dbias (C).
    """
    raise NotImplementedError  # yours to write
