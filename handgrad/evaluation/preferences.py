"""The log-probabilities of answers under a model, and the loss, accuracy and margin of their pairs."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from handgrad.data.preferences import PairBatches
from handgrad.evaluation.loss import OnTokens
from handgrad.joins import documents
from handgrad.joins.parallel.ranks import Ranks
from handgrad.joins.preference import Preference, losses_of, margins_of
from handgrad.machine import devices
from handgrad.models import compute_losses
from handgrad.networks import ModelShape
from handgrad.training.feed import READ, copy_all, fill_inputs, inputs_of


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
    """The summed log-probabilities of the answers of the first `samples` samples, float64, the same on every rank. Ranks
    take micro-batches round-robin."""
    ranks = Ranks() if ranks is None else ranks
    inputs = inputs_of(act, READ)
    ops, host = documents.operations(ops, act, masked=True), devices.host_buffers(inputs)
    batch = act.tokens.shape[0]
    starts, mine = range(0, samples, batch), list[float]()
    own = starts[ranks.rank :: ranks.size]
    for number, first in enumerate(own, start=1):
        fill_inputs(batches, host, first)
        if host is not inputs:
            copy_all(inputs, host)
        ranks.set_status(f"evaluation, sample {first}")
        compute_losses(ops, weights, act, shape)
        mine += (-act.losses.view(act.tokens.shape).cpu().double().sum(1)).tolist()
        if progress is not None:
            progress(number * act.tokens.numel(), len(own) * act.tokens.numel())
    mine += [0.0] * (-(-len(starts) // ranks.size) * batch - len(mine))
    everyone = ranks.all_gather_numbers(mine, "log-probabilities of answers")
    rows = [everyone[i % ranks.size][i // ranks.size * batch : (i // ranks.size + 1) * batch] for i in range(len(starts))]
    return np.concatenate([np.zeros(0), *rows])[:samples]


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
