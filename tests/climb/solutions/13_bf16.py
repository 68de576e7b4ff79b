import torch
from torch import Tensor


def bf16(master: Tensor, gradients: list[Tensor], lr: float) -> tuple[Tensor, Tensor]:
    total = torch.zeros_like(master)
    for gradient in gradients:
        total += gradient.float().sum(0)
    new = master - lr * total
    return new, new.bfloat16()
