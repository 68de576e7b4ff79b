"""The loss of a model on the validation split of prepared data, in the units that people compare."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from handgrad.config import ModelShape
from handgrad.data.batches import Batches
from handgrad.data.shards import Dataset, open_dataset
from handgrad.data.tokenizer import Tokenizer
from handgrad.errors import DataError
from handgrad.evaluation.loss import bits_per_byte, mean_loss, perplexity
from handgrad.parallel.ranks import Ranks


@dataclass(frozen=True)
class HeldOut:
    """A model's loss on a validation split."""

    loss: float  # nats per token
    perplexity: float
    bits_per_byte: float | None  # of text; None if the number of its bytes is unknown
    tokens: int  # predicted


def open_held_out(folder: str, tokenizer: Tokenizer) -> Dataset:
    """Opens prepared data with a validation split in the model's tokens; raises `DataError` for any other."""
    dataset = open_dataset(folder)
    if dataset.tokenizer.sha256 != tokenizer.sha256:
        raise DataError(
            f"{folder} was made with another tokenizer ({dataset.tokenizer.kind}) than the model's"
            f" ({tokenizer.kind}); prepare the text with the model's tokenizer"
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
    ranks: Ranks | None = None,
) -> HeldOut:
    """The loss on the first `eval_tokens` tokens (0: all) of the validation split, in whole contexts, `act`'s micro-batch
    at a time."""
    length = act.tokens.shape[1]
    batches = Batches(dataset.splits["validation"], length, 0, shuffle=False)
    samples = max(1, eval_tokens // length) if eval_tokens else batches.samples_per_epoch
    loss = mean_loss(shape, ops, weights, act, batches, samples=samples, ranks=ranks)
    tokens = min(samples, batches.samples_per_epoch) * length
    return HeldOut(loss, perplexity(loss), bits_per_byte(loss, dataset), tokens)
