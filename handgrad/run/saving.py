"""The state of a run into a checkpoint and out of it, however many ranks hold it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from handgrad import checkpoint
from handgrad.checkpoint import Checkpoint, Stored
from handgrad.config import RunConfig
from handgrad.fp8.scaling import SCALING_RULES
from handgrad.parallel.buckets import Bucket
from handgrad.parallel.ranks import Ranks
from handgrad.training.spikes import Outliers
from handgrad.training.state import TrainingState
from handgrad.training.step import Stepper

PREFIXES = ("", "m.", "v.")  # of weights and their moments


def save_state(
    checkpoints: Path,
    step: int,
    state: TrainingState,
    ranks: Ranks,
    manifest: dict[str, Any],
    extra_files: dict[str, bytes],
) -> Path:
    """Saves the state; returns the checkpoint's folder.

    Rank 0 writes; the others hand it, bucket by bucket, what they hold. None goes on before the checkpoint stands. Raises
    `StorageError`, on all ranks, when the disk does not take it.
    """
    tensors = list(stored_tensors(state, ranks))

    def write() -> Path:
        try:
            return checkpoint.save(checkpoints, step, tensors, manifest, extra_files)
        finally:
            hand_over(tensors)  # what an error left: the others have it ready, and wait

    if not ranks.is_rank_0:
        hand_over(tensors)
    return ranks.from_rank_0(write, "a checkpoint")


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
            self.ranks.wait(self.ranks.all_gather(whole, shard[bucket.local(self.ranks.size)], operation), operation)
            self.held = wanted
        return whole


def run_numbers(state: TrainingState, stepper: Stepper) -> dict[str, Any]:
    """What a run goes on with beside its tensors, for the manifest."""
    return {
        "loss_window": list(stepper.losses.values),
        "norm_window": list(stepper.norms.values),
        "loss_scale": state.loss_scale[1:].tolist(),
        **({} if state.scaling is None else {"fp8": state.scaling.saved()}),
    }


def load_run(source: Checkpoint, config: RunConfig, state: TrainingState, stepper: Stepper) -> None:
    """Takes up a checkpoint: its tensors and `run_numbers`, as far as they hold for the configuration."""
    load_everything(source, state)
    manifest = source.manifest
    stepper.losses, stepper.norms = Outliers(manifest["loss_window"]), Outliers(manifest["norm_window"])
    if manifest["config"]["precision"] == config.precision == "fp16":
        scale, good_steps = manifest["loss_scale"]
        state.set_loss_scale(scale, good_steps, config.tokens_per_step)
    # Scales that were made by other rules are made anew.
    unchanged = all(manifest["config"].get(name) == getattr(config, name) for name in SCALING_RULES)
    if state.scaling is not None and unchanged and state.scaling.restore(manifest.get("fp8", {})):
        state.requantize()


def origin_of(source: Checkpoint) -> dict[str, Any] | None:
    """What the run of a checkpoint started from, or None: weights that were opened, or imported together with moments."""
    return source.manifest.get("init") or source.manifest.get("imported")


def changed_versions(source: Checkpoint, now: dict[str, str]) -> list[str]:
    """What a checkpoint's bits depended on and this run's do not, or the other way round, in lines for the log."""
    then = source.manifest["versions"]
    return [
        f"{key} {then.get(key)} -> {now.get(key)} (the bits may differ from an unbroken run's)"
        for key in {**then, **now}
        if then.get(key) != now.get(key)
    ]


def load_everything(source: Checkpoint, state: TrainingState) -> None:
    """Weights and moments of a checkpoint into a state. Raises `DataError` if shapes differ."""
    takers = {row.name: (row.stored_shape, lambda values, row=row: state.take_weight(row, values)) for row in state.table}
    source.load(checkpoint.WEIGHTS_FILE, takers)
    takers = {}
    for prefix, flat in (("m.", state.first_moments), ("v.", state.second_moments)):
        for row in state.table:
            take = lambda values, row=row, flat=flat: state.take(flat, row, values)  # noqa: E731
            takers[prefix + row.name] = row.stored_shape, take
    source.load(checkpoint.OPTIMIZER_FILE, takers)
