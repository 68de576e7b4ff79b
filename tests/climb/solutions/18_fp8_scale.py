import math

import torch
from torch import Tensor


def fp8_scale(x: Tensor, amax: float) -> tuple[Tensor, Tensor]:
    scale = 2.0 ** math.floor(math.log2(448 / amax)) if amax else 1.0
    q = (x * scale).clamp(-448, 448)
    return q.to(torch.float8_e4m3fn), torch.tensor(scale)
