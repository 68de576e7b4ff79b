"""The loss of a model on the validation split of prepared data, in the units that people compare."""

import math
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.data.batches import Batches
from handgrad.data.codes import PALETTE
from handgrad.data.mixture import apart, open_data
from handgrad.data.recommended import tokenizer_of
from handgrad.data.shards import Dataset
from handgrad.data.tokenizer import Tokenizer
from handgrad.errors import DataError
from handgrad.joins import documents
from handgrad.joins.parallel.ranks import Ranks
from handgrad.machine import devices
from handgrad.models import compute_losses
from handgrad.settings.config import STREAM, WHOLE, ModelShape, check_stride
from handgrad.training.feed import READ, copy_all, fill_inputs, inputs_of

OnTokens = Callable[[int, int], object]  # (positions done by this rank, its total)


def mean_loss(
    shape: ModelShape,
    ops: Any,
    weights: Any,
    act: Any,
    batches: Batches,
    *,
    samples: int,
    ranks: Ranks | None = None,
    progress: OnTokens | None = None,
) -> float:
    """Mean cross-entropy in nats over the tokens that the first `samples` samples (at most one epoch) score.

    Each rank adds the sums of all micro-batches in the order of the samples, as a single rank does. `progress`
    is called as by `token_losses`."""
    ranks = Ranks() if ranks is None else ranks
    samples, sums = min(samples, batches.samples_per_epoch), list[float]()
    for first, losses in token_losses(shape, ops, weights, act, batches, samples, ranks, progress):
        for row in range(len(losses)):
            losses[row, : batches.context(first + row)] = 0.0
        sums.append(losses.sum().item())
    total = 0.0
    for one in in_order(sums, 1, -(-samples // act.tokens.shape[0]), ranks):
        total += one
    return total / batches.scored_tokens(samples)


def token_losses(
    shape: ModelShape,
    ops: Any,
    weights: Any,
    act: Any,
    batches: Any,
    samples: int,
    ranks: Ranks,
    progress: OnTokens | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """(first sample, losses (samples, T) in float64 on the CPU) of each micro-batch of this rank; ranks take them
    round-robin. The samples that pad the last micro-batch are left out. After each, `progress` receives the number of
    positions that this rank has done, and its total."""
    inputs = inputs_of(act, READ)
    ops, host = documents.operations(ops, act, masked=not batches.trains_all), devices.host_buffers(inputs)
    batch, positions = act.tokens.shape[0], act.tokens.numel()
    own = range(0, samples, batch)[ranks.rank :: ranks.size]
    for number, first in enumerate(own, start=1):
        fill_inputs(batches, host, first)
        if host is not inputs:
            copy_all(inputs, host)
        ranks.set_status(f"evaluation, sample {first}")
        compute_losses(ops, weights, act, shape)
        yield first, act.losses.view(act.tokens.shape)[: samples - first].cpu().to(torch.float64, copy=True)
        if progress is not None:
            progress(number * positions, len(own) * positions)


def in_order(own: list[float], width: int, micro_batches: int, ranks: Ranks) -> list[float]:
    """The numbers of all ranks, `width` for each micro-batch, in the order of the samples. `own`: this rank's."""
    rounds = -(-micro_batches // ranks.size)
    everyone = ranks.all_gather_numbers([*own, *[0.0] * (rounds * width - len(own))], "losses of the evaluation")
    starts = ((rank, turn * width) for turn in range(rounds) for rank in range(ranks.size))
    return [number for rank, first in starts for number in everyone[rank][first : first + width]][: micro_batches * width]


def perplexity(loss: float) -> float:
    """exp(loss), for a loss in nats per token; capped below the largest float."""
    return math.exp(min(loss, 700.0))


def bits_per_byte(loss: float, dataset: Dataset, packing: str = STREAM) -> float | None:
    """A validation loss per token as bits per byte of its text; None if its size is unknown or tokens are left out."""
    manifest = dataset.manifest if scores_all(dataset, packing) else None
    text_bytes = manifest["splits"]["validation"]["text_bytes"] if manifest else 0
    return loss / math.log(2) * dataset.tokens("validation") / text_bytes if text_bytes else None


def scores_all(dataset: Dataset, packing: str) -> bool:
    """True if a validation scores all tokens."""
    return packing != WHOLE and not dataset.is_chat


def floor_of(dataset: Dataset, packing: str) -> float | None:
    """The source's entropy in nats per token; None if it is unknown for the scored tokens. A picture has a row of its own,
    which scores all of it but the mark before it."""
    if scores_all(dataset, packing):
        return dataset.floor("validation")
    if not dataset.codes or (floor := dataset.floor("validation")) is None or dataset.manifest is None:
        return None
    tokens = dataset.tokens("validation")
    return floor * tokens / (tokens - dataset.manifest["splits"]["validation"]["documents"])


def floor_note(loss: float, dataset: Dataset, packing: str = STREAM) -> str:
    """The excess of a validation loss over the source's entropy, if that is known."""
    floor = floor_of(dataset, packing)
    return f" ({loss / floor - 1:+.1%} above the source's entropy of {floor:.4f})" if floor else ""


@dataclass(frozen=True)
class HeldOut:
    """A model's loss on a validation split."""

    loss: float  # nats per token
    perplexity: float
    bits_per_byte: float | None  # of text; None if its number of bytes is unknown, or only a part of it is scored
    tokens: int  # scored
    sets: dict[str, "HeldOut"] = field(default_factory=dict)  # of several sets, each apart; `loss` is their weighted mean


def open_held_out(folder: str, tokenizer: Tokenizer, model: str, *, chat: bool) -> Dataset:
    """Opens data; `DataError`: no validation split in the tokens of `model`. `chat`: it was trained on conversations."""
    dataset = open_data(folder, model, chat=chat)
    if dataset.tokenizer.sha256 != tokenizer.sha256:
        option, first = tokenizer_of(model) if tokenizer.kind != PALETTE else (["--codes", model], "")
        raise DataError(
            f"{folder} was made with another tokenizer ({dataset.tokenizer.kind}) than the model's"
            f" ({tokenizer.kind}); prepare it with the model's: {first}{shlex.join(option)}"
        )
    if not dataset.splits["validation"]:
        raise DataError(f"{folder} has no validation split; prepare it with --validation-fraction above 0")
    return dataset


def held_out_loss(
    shape: ModelShape,
    ops: ModuleType,
    weights: Any,
    act: Any,
    dataset: Dataset,
    *,
    eval_tokens: int = 0,
    eval_stride: int = 0,
    packing: str = STREAM,
    ranks: Ranks | None = None,
    progress: OnTokens | None = None,
) -> HeldOut:
    """The loss on the first `eval_tokens` tokens (0: all) of the validation split, in whole windows `eval_stride` tokens
    apart (0: a context), `act`'s micro-batch at a time. `packing`: of documents; `act` has its inputs. Raises
    `UsageError` for a stride above the context."""
    length = act.tokens.shape[1]
    check_stride(eval_stride, length, "context")
    sets, total = dict[str, HeldOut](), 0.0
    for name, weight, each in apart(dataset):
        batches = Batches(each.splits["validation"], length, 0, shuffle=False, stride=eval_stride, packing=packing)
        samples = batches.samples_of(eval_tokens)
        loss = mean_loss(shape, ops, weights, act, batches, samples=samples, ranks=ranks, progress=progress)
        units = perplexity(loss), bits_per_byte(loss, each, packing)
        sets[name], total = HeldOut(loss, *units, batches.scored_tokens(samples)), total + float(weight) * loss
    return sets.get("") or HeldOut(total, perplexity(total), None, sum(one.tokens for one in sets.values()), sets)
