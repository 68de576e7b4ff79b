"""Step 13: read 13_bf16.md, write the function, then `handgrad climb check 13`."""

import torch
from torch import Tensor


def bf16(master: Tensor, gradients: list[Tensor], lr: float) -> tuple[Tensor, Tensor]:
    """A step of gradient descent for the bias of a layer that computes in bf16.

    master     (O)     float32: the exact weights
    gradients  (N, O)  bf16, for each micro-batch: a row for each token. The bias's gradient is the sum over all tokens of
                       all micro-batches
    lr                 the learning rate: weights - lr * gradient

    Returns the new master (O) in float32, and the weights (O) in bf16, with which the next forward computes.
    """
    raise NotImplementedError  # yours to write
