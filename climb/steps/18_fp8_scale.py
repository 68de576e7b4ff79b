"""Step 18: read 18_fp8_scale.md, write the function, then `handgrad climb check 18`."""

import torch
from torch import Tensor


def fp8_scale(x: Tensor, amax: float) -> tuple[Tensor, Tensor]:
    """A tensor in 8 bits (e4m3: magnitudes from 2^-9 to 448 = 1.75 * 2^8), with a scale from the step before.

    x     (N, C)  float32
    amax          the largest magnitude that the tensor had in the step before; x may exceed it. 0: the scale is 1

    Returns q (N, C), torch.float8_e4m3fn: x * scale, rounded to nearest, and magnitudes above 448 as 448; and the scale,
    a float32 tensor without dimensions: the largest power of two for which amax * scale is at most 448.
    """
    raise NotImplementedError  # yours to write
