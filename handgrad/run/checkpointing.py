"""Saves the state of a run into a checkpoint and loads it, on any number of ranks."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import handgrad
from handgrad import checkpoint, devices
from handgrad.checkpoint import Checkpoint, Stored
from handgrad.config import RunConfig, to_dict
from handgrad.data.shards import Dataset
from handgrad.data.tokenizer import tokenizer_record
from handgrad.errors import ConfigError, DataError
from handgrad.evaluation.load import CHAT
from handgrad.layout import Bucket, bucket_of
from handgrad.models.rows import ParameterRow
from handgrad.parallel.ranks import Ranks
from handgrad.run.assemble import Assembly
from handgrad.training.spikes import SpikeWindow
from handgrad.training.state import TrainingState

# Settings that the scales in a checkpoint depend on.
SCALING_RULES = ("fp8_gradients", "fp8_scaling", "fp8_window", "fp8_margin", "fp8_count_every")


def save_state(
    checkpoints: Path,
    step: int,
    state: TrainingState,
    ranks: Ranks,
    manifest: dict[str, Any],
    extra_files: dict[str, bytes],
) -> Path:
    """Saves the state; returns the checkpoint's folder.

    Rank 0 writes; the others send it their shards, bucket by bucket. All wait until the checkpoint is complete. Raises
    `StorageError`, on all ranks, when the disk does not take it.
    """
    tensors = list(stored_tensors(state, ranks))

    def write() -> Path:
        try:
            return checkpoint.save(checkpoints, step, tensors, manifest, extra_files)
        finally:
            fetch_rest(tensors)  # after an error: the others wait to send them

    if not ranks.is_rank_0:
        fetch_rest(tensors)
    return ranks.from_rank_0(write, "a checkpoint")


def fetch_rest(tensors: list[Stored]) -> None:
    for tensor in tensors:
        if not tensor.fetched:
            tensor.fetch()


def stored_tensors(state: TrainingState, ranks: Ranks) -> Iterator[Stored]:
    """The tensors of a checkpoint, weights first, then the optimizer's state; shards are gathered when they are fetched."""
    gathered = GatheredBucket(state, ranks)
    for prefix, flat in state.saved_buffers().items():
        for row in state.design.parameters:
            if state.is_whole(flat):
                yield Stored.of(prefix + row.name, row.stored(flat))
                continue
            yield Stored(prefix + row.name, flat.dtype, row.stored_shape, partial(gathered.parameter, flat, row))


class GatheredBucket:
    """The last bucket that was asked for, of one of the sharded buffers, in the memory that buckets travel through."""

    def __init__(self, state: TrainingState, ranks: Ranks):
        self.state, self.ranks = state, ranks
        self.held: tuple[int, str] | None = None

    def parameter(self, shard: Tensor, row: ParameterRow) -> Tensor:
        """The stored part of a parameter."""
        bucket = bucket_of(row, self.state.design.buckets)
        start = row.offset - bucket.start
        return self(shard, bucket)[start : start + row.elements].view(row.shape)[: row.stored_rows]

    def __call__(self, shard: Tensor, bucket: Bucket) -> Tensor:
        whole = self.state.views["exchange"].view(shard.dtype)[: bucket.elements]
        wanted = shard.data_ptr(), bucket.name
        if self.held != wanted:
            operation, place = f"checkpoint, {bucket.name}", (self.ranks.rank, self.ranks.size)
            work = self.ranks.all_gather(whole, shard[bucket.local(*place)], operation, bucket.shares(place[1]))
            self.ranks.wait(work, operation)
            self.held = wanted
        return whole


def run_facts(config: RunConfig, dataset: Dataset, origin: dict[str, Any] | None) -> dict[str, Any]:
    """The parts of the manifest that stay the same during a run. `origin`: of the weights that it started from."""
    return {
        "handgrad": handgrad.__version__,
        "config": to_dict(config),
        "vocab_size": dataset.tokenizer.vocab_size,
        "tokenizer": tokenizer_record(dataset.tokenizer),
        CHAT: dataset.is_chat,
        **({"init": origin} if origin else {}),
    }


def run_numbers(training: Assembly) -> dict[str, Any]:
    """The numbers that a run resumes with, for the manifest."""
    return {
        "loss_window": list(training.stepper.loss_window.values),
        "norm_window": list(training.stepper.norm_window.values),
        "loss_scale": training.state.loss_scale[1:].tolist(),
        **({} if training.scaling is None else {"fp8": training.scaling.saved()}),
    }


def load_run(source: Checkpoint, config: RunConfig, training: Assembly) -> None:
    """Resumes from a checkpoint: loads its tensors and `run_numbers`, as far as they suit the configuration. Raises
    `ConfigError` for a state of another optimizer."""
    made_by = source.manifest["config"].get("optimizer", RunConfig.optimizer)
    if made_by != config.optimizer:
        remedy = f"start a new run from its weights: --init-from {source.folder}"
        raise ConfigError(f"{source.folder} holds the state of {made_by}, found optimizer {config.optimizer}; {remedy}")
    load_state(source, training.state)
    manifest, stepper = source.manifest, training.stepper
    if "loss_window" not in manifest:
        raise DataError(f"{source.folder} holds weights without the state of a run; start one with --init-from")
    stepper.loss_window, stepper.norm_window = SpikeWindow(manifest["loss_window"]), SpikeWindow(manifest["norm_window"])
    if manifest["config"].get("precision") == config.precision == "fp16":
        training.state.set_loss_scale(*manifest["loss_scale"])
    # Scales that were made by other rules are made anew.
    unchanged = all(manifest["config"].get(name) == getattr(config, name) for name in SCALING_RULES)
    if training.scaling is not None and unchanged and training.scaling.restore(manifest.get("fp8", {})):
        training.scaling.requantize()


def load_state(source: Checkpoint, state: TrainingState) -> None:
    """Weights and optimizer state of a checkpoint. Raises `DataError` if shapes differ."""
    table, buffers = state.design.parameters, state.optimizer.items()
    weights = {row.name: (row.stored_shape, partial(state.load_weight, row)) for row in table}
    source.load(checkpoint.WEIGHTS_FILE, weights)
    moments = {
        f"{name}.{row.name}": (row.stored_shape, partial(state.load_shard, flat, row))
        for name, flat in buffers
        for row in table
    }
    source.load(checkpoint.OPTIMIZER_FILE, moments)


def origin_of(source: Checkpoint) -> dict[str, Any] | None:
    """The weights from which the run of a checkpoint started, opened or imported; None if it drew them."""
    return source.manifest.get("init") or source.manifest.get("imported")


def versions_of(device: torch.device, ops: ModuleType) -> dict[str, str]:
    """The versions that the bits depend on, beside the configuration and the data. `ops`: the plain operations."""
    named = {"handgrad": handgrad.__version__, "torch": torch.__version__, "device": devices.describe(device)}
    return {**named, **ops.versions()}


def changed_versions(source: Checkpoint, now: dict[str, str]) -> list[str]:
    """The versions that differ between a checkpoint and this run, in lines for the log."""
    then = source.manifest["versions"]
    return [
        f"{key} {then.get(key)} -> {now.get(key)} (the bits may differ from an unbroken run's)"
        for key in {**then, **now}
        if then.get(key) != now.get(key)
    ]
