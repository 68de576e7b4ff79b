"""Central differences: the gradient of a number, from that number alone."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

STEP = 3e-5  # h
# In float64 (f(x + h) - f(x - h)) / 2h errs by h^2 f'''/6, 1.5e-10 f''', and by the rounding of f over h, 4e-12 f. The
# cases have numbers around 1, and third derivatives of some hundreds at most.
TOLERANCE = 1e-7


@dataclass(frozen=True)
class Compared:
    """A gradient by hand against central differences."""

    of: str  # the tensor that it is the gradient of
    error: float  # || by hand - by differences || / || by differences ||
    worst: str  # the place where they differ most
    by_hand: float  # there
    by_differences: float  # there

    @property
    def right(self) -> bool:
        return self.error <= TOLERANCE  # False for NaN


def differences(number: Callable[[], float], x: Tensor) -> Tensor:
    """d number / d x, for each element of x (any shape, float64), which is changed and set back."""
    found, values = torch.empty_like(x), x.view(-1)
    for place in range(len(values)):
        value = values[place].item()
        values[place] = value + STEP
        above = number()
        values[place] = value - STEP
        found.view(-1)[place] = (above - number()) / (2 * STEP)
        values[place] = value
    return found


def slope(number: Callable[[], float], x: Tensor, direction: Tensor) -> float:
    """The derivative of `number` along a direction of x, which is changed and set back: for tensors that are too large to
    change an element at a time."""
    before = x.clone()
    x.add_(direction, alpha=STEP)
    above = number()
    x.copy_(before).sub_(direction, alpha=STEP)
    below = number()
    x.copy_(before)
    return (above - below) / (2 * STEP)


def compare(of: str, by_hand: Tensor, by_differences: Tensor) -> Compared:
    distance = (by_hand - by_differences).nan_to_num(torch.inf, torch.inf, -torch.inf)
    place = int(distance.abs().argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(place), by_hand.shape)]
    error = float((by_hand - by_differences).norm() / by_differences.norm().clamp_min(1e-30))
    return Compared(of, error, str(index), by_hand.flatten()[place].item(), by_differences.flatten()[place].item())
