"""The documents in a run's samples: how they are packed, and the batches of them."""

import numpy as np

from handgrad.config import AUTO, MASKED, STREAM, WHOLE, RunConfig
from handgrad.data.batches import Batches
from handgrad.data.packing import documents_of
from handgrad.data.shards import Dataset
from handgrad.evaluation.loss import scores_all
from handgrad.run.assemble import TrainedTokens

PACKING_TEXT = {
    STREAM: "a row is cut from the stream of documents",
    MASKED: "a row is cut from the stream of documents, attention stays within each",
    WHOLE: "a row holds whole documents, attention stays within each",
}


def resolve_packing(packing: str, dataset: Dataset) -> str:
    """`packing` with that which suits the data in the place of "auto"."""
    if packing == AUTO:
        return WHOLE if dataset.is_chat else STREAM
    return packing


def evaluation_packing(own: str, dataset: Dataset, *, other_data: bool) -> str:
    """The packing in which a model is evaluated: its run's `own`, or on other data than the run's that which suits them."""
    return resolve_packing(AUTO if other_data and own == STREAM else own, dataset)


def training_batches(config: RunConfig, dataset: Dataset) -> Batches:
    """The training split in the run's order."""
    return Batches(dataset.splits["train"], config.sequence_length, config.seed, packing=config.packing)


def trained_tokens(batches: Batches) -> TrainedTokens | None:
    """The count of trained tokens for a run that does not train all of them, else None."""
    return None if batches.trains_all else batches.trained_tokens


def packing_lines(config: RunConfig, dataset: Dataset) -> list[str]:
    """The header's line about packed documents, or rows with tokens that are not trained."""
    if scores_all(dataset, config.packing):
        return [f"packing    {config.packing}: {PACKING_TEXT[config.packing]}"] if config.packed else []
    in_order = Batches(dataset.splits["train"], config.sequence_length, 0, shuffle=False, packing=config.packing)
    samples = in_order.samples_per_epoch
    places = samples * config.sequence_length
    parts = [PACKING_TEXT[config.packing], f"{in_order.scored_tokens(samples) / places:.1%} of the targets are trained"]
    if config.packing == WHOLE:
        parts[1:1] = cut_documents(dataset, config.sequence_length)
        parts.insert(-1, f"{max(0.0, 1 - dataset.tokens('train') / places):.1%} of the rows is padding")
    return [f"packing    {config.packing}: {', '.join(parts)}"]


def cut_documents(dataset: Dataset, sequence_length: int) -> list[str]:
    """The training documents that are longer than a row and its last target, in words; nothing if all fit."""
    shards = dataset.splits["train"]
    lengths = np.concatenate([documents_of(shard.document_starts, shard.token_count)[1] for shard in shards])
    cut = int((lengths > sequence_length + 1).sum())
    return [f"{cut} of {len(lengths)} are longer and cut, the longest has {lengths.max()} tokens"] if cut else []
