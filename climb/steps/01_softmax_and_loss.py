"""Step 1: read 01_softmax_and_loss.md, write the function, then `handgrad climb check 1`."""

import torch
from torch import Tensor


def softmax_and_loss(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The cross-entropy of each token, and the gradient of their sum times `scale`.

    logits   (N, V)  a score for each of V words, at each of N tokens
    targets  (N)     int64: the word that came
    scale            1 / N makes the gradient the mean's

    Returns loss (N), in nats, and dlogits (N, V) = scale * d(sum of loss) / dlogits.
    """
    raise NotImplementedError  # yours to write
