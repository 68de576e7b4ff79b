"""The state of a run into a checkpoint and out of it, however many ranks hold it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from handgrad import checkpoint
from handgrad.checkpoint import Checkpoint, Stored
from handgrad.distributed.ranks import Ranks
from handgrad.model.buckets import Bucket
from handgrad.training.state import TrainingState

PREFIXES = ("", "m.", "v.")  # of weights and their moments


def save_state(
    checkpoints: Path,
    step: int,
    state: TrainingState,
    ranks: Ranks,
    manifest: dict[str, Any],
    extra_files: dict[str, bytes],
    *,
    keep: int,
) -> Path:
    """Saves the state and removes what is older than the `keep` newest checkpoints; returns the new one's folder.

    Rank 0 writes; the others hand it, bucket by bucket, what they hold. None goes on before the checkpoint stands. Raises
    `StorageError`, on all ranks, when the disk does not take it.
    """
    tensors = list(stored_tensors(state, ranks))

    def write() -> Path:
        try:
            folder = checkpoint.save(checkpoints, step, tensors, manifest, extra_files)
        finally:
            hand_over(tensors)  # what an error left: the others have it ready, and wait
        checkpoint.prune(checkpoints, step, keep)
        return folder

    if not ranks.leads:
        hand_over(tensors)
    return ranks.from_first(write, "a checkpoint")


def hand_over(tensors: list[Stored]) -> None:
    for tensor in tensors:
        if not tensor.fetched:
            tensor.fetch()


def stored_tensors(state: TrainingState, ranks: Ranks) -> Iterator[Stored]:
    """All that a checkpoint holds beside its numbers, in its order; shards are gathered when they are fetched."""
    gathered = GatheredBucket(state, ranks)
    for prefix, flat in zip(PREFIXES, (state.master, state.first_moments, state.second_moments), strict=True):
        for row in state.table:
            if flat.numel() == state.parameters.numel():
                yield Stored.of(prefix + row.name, row.stored(flat))
                continue
            bucket = next(b for b in state.buckets if b.start <= row.offset < b.stop)

            def fetch(flat=flat, row=row, bucket=bucket) -> Tensor:
                start = row.offset - bucket.start
                return gathered(flat, bucket)[start : start + row.elements].view(row.shape)[: row.stored_rows]

            yield Stored(prefix + row.name, flat.dtype, row.stored_shape, fetch)


class GatheredBucket:
    """The last bucket that was asked for, of one of the shared buffers, in the memory that buckets travel through."""

    def __init__(self, state: TrainingState, ranks: Ranks):
        self.state, self.ranks = state, ranks
        self.held: tuple[int, str] | None = None

    def __call__(self, shard: Tensor, bucket: Bucket) -> Tensor:
        whole = self.state.exchange.view(shard.dtype)[: bucket.elements]
        wanted = shard.data_ptr(), bucket.name
        if self.held != wanted:
            operation = f"checkpoint, {bucket.name}"
            self.ranks.finish(self.ranks.collect(whole, shard[bucket.local(self.ranks.size)], operation), operation)
            self.held = wanted
        return whole


def load_weights(source: Checkpoint, state: TrainingState) -> None:
    """The weights of a checkpoint into a state; the optimizer starts afresh. Raises `DataError` if shapes differ."""
    takers = {row.name: (row.stored_shape, lambda values, row=row: state.take_weight(row, values)) for row in state.table}
    source.load(checkpoint.WEIGHTS_FILE, takers)


def load_everything(source: Checkpoint, state: TrainingState) -> None:
    """Weights and moments of a checkpoint into a state."""
    load_weights(source, state)
    takers = {}
    for prefix, flat in (("m.", state.first_moments), ("v.", state.second_moments)):
        for row in state.table:
            take = lambda values, row=row, flat=flat: state.take(flat, row, values)  # noqa: E731
            takers[prefix + row.name] = row.stored_shape, take
    source.load(checkpoint.OPTIMIZER_FILE, takers)
