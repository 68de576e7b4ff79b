"""Mean loss over held-out samples."""

import math
from types import ModuleType
from typing import Any

from handgrad import devices
from handgrad.config import ModelShape
from handgrad.data.batches import Batches
from handgrad.data.shards import Dataset
from handgrad.models import architecture
from handgrad.parallel.ranks import Ranks


def mean_loss(
    shape: ModelShape,
    ops: ModuleType,
    weights: Any,
    act: Any,
    batches: Batches,
    *,
    samples: int,
    ranks: Ranks | None = None,
) -> float:
    """Mean cross-entropy in nats over the tokens of the first `samples` samples (at most one epoch).

    The last micro-batch may be padded with samples that do not count. Several ranks share the micro-batches
    round-robin; each adds all their sums in the order of the samples, as a single rank does.
    """
    ranks = Ranks() if ranks is None else ranks
    model, (tokens, targets) = architecture(shape), devices.host_buffers(act.tokens, act.targets)
    samples = min(samples, batches.samples_per_epoch)
    batch = act.tokens.shape[0]
    starts = range(0, samples, batch)
    turns = -(-len(starts) // ranks.size)
    sums = [0.0] * turns
    for turn, first in enumerate(starts[ranks.rank :: ranks.size]):
        batches.fill(tokens, targets, first)
        if tokens is not act.tokens:
            act.tokens.copy_(tokens)
            act.targets.copy_(targets)
        ranks.set_status(f"evaluation, sample {first}")
        model.loss(ops, weights, act, vocab_size=shape.vocab_size)
        counted = min(batch, samples - first)
        sums[turn] = act.losses.view(act.tokens.shape)[:counted].cpu().double().sum().item()
    everyone = ranks.all_gather_numbers(sums, "losses of the evaluation")
    total = 0.0
    for index in range(len(starts)):
        total += everyone[index % ranks.size][index // ranks.size]
    return total / (samples * act.tokens.shape[1])


def perplexity(loss: float) -> float:
    """exp(loss), for a loss in nats per token; below the largest float."""
    return math.exp(min(loss, 700.0))


def bits_per_byte(loss: float, dataset: Dataset) -> float | None:
    """The validation split's loss in nats per token as bits per byte of its text; None if its size is unknown."""
    text_bytes = dataset.manifest["splits"]["validation"]["text_bytes"] if dataset.manifest else 0
    return loss / math.log(2) * dataset.tokens("validation") / text_bytes if text_bytes else None


def floor_note(loss: float, dataset: Dataset) -> str:
    """The excess of a validation loss over the source's entropy, if that is known."""
    floor = dataset.floor("validation")
    return f" ({loss / floor - 1:+.1%} above the source's entropy of {floor:.4f})" if floor else ""
