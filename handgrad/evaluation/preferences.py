"""The log-probabilities of answers under a model, and the loss, accuracy and margin of their pairs."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from handgrad.data.preferences import PairBatches
from handgrad.evaluation.loss import OnTokens, in_order, token_losses
from handgrad.joins.parallel.ranks import Ranks
from handgrad.joins.preference import Preference, losses_of, margins_of
from handgrad.networks import ModelShape


@dataclass(frozen=True)
class PairsHeldOut:
    """A model beside the first one, on pairs."""

    loss: float  # nats per pair
    accuracy: float  # share of pairs with a margin above 0
    margin: float  # mean
    pairs: int


def answer_sums(
    shape: ModelShape,
    ops: Any,
    weights: Any,
    act: Any,
    batches: PairBatches,
    samples: int,
    ranks: Ranks | None = None,
    progress: OnTokens | None = None,
) -> np.ndarray:
    """The summed log-probabilities of the answers of the first `samples` samples, float64, the same on every rank."""
    ranks, batch, own = Ranks() if ranks is None else ranks, act.tokens.shape[0], list[float]()
    for _, losses in token_losses(shape, ops, weights, act, batches, samples, ranks, progress):
        own += (-losses.sum(1)).tolist()
    return np.array(in_order(own, batch, -(-samples // batch), ranks)[:samples])


def held_out_pairs(
    shape: ModelShape,
    ops: Any,
    weights: Any,
    act: Any,
    batches: PairBatches,
    about: Preference,
    *,
    most_tokens: int = 0,
    ranks: Ranks | None = None,
    progress: OnTokens | None = None,
) -> PairsHeldOut:
    """The figures of the first pairs, as many as `most_tokens` (0: all) hold in rows."""
    samples = batches.samples_per_epoch
    if 0 < most_tokens < batches.shard.token_count:
        samples = min(samples, max(2, most_tokens // batches.sequence_length // 2 * 2))
    sums = torch.from_numpy(answer_sums(shape, ops, weights, act, batches, samples, ranks, progress))
    margins = margins_of(sums, torch.from_numpy(batches.references_of(0, samples)), about.beta)
    loss, accuracy = losses_of(margins, about.smoothing).mean().item(), (margins > 0).double().mean().item()
    return PairsHeldOut(loss, accuracy, margins.mean().item(), samples // 2)
