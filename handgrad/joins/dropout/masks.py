"""One site of the model where numbers are dropped in training, and the seeds of its mask."""

from dataclasses import dataclass

from torch import Tensor

from handgrad.ops.hashing import mixed

# 16 random bits for each number decide: a probability counts in steps of 2^-16.
BITS = 16

# The layout of a mask's random numbers (docs/operations/dropout.md). 16 rows share a key; under it a row's numbers begin
# 2^20 places after the previous row's, as no row is longer. A hash of 32 bits serves two columns that are 8 apart: on
# tensor cores a lane has both, whether columns or rows of the tile are what is masked.
ROWS, ROW_STRIDE, PAIR = 16, 1 << 20, 8


@dataclass(frozen=True)
class Dropout:
    """The inputs of one site's masks, which are the same whenever and wherever they are made."""

    samples: Tensor  # (B) int64: the numbers of the micro-batch's samples in the run
    probability: float  # of a number to be dropped
    seed: int
    site: int  # its number; no two sites of a model have the same

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
        """The factor of kept numbers, one over the share of them, so that the mean stays."""
        return (1 << BITS) / ((1 << BITS) - self.threshold)
