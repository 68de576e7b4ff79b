"""Step 8: read 08_residual_stream.md, write the function, then `handgrad climb check 8`."""

from collections.abc import Callable

import torch
from torch import Tensor


def residual_stream(dstream: Tensor, branches: list[Callable[[Tensor], Tensor]]) -> None:
    """Turns the gradient at the end of the stream into the gradient at its beginning, in the same buffer.

    Forward, the stream was x = x + branch(x), once for each branch, in the order of the list.

    dstream   (N, C)  holds the gradient behind the last branch; must hold the one before the first when you return
    branches  each is a branch's backward: it reads the gradient of the branch's output (N, C), and returns the gradient of
              its input (N, C). All return the same scratch buffer: the next call overwrites it.

    Returns nothing.
    """
    raise NotImplementedError  # yours to write
