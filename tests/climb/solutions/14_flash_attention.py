import math

import torch
from torch import Tensor


def flash_attention(q: Tensor, k: Tensor, v: Tensor, block: int) -> tuple[Tensor, Tensor]:
    B, H, T, D = q.shape
    most = q.new_full((B, H, T, 1), -math.inf)
    total = q.new_zeros(B, H, T, 1)
    y = torch.zeros_like(q)
    query = torch.arange(T)[:, None]
    for first in range(0, T, block):
        keys = slice(first, min(first + block, T))
        scores = q @ k[:, :, keys].mT / math.sqrt(D)
        scores = scores.masked_fill(torch.arange(first, keys.stop) > query, -math.inf)
        new = torch.maximum(most, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - new)
        old = torch.exp(most - new)
        total = total * old + weights.sum(-1, keepdim=True)
        y = y * old + weights @ v[:, :, keys]
        most = new
    return y / total, (most + total.log()).squeeze(-1)
