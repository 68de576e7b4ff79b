import math

import torch
from torch import Tensor

ROOT, CUBIC = math.sqrt(2 / math.pi), 0.044715


def gelu(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    t = torch.tanh(ROOT * (x + CUBIC * x**3))
    du = ROOT * (1 + 3 * CUBIC * x**2)
    slope = (1 + t) / 2 + x / 2 * (1 - t**2) * du
    return x / 2 * (1 + t), dy * slope
