"""Where GPT-2 leaves numbers out in training: after the embedding, in attention's probabilities, and at the end of both
branches before they join the residual stream. Every place has masks of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count

from torch import Tensor

from handgrad.config import RunConfig
from handgrad.dropout.masks import Dropout

SAMPLES = "dropout_samples"  # the buffer that says which samples a micro-batch holds


@dataclass(frozen=True)
class BlockDropout:
    """A block's three places; None where nothing is left out."""

    attention: Dropout | None = None  # of the probabilities
    proj: Dropout | None = None
    fcproj: Dropout | None = None


@dataclass(frozen=True)
class ModelDropout:
    """All places of a model, numbered in the order of the forward."""

    samples: Tensor  # (B) int64: the numbers of the micro-batch's samples in the run
    embedding: Dropout
    blocks: tuple[BlockDropout, ...]


def model_dropout(config: RunConfig, views: Mapping[str, Tensor]) -> ModelDropout | None:
    """The places over the arena's views; None if `config` leaves nothing out, or the views are not those of a training."""
    if SAMPLES not in views:
        return None
    samples, sites = views[SAMPLES], count()

    def place() -> Dropout:
        return Dropout(samples, config.dropout, config.seed, next(sites))

    embedding = place()
    blocks = tuple(BlockDropout(place(), place(), place()) for _ in range(config.num_layers))
    return ModelDropout(samples, embedding, blocks)
