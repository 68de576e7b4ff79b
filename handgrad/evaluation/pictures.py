"""The loss of a model on held-out pictures, apart for their codes and for captions or classes; and an autoencoder's."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from handgrad.data.batches import Batches
from handgrad.data.shards import Dataset
from handgrad.evaluation.loss import OnTokens, in_order, token_losses
from handgrad.joins.parallel.ranks import Ranks
from handgrad.models.vqvae import bytes_of
from handgrad.networks.vqvae import family_of
from handgrad.settings.config import ModelShape


@dataclass(frozen=True)
class CodesHeldOut:
    """An autoencoder on a validation split."""

    loss: float  # mean squared error of a byte, on the scale from -1 to 1
    uses: np.ndarray  # (codes): places with each code
    pictures: int

    @property
    def perplexity(self) -> float:
        """exp of the entropy of the codes: as many equally frequent ones would tell as much."""
        share = self.uses[self.uses > 0] / self.uses.sum()
        return math.exp(-float((share * np.log(share)).sum()))


@dataclass(frozen=True)
class PicturesHeldOut:
    """A model's losses, in nats a token, on a validation split."""

    loss: float  # of all tokens
    code_loss: float  # of a picture's codes
    other_loss: float | None  # of classes, captions and ends; None if there are none
    tokens: int  # scored


def held_out(
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
) -> CodesHeldOut | PicturesHeldOut:
    """An autoencoder's error and codes, or the losses of a model of codes, on the first `eval_tokens` tokens (0: all) of
    the validation split, equal on any number of ranks."""
    assert dataset.codes is not None
    first_other, length = len(dataset.codes.colours), act.tokens.shape[1]
    batches = Batches(dataset.splits["validation"], length, 0, shuffle=False, packing=packing)
    samples, codes = batches.samples_of(eval_tokens), family_of(shape).codes if shape.network.pictures else 0
    width, sums = 1 + codes if codes else 4, list[float]()
    for first, losses in token_losses(shape, ops, weights, act, batches, samples, ranks, progress):
        if codes:
            sums += [losses.sum().item(), *torch.bincount(act.codes[: len(losses)].flatten(), minlength=codes).tolist()]
            continue
        batch_sums = np.zeros(4)
        for row, each in enumerate(losses):
            targets = batches.window(first + row)[1:]
            is_code, scored = targets < first_other, each[: len(targets)].numpy()
            batch_sums += scored[is_code].sum(), scored[~is_code].sum(), is_code.sum(), (~is_code).sum()
        sums += batch_sums.tolist()
    every = np.array(in_order(sums, width, -(-samples // act.tokens.shape[0]), ranks)).reshape(-1, width)
    if codes:
        return CodesHeldOut(math.fsum(every[:, 0]) / (samples * length), every[:, 1:].sum(0), samples)
    code_nats, other_nats, scored_codes, others = map(math.fsum, every.T)
    loss, other_loss = (code_nats + other_nats) / (scored_codes + others), other_nats / others if others else None
    return PicturesHeldOut(loss, code_nats / scored_codes, other_loss, int(scored_codes + others))


def reconstructions(
    shape: ModelShape, ops: Any, weights: Any, act: Any, dataset: Dataset, *, packing: str
) -> list[np.ndarray]:
    """Pictures (2 Y, X, 3) of the validation split, each above what an autoencoder's codes draw; at most a micro-batch."""
    if not dataset.splits["validation"]:
        return []
    batches = Batches(dataset.splits["validation"], act.tokens.shape[1], 0, shuffle=False, packing=packing)
    samples = min(act.tokens.shape[0], batches.samples_per_epoch)
    next(token_losses(shape, ops, weights, act, batches, samples, Ranks()))
    drawn = bytes_of(act.prediction[:samples])
    return [*torch.cat([act.targets[:samples].view(drawn.shape).to(torch.uint8), drawn], 1).cpu().numpy()]
