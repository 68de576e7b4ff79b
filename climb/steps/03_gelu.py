"""Step 3: read 03_gelu.md, write the function, then `handgrad climb check 3`."""

import math

import torch
from torch import Tensor

ROOT, CUBIC = math.sqrt(2 / math.pi), 0.044715


def gelu(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """GELU in its tanh form, forward and backward: y = x/2 (1 + tanh u), u = ROOT (x + CUBIC x^3).

    x   (N, F)  each number alone
    dy  (N, F)  the gradient of the loss with respect to y

    Returns y (N, F), dx (N, F).
    """
    raise NotImplementedError  # yours to write
