"""Step 12: read 12_clip_and_accumulate.md, write the function, then `handgrad climb check 12`."""

import torch
from torch import Tensor


def clip_and_accumulate(gradients: list[list[Tensor]], tokens: list[int], most: float) -> tuple[list[Tensor], Tensor]:
    """The gradient of a step of several micro-batches, clipped.

    gradients  for each micro-batch a list: for each parameter the gradient of the micro-batch's mean loss
    tokens     for each micro-batch how many tokens its mean is over; they differ, padding does not count
    most       the largest norm that the step's gradient may have, over all parameters together

    Returns the gradient of the mean over all tokens of the step, for each parameter, shortened to norm `most` if it is
    longer; and its norm before that, a tensor without dimensions.
    """
    raise NotImplementedError  # yours to write
