"""Saves the state of a run to a checkpoint and loads it, on any number of ranks. Keeps the copy in host memory that a
background save writes while training continues."""

import functools
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import handgrad
from handgrad.data.shards import Dataset
from handgrad.data.tokenizer import tokenizer_record
from handgrad.errors import ConfigError, DataError, storage_errors
from handgrad.evaluation.load import CHAT, Weights
from handgrad.format import human_bytes
from handgrad.joins import distill
from handgrad.joins.fp8.tables import HEAD, names_in
from handgrad.joins.offload import pin
from handgrad.joins.parallel.ranks import Ranks
from handgrad.machine import devices
from handgrad.memory.arena import Buffer, Plan, make_plan
from handgrad.memory.layout import Bucket, bucket_of
from handgrad.memory.rows import ParameterRow, Table, flat_elements
from handgrad.models import parameter_table
from handgrad.run.assemble import Assembly
from handgrad.settings.config import RunConfig, to_dict
from handgrad.storage import checkpoint
from handgrad.storage.checkpoint import Checkpoint, Stored
from handgrad.storage.manifest import STATE_SCHEMA
from handgrad.storage.run_files import BEGUN_IN
from handgrad.training.design import Design
from handgrad.training.state import SavedBuffer, TrainingState
from handgrad.training.step import SpikeWindow

SOURCES = "sources"  # the entry with the package's hash; chains of format 1 and older checkpoints lack it
# Settings that the scales in a checkpoint depend on.
SCALING_RULES = ("fp8_gradients", "fp8_scaling", "fp8_window", "fp8_margin", "fp8_count_every")
COPY = "copy for saves"
REST_BYTES = 1 << 30  # of a GPU process without the copy: libraries, batches, dirty pages


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
    `StorageError` on all ranks if the disk refuses."""
    tensors = list(stored_tensors(state, ranks))

    def write() -> Path:
        try:
            return checkpoint.save(checkpoints, step, tensors, manifest, extra_files)
        finally:
            fetch_rest(tensors)  # after an error too: the other ranks wait to send them

    if not ranks.is_rank_0:
        fetch_rest(tensors)
    return ranks.from_rank_0(write, "a checkpoint")


def fetch_rest(tensors: list[Stored]) -> None:
    for tensor in tensors:
        if not tensor.fetched:
            tensor.fetch()


def stored_tensors(state: TrainingState, ranks: Ranks) -> Iterator[Stored]:
    """The tensors of a checkpoint, weights first, then optimizer state. Fetching one gathers its shards."""
    gathered = GatheredBucket(state, ranks)
    for saved in state.saved:
        for row in saved.layout.rows:
            if saved.is_whole:
                yield Stored.of(row.name, row.stored(saved.values))
                continue
            yield Stored(row.name, saved.values.dtype, row.stored_shape, partial(gathered.row, saved, row))


class GatheredBucket:
    """Caches one bucket of a sharded buffer, the last one gathered, in the communication buffer."""

    def __init__(self, state: TrainingState, ranks: Ranks):
        self.state, self.ranks = state, ranks
        self.held: tuple[int, str] | None = None

    def row(self, saved: SavedBuffer, row: ParameterRow) -> Tensor:
        """The stored part of a row. Gathers its bucket if another one is cached."""
        bucket = bucket_of(row, saved.layout.buckets)
        start = row.offset - bucket.start
        return self(saved.values, bucket)[start : start + row.elements].view(row.shape)[: row.stored_rows]

    def __call__(self, shard: Tensor, bucket: Bucket) -> Tensor:
        whole = self.state.views["exchange"].view(shard.dtype)[: bucket.elements]
        if self.held != (wanted := (shard.data_ptr(), bucket.name)):
            operation, rank, size = f"checkpoint, {bucket.name}", self.ranks.rank, self.ranks.size
            work = self.ranks.all_gather(whole, shard[bucket.local(rank, size)], operation, bucket.shares(size))
            self.ranks.wait(work, operation)
            self.held = wanted
        return whole


def run_facts(config: RunConfig, dataset: Dataset, origin: dict[str, Any] | None) -> dict[str, Any]:
    """The parts of the manifest that stay constant during a run. `origin`: source of its initial weights."""
    return {
        "handgrad": handgrad.__version__,
        "config": to_dict(config),
        "vocab_size": dataset.tokenizer.vocab_size,
        "tokenizer": tokenizer_record(dataset.tokenizer),
        CHAT: dataset.is_chat,
        BEGUN_IN: str(Path.cwd()),
        **({"init": origin} if origin else {}),
    }


def run_numbers(training: Assembly) -> dict[str, Any]:
    """The manifest's numbers for resuming, and the schema of optimizer state that is smaller than its parameters."""
    shapes = {tuple(row.shape for row in saved.layout.rows) for saved in training.state.saved}
    return {
        **({"schema": STATE_SCHEMA} if len(shapes) > 1 else {}),
        "loss_window": list(training.stepper.loss_window.values),
        "norm_window": list(training.stepper.norm_window.values),
        "loss_scale": training.state.loss_scale[1:].tolist(),
        **({} if training.scaling is None else {"fp8": training.scaling.saved()}),
    }


def begin_state(
    training: Assembly,
    config: RunConfig,
    weights: Weights | None,
    resumed: Checkpoint | None,
    teacher: Weights | None = None,
) -> tuple[int, int]:
    """Loads the teacher, the initial weights and the checkpoint to resume from, if any. Returns (completed steps, skipped
    updates in a row). Raises the errors of `load_run`."""
    if teacher is not None:
        flat = training.state.views[distill.WEIGHTS]
        load_weights(teacher, training.design.teacher.parameters, lambda row, values: row.stored(flat).copy_(values))
    if weights is not None:
        load = training.load_frozen_weight if training.design.frozen else training.state.load_weight
        load_weights(weights, training.design.frozen or training.design.parameters, load)
        if training.design.policy is not None:
            training.start = training.state.parameters.to("cpu", copy=True)
    if resumed is None:
        return 0, 0
    load_run(resumed, config, training)
    return resumed.step, resumed.manifest["skips_in_a_row"]


def load_weights(weights: Weights, table: Table, load: Callable[[ParameterRow, Tensor], object]) -> None:
    """Loads the rows of `table` from another run's or model's weights; with fewer positions, the first ones."""
    for theirs, row in zip(parameter_table(weights.shape), table, strict=True):
        assert theirs.name == row.name
        load(row, weights.weight(theirs)[: row.stored_rows])


def load_run(source: Checkpoint, config: RunConfig, training: Assembly) -> None:
    """Resumes from a checkpoint: loads its tensors, and the `run_numbers` that apply to the configuration. Raises
    `ConfigError` for the state of another optimizer or model."""
    weights, out = f"start a new run from its weights: --init-from {source.folder}", "choose another --out"
    for name, remedy in (("optimizer", weights), ("architecture", out), ("channels", out)):
        made_by, now = source.manifest["config"].get(name, getattr(RunConfig, name)), getattr(config, name)
        if made_by != now:
            raise ConfigError(f"{source.folder} holds the state of {name} {made_by}, found {now}; {remedy}")
    needed = with_parts_left(config, source.manifest)
    if config.precision == "fp8" and needed != config:
        head = "" if needed.fp8_head == config.fp8_head else " --fp8-head none"
        remedy = f"resume with --allow-changes --fp8-keep-bf16 '{needed.fp8_keep_bf16}'{head}"
        parts = ", ".join(source.manifest["left_fp8"]["left"])
        raise ConfigError(f"{source.folder} has moved {parts} from fp8 to bf16, which runs no longer do; {remedy}")
    load_state(source, training.state)
    manifest, stepper = source.manifest, training.stepper
    if "loss_window" not in manifest:
        raise DataError(f"{source.folder} holds weights without the state of a run; start one with --init-from")
    stepper.loss_window, stepper.norm_window = SpikeWindow(manifest["loss_window"]), SpikeWindow(manifest["norm_window"])
    if manifest["config"].get("precision") == config.precision == "fp16":
        training.state.set_loss_scale(*manifest["loss_scale"])
    # Scales made under other rules are recalibrated.
    unchanged = all(manifest["config"].get(name) == getattr(config, name) for name in SCALING_RULES)
    if training.scaling is not None and unchanged and training.scaling.restore(manifest.get("fp8", {})):
        training.scaling.requantize()


def with_parts_left(config: RunConfig, manifest: dict[str, Any]) -> RunConfig:
    """Keeps parts in bf16 that an earlier version moved there when a tensor saturated: it saved no scales for them."""
    left = manifest.get("left_fp8", {}).get("left", [])
    if not left:
        return config
    in_bf16 = dict.fromkeys([*names_in(config.fp8_keep_bf16), *(part for part in left if part != HEAD)])
    return replace(config, fp8_keep_bf16=",".join(in_bf16), fp8_head="" if HEAD in left else config.fp8_head)


def load_state(source: Checkpoint, state: TrainingState) -> None:
    """Loads weights and optimizer state. Raises `DataError` if shapes differ."""
    _, *buffers = state.saved
    weights = {row.name: (row.stored_shape, partial(state.load_weight, row)) for row in state.design.parameters}
    source.load(checkpoint.WEIGHTS_FILE, weights)
    moments = {row.name: (row.stored_shape, partial(saved.load, row)) for saved in buffers for row in saved.layout.rows}
    source.load(checkpoint.OPTIMIZER_FILE, moments)


def origin_of(source: Checkpoint) -> dict[str, Any] | None:
    """The source of the initial weights of a checkpoint's run, opened or imported; None if it drew them."""
    return source.manifest.get("init") or source.manifest.get("imported")


def versions_of(device: torch.device, ops: ModuleType) -> dict[str, str]:
    """The versions that determine the bits, besides configuration and data. `ops`: the plain operations."""
    named = {"handgrad": handgrad.__version__, SOURCES: sources_sha256(), "torch": torch.__version__}
    return {**named, "device": devices.describe(device), **ops.versions()}


@functools.cache
def sources_sha256() -> str:
    """SHA-256 over paths and contents of the package's Python files, because checkouts may share a version number."""
    package, digest = Path(handgrad.__file__).parent, hashlib.sha256()
    for name, path in sorted((path.relative_to(package).as_posix(), path) for path in package.rglob("*.py")):
        with storage_errors(f"reading {path}"):
            content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def changed_versions(source: Checkpoint, now: dict[str, str]) -> list[str]:
    """Log lines about versions that differ between a checkpoint and this run."""
    then = source.manifest["versions"]
    return [
        f"{key} {then.get(key)} -> {now.get(key)} (the bits may differ from an unbroken run's)"
        for key in {**then, **now}
        if then.get(key) != now.get(key)
    ]


# A copy of the state in host memory.


def checkpoint_rows(design: Design) -> list[Buffer]:
    """The tensors of a checkpoint, unsharded, in its order."""
    dtypes = {buffer.name: buffer.dtype for buffer in design.buffers}
    tables = [(design.parameters, dtypes.get("master", dtypes["parameters"]))]
    tables += [(layout.rows, dtypes[f"optimizer.{name}"]) for name, layout in design.optimizer_state.items()]
    return [Buffer(row.name, row.stored_shape, dtype, COPY) for table, dtype in tables for row in table]


def copy_plans(design: Design, ranks: int) -> list[Plan]:
    """Each rank's memory plan for the tensors that it writes."""
    shares = checkpoint.split_among_writers(checkpoint_rows(design), ranks)
    return [make_plan(buffer for buffers in files.values() for buffer in buffers) for files in shares]


def host_memory(design: Design, ranks: Ranks) -> tuple[float, float]:
    """(bytes that a machine's ranks need for copies and processes, free bytes), equal on all ranks."""
    rest = design.host_plan.total_bytes + (design.plan.total_bytes if design.device.type == "cpu" else REST_BYTES)
    if design.policy is not None:  # the start's weights and, while they are in use, the present ones
        rest += 2 * flat_elements(design.parameters, design.sharding.lanes) * design.dtype.itemsize
    free = devices.available_bytes(torch.device("cpu"))
    own = copy_plans(design, ranks.size)[ranks.rank].total_bytes + rest, math.inf if free is None else free
    needed, free = zip(*ranks.all_gather_numbers(own, "host memory"), strict=True)
    return max(needed) * (ranks.size // ranks.nodes), min(free)


class HostCopy:
    """One rank's share of a checkpoint in host memory. Pins it, so that a CUDA device copies its state at link speed; an
    offloaded state is already on the host and needs no further pinned pages."""

    def __init__(self, design: Design, ranks: Ranks):
        plan = copy_plans(design, ranks.size)[ranks.rank]
        self.size_bytes, self.pinned = plan.total_bytes, design.device.type == "cuda" and not design.host_plan.buffers
        self.storage = {kind: torch.empty(size, dtype=torch.uint8) for kind, size in plan.size_bytes.items()}
        for memory in self.storage.values():
            memory.zero_()  # fault the pages in now, not in the first save
        self.views = plan.lay_over(self.storage)
        self.files = {
            file: [Stored.of(row.name, self.views[row.name]) for row in rows]
            for file, rows in checkpoint.split_among_writers(checkpoint_rows(design), ranks.size)[ranks.rank].items()
        }
        for memory in self.storage.values() if self.pinned else ():
            pin(memory, "the copy from which saves are written", "--async-save false")

    def copy_state(self, tensors: list[Stored]) -> None:
        """Copies this rank's share. All ranks must fetch all tensors, because fetching gathers the shards."""
        for tensor in tensors:
            value = tensor.fetch()
            if tensor.name in self.views:
                self.views[tensor.name].copy_(value, non_blocking=self.pinned)
        if self.pinned:
            torch.cuda.current_stream().synchronize()


def host_copy(config: RunConfig, design: Design, ranks: Ranks) -> tuple[HostCopy | None, list[str]]:
    """Allocates the run's copy; returns it with a line for the header. None if it does not fit or `async_save` is off."""
    if not config.async_save:
        return None, []
    needed, free = host_memory(design, ranks)
    if needed > free:
        return None, [
            f"saves      training waits for them: with a copy in host memory the run needs {human_bytes(needed)},"
            f" {human_bytes(free)} are free"
        ]
    copy = HostCopy(design, ranks)
    each = " a rank" if ranks.size > 1 else ""
    memory = f"{'pinned ' if copy.pinned else ''}host memory"
    return copy, [f"saves      behind training, from a copy of {human_bytes(copy.size_bytes)}{each} in {memory}"]
