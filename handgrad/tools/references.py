"""The references of prepared pairs: what a model, from which a training on them will start, says of each answer."""

import contextlib
from dataclasses import replace

from handgrad.data.preferences import PairBatches, read_references, record_references, references_record
from handgrad.data.shards import SPLITS, Dataset, open_dataset
from handgrad.errors import DataError, UsageError
from handgrad.evaluation.load import load_model, machine
from handgrad.evaluation.preferences import answer_sums
from handgrad.interop.sources import open_weights
from handgrad.machine import devices
from handgrad.models import forward_buffers, named_activations

ROWS_AT_ONCE = 8


def add_references(dataset: Dataset, source: str) -> Dataset:
    """Computes and records the references of a prepared folder of pairs under the model `source`, unless it has them
    whole. Raises `DataError` for a model of another tokenizer, `UsageError` for one with a shorter context, and the
    errors of `open_weights`."""
    weights = open_weights(source)
    if references_record(dataset).get("model") == weights.origin:
        with contextlib.suppress(DataError):  # lost or damaged: make them again
            for split in SPLITS:
                read_references(dataset, split)
            return dataset
    if weights.tokenizer.sha256 != dataset.tokenizer.sha256:
        raise DataError(f"expected pairs in the tokens of {source}, found others in {dataset.folder}; prepare them again")
    shards = {split: dataset.splits[split][0] for split in SPLITS}
    pairs = {split: PairBatches(shard, shard.token_count, 0, shuffle=False) for split, shard in shards.items()}
    length = max(int(one.lengths.max()) for one in pairs.values()) - 1
    if length > weights.shape.sequence_length:
        limit = f"the {weights.shape.sequence_length + 1} tokens that {source} takes"
        raise UsageError(f"expected answers of at most {limit}, found one of {length + 1}; take it out")
    device = devices.resolve_device("auto")
    on = machine(device, "auto", "auto")
    sized = replace(weights.shape, sequence_length=length)
    model = load_model(weights, device, on.dtype, on.ops, forward_buffers(sized, ROWS_AT_ONCE, length, on.dtype, on.ops))
    act, sums = named_activations(model.shape, model.views), {}
    for split, shard in shards.items():
        batches = PairBatches(shard, length, 0, shuffle=False)
        sums[split] = answer_sums(model.shape, model.ops, model.weights, act, batches, batches.samples_per_epoch)
    record_references(dataset, sums, weights.origin)
    return open_dataset(dataset.folder)
