"""The documents in a run's samples: how they are packed, and the batches of them."""

from pathlib import Path
from typing import Any

from handgrad import checkpoint
from handgrad.config import AUTO, STREAM, WHOLE, RunConfig
from handgrad.data.batches import Batches
from handgrad.data.shards import Dataset
from handgrad.errors import DataError, UsageError


def begun_packing(config: RunConfig) -> str:
    """`config`'s packing; "auto" stays with that of the run in `config.out`, whatever data it goes on with."""
    begun = checkpoint.peek_config(Path(config.out)) if config.packing == AUTO else None
    return config.packing if begun is None else begun.get("packing", STREAM)


def settled_packing(packing: str, dataset: Dataset, eval_stride: int = 0) -> str:
    """`packing` with that which suits the data in the place of "auto". Raises `DataError`: the data do not know their
    documents; `UsageError`: chats are validated by windows that overlap."""
    if packing == AUTO:
        packing = WHOLE if dataset.chat else STREAM
    if eval_stride and dataset.chat:
        raise UsageError(f"chats are validated without eval_stride, found {eval_stride} for {dataset.folder}; set it to 0")
    if packing != STREAM and dataset.manifest is None:
        raise DataError(
            f"packing {packing} needs to know where documents start, {dataset.folder} has no manifest;"
            " prepare the text with `handgrad prepare`, or --packing stream"
        )
    return packing


def evaluated_packing(own: str, dataset: Dataset, eval_stride: int, *, other_data: bool) -> str:
    """The packing in which a model is evaluated: its run's `own`, or on other data than the run's that which suits them."""
    return settled_packing(AUTO if other_data and own == STREAM else own, dataset, eval_stride)


def training_batches(config: RunConfig, dataset: Dataset) -> Batches:
    """The training split in the run's order."""
    return Batches(dataset.splits["train"], config.sequence_length, config.seed, packing=config.packing)


def validation_batches(config: RunConfig, dataset: Dataset) -> Batches | None:
    """The validation split in order, or None if there is none."""
    shards, options = dataset.splits["validation"], {"stride": config.eval_stride, "packing": config.packing}
    return Batches(shards, config.sequence_length, 0, shuffle=False, **options) if shards else None


def packing_lines(config: RunConfig, dataset: Dataset) -> list[str]:
    """The header's line about what a row holds, of a run that masks some of it."""
    if config.packing == STREAM and not dataset.chat:
        return []
    batches = training_batches(config, dataset)
    places = batches.samples_per_epoch * config.sequence_length
    trained = batches.trained_tokens(0, batches.samples_per_epoch)
    parts = [f"{PACKING_TEXT[config.packing]}", f"{trained / places:.1%} of the targets are trained"]
    if config.packing == WHOLE:
        parts.insert(1, f"{1 - dataset.tokens('train') / places:.1%} of the rows is padding")
    return [f"packing    {config.packing}: {', '.join(parts)}"]


PACKING_TEXT: dict[str, Any] = {
    "stream": "a row is cut from the stream of documents",
    "masked": "a row is cut from the stream of documents, attention stays within each",
    "whole": "a row holds whole documents, attention stays within each",
}
