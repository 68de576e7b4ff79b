import torch
from torch import Tensor


def clip_and_accumulate(gradients: list[list[Tensor]], tokens: list[int], most: float) -> tuple[list[Tensor], Tensor]:
    total = sum(tokens)
    means = [torch.zeros_like(parameter) for parameter in gradients[0]]
    for micro_batch, count in zip(gradients, tokens, strict=True):
        for mean, gradient in zip(means, micro_batch, strict=True):
            mean += gradient * (count / total)
    norm = sum((mean**2).sum() for mean in means) ** 0.5
    factor = most / norm if norm > most else 1.0
    return [mean * factor for mean in means], norm
