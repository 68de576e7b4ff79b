"""Pictures as bytes: into a network, and the squared error of what comes out."""

import torch
from torch import Tensor

# A byte is a number from -1 to 1: x = byte / 127.5 - 1. A picture's bytes lie row by row, red, green and blue in turn.
HALF_RANGE = 127.5


def pixels_forward(out: Tensor, tokens: Tensor) -> None:
    """out (B, Y, X, 3) from the bytes `tokens` (B, T), T = 3 Y X."""
    out.copy_(tokens.view(out.shape))
    out.div_(HALF_RANGE).sub_(1)


# Squared error: l = (y - x)^2 of each byte, so the mean loss is the mean squared error.  dl/dy = 2 (y - x).


def squared_error_forward(losses: Tensor, prediction: Tensor, targets: Tensor) -> None:
    """losses (N) from prediction (B, Y, X, 3) and the bytes `targets` (B, T), N = B T."""
    losses.copy_(difference_of(prediction, targets, losses.dtype).square_().view(losses.shape))


def squared_error_forward_backward(
    losses: Tensor, prediction_to_dprediction_inout: Tensor, targets: Tensor, scale: Tensor
) -> None:
    """`squared_error_forward`; then turns the prediction into scale (1) * its gradient, in place."""
    difference = difference_of(prediction_to_dprediction_inout, targets, losses.dtype)
    losses.copy_(difference.square().view(losses.shape))
    prediction_to_dprediction_inout.copy_(difference.mul_(2 * scale))


def difference_of(prediction: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """y - x (B, Y, X, 3), in a new tensor."""
    x = targets.view(prediction.shape).to(dtype).div_(HALF_RANGE).sub_(1)
    return prediction - x
