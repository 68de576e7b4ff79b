"""The loss of a model on held-out pictures, apart for their codes and for captions or classes."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from handgrad.data.batches import Batches
from handgrad.data.shards import Dataset
from handgrad.evaluation.loss import OnTokens, in_order, token_losses
from handgrad.joins.parallel.ranks import Ranks
from handgrad.settings.config import ModelShape

CHANNELS = 3  # of a pixel


@dataclass(frozen=True)
class PicturesHeldOut:
    """A model's losses, in nats a token, on a validation split."""

    loss: float  # of all tokens
    code_loss: float  # of a picture's codes
    other_loss: float | None  # of classes, captions and ends; None if there are none
    codes: int  # scored
    others: int

    @property
    def bits_per_dimension(self) -> float:
        """The code's loss in bits per channel of a pixel, for codes that are pixels."""
        return self.code_loss / math.log(2) / CHANNELS


def held_out_pictures(
    shape: ModelShape,
    ops: Any,
    weights: Any,
    act: Any,
    dataset: Dataset,
    *,
    packing: str,
    eval_tokens: int = 0,
    ranks: Ranks,
    progress: OnTokens | None = None,
) -> PicturesHeldOut:
    """The losses on the first `eval_tokens` tokens (0: all) of the validation split. The sums are equal on any number of
    ranks."""
    assert dataset.codes is not None
    first_other, length = len(dataset.codes.colours), act.tokens.shape[1]
    batches = Batches(dataset.splits["validation"], length, 0, shuffle=False, packing=packing)
    samples = batches.samples_of(eval_tokens) if eval_tokens else batches.samples_per_epoch
    sums: list[float] = []
    for first, losses in token_losses(shape, ops, weights, act, batches, samples, ranks, progress):
        batch_sums = np.zeros(4)
        for row, each in enumerate(losses):
            targets = batches.window(first + row)[1:]
            is_code, scored = targets < first_other, each[: len(targets)].numpy()
            batch_sums += scored[is_code].sum(), scored[~is_code].sum(), is_code.sum(), (~is_code).sum()
        sums += batch_sums.tolist()
    every = in_order(sums, 4, -(-samples // act.tokens.shape[0]), ranks)
    code_nats, other_nats, codes, others = (math.fsum(every[n::4]) for n in range(4))
    other_loss = other_nats / others if others else None
    loss = (code_nats + other_nats) / (codes + others)
    return PicturesHeldOut(loss, code_nats / codes, other_loss, int(codes), int(others))
