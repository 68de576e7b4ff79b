"""One place of the model where numbers are left out in training, and what decides which."""

from dataclasses import dataclass

from torch import Tensor

from handgrad.ops.hashing import mixed

# 16 random bits for each number decide: a probability counts in steps of 2^-16.
BITS = 16

# How a mask's random numbers are laid out (docs/operations/dropout.md). 16 rows share a key; under it a row's numbers begin
# 2^20 places after those of the row before, as no row is longer. A hash of 32 bits serves two columns that are 8 apart: on
# tensor cores a lane has both, whether columns or rows of the tile are what is masked.
ROWS, ROW_STRIDE, PAIR = 16, 1 << 20, 8


@dataclass(frozen=True)
class Dropout:
    """What the masks of one place follow from. They are the same whenever and wherever they are made."""

    samples: Tensor  # (B) int64: which samples of the run the micro-batch holds
    probability: float  # of a number to be left out
    seed: int
    site: int  # the place: every one in the model has a number of its own

    @property
    def stream(self) -> int:
        """32 bits that stand for seed and site."""
        return mixed(self.site ^ mixed(self.seed))

    @property
    def threshold(self) -> int:
        """A number is kept whose random bits are at least this."""
        return round(self.probability * (1 << BITS))

    @property
    def scale(self) -> float:
        """What kept numbers are multiplied by: one over the share of numbers that are kept, so the mean stays."""
        return (1 << BITS) / ((1 << BITS) - self.threshold)
