"""Step 16: read 16_two_ranks.md, write the function, then `handgrad climb check 16`."""

import torch
from torch import Tensor


def two_ranks(pieces: list[Tensor]) -> Tensor:
    """The sum of P gradients, P = 1, 2, 4, 8, ..., whose bits do not depend on how many ranks add it.

    pieces  (n)  float32 each: with one rank the gradients of all P lanes; with two, each rank calls the function with its
                 half of them, the first or the second, and then both results are added by a call with two pieces; with
                 four ranks likewise with quarters, then with four pieces

    Returns the sum (n), float32, with the same bits in all three ways.
    """
    raise NotImplementedError  # yours to write
