import math

import torch
from torch import Tensor


def attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    scale = 1 / math.sqrt(q.shape[-1])
    P = torch.exp(q @ k.mT * scale - lse[..., None]).tril()
    dv = P.mT @ dy
    dP = dy @ v.mT
    delta = (dy * y).sum(-1, keepdim=True)
    dS = P * (dP - delta)
    return dS @ k * scale, dS.mT @ q * scale, dv
