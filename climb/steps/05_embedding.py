"""Step 5: read 05_embedding.md, write the function, then `handgrad climb check 5`."""

import torch
from torch import Tensor


def embedding(tokens: Tensor, wte: Tensor, wpe: Tensor, dx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Token and position embedding, forward and backward: x[b, t] = wte[tokens[b, t]] + wpe[t].

    tokens  (B, T)     int64: the words of B sequences of T positions; words repeat
    wte     (V, C)     a row for each word
    wpe     (M, C)     a row for each position, M >= T
    dx      (B, T, C)  the gradient of the loss with respect to x

    Returns x (B, T, C), dwte (V, C), dwpe (M, C); rows that no token reads have a gradient of 0.
    """
    raise NotImplementedError  # yours to write
