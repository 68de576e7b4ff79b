"""Step 9: read 09_tied_head.md, write the function, then `handgrad climb check 9`."""

import torch
from torch import Tensor


def tied_head(x: Tensor, dlogits: Tensor, tokens: Tensor, dembedded: Tensor, wte: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of a matrix that the model reads twice: embedded = wte[tokens], and logits = x wte^T.

    x          (N, C)  the last norm's output
    dlogits    (N, V)  the gradient of the loss with respect to the logits
    tokens     (N)     int64: the words that were looked up
    dembedded  (N, C)  the gradient of the loss with respect to `embedded`
    wte        (V, C)

    Returns dx (N, C) and dwte (V, C).
    """
    raise NotImplementedError  # yours to write
