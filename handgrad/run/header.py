"""What is said and recorded of a run before its first step, and what is refused."""

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import handgrad
from handgrad import devices
from handgrad.arena import make_plan
from handgrad.config import ModelShape, RunConfig
from handgrad.data.batches import Batches
from handgrad.data.shards import Dataset
from handgrad.errors import DataError, StorageError, UsageError
from handgrad.format import human_bytes, human_count, memory_table
from handgrad.fp8.tables import fp8_products
from handgrad.generation.decode import decode_buffers
from handgrad.models.freezing import freeze
from handgrad.models.parameters import count_parameters, flops_per_token, parameter_table
from handgrad.parallel.ranks import Ranks
from handgrad.training.state import largest_micro_batch, training_plan


def check_fits(
    config: RunConfig,
    dataset: Dataset,
    device: torch.device,
    dtype: torch.dtype,
    ops: ModuleType,
    ranks: int = 1,
    *,
    more_bytes: int = 0,
) -> None:
    """Refuses, before anything is written or allocated, a step larger than an epoch and a plan larger than the memory, with
    the `more_bytes` of what is beside it."""
    samples = Batches(dataset.splits["train"], config.sequence_length, config.seed).samples_per_epoch
    if dataset.splits["validation"]:
        Batches(dataset.splits["validation"], config.sequence_length, config.seed)  # refuses a split without one sample
    if samples < config.samples_per_step:
        lanes = config.lanes if config.lanes <= samples else 1
        micro_batch = min(config.micro_batch, samples // lanes)
        fitting = samples // (micro_batch * lanes) * micro_batch * lanes * config.sequence_length
        raise DataError(
            f"one step takes {config.samples_per_step} samples of {config.sequence_length} tokens, the training split of"
            f" {config.data} has {samples}; add text, or try --micro-batch {micro_batch} --tokens-per-step {fitting}"
        )
    shape = config.shape(dataset.tokenizer.vocab_size)
    freeze(parameter_table(shape), config.freeze)  # refuses names of no parameter
    ops.check_sizes(length=shape.sequence_length, num_heads=shape.num_heads, channels=shape.channels)
    available = devices.available_bytes(device)
    needed = training_plan(config, shape, dtype, device, ops, ranks).total_bytes
    needed += make_plan(decode_buffers(shape, 1, dtype, ops)).total_bytes + more_bytes
    if available is not None and needed > available:
        fitting = largest_micro_batch(config, shape, dtype, device, ops, available - more_bytes, ranks)
        advice = f"try --micro-batch {fitting}" if fitting else "even one sample at a time does not fit"
        raise DataError(
            f"the run needs {human_bytes(needed)}, {device.type} has {human_bytes(available)} free;"
            f" {advice} (`handgrad plan` shows what takes it)"
        )


def check_shared_gradients(config: RunConfig, ranks: int) -> None:
    """Refuses zero 2 where a rank would have to keep sums of gradients that it has sent away."""
    micro_batches = config.samples_per_step // config.micro_batch // ranks
    if config.zero == 2 and ranks > 1 and micro_batches > 1:
        raise UsageError(
            f"zero 2 keeps no gradients from one micro-batch to the next, so each of {ranks} ranks can have one a step,"
            f" found {micro_batches}; use --zero 1, or --micro-batch {config.micro_batch * micro_batches}, or more ranks"
        )


def most_checkpoints(config: RunConfig) -> int:
    """How many are on the disk at once, at most: the oldest goes only after the newest stands."""
    saves = -(-config.steps // (config.save_every or config.steps))
    kept = config.keep_checkpoints
    if config.keep_best:  # and one that is to be the best does not take the place of the best before
        saves, kept = saves + -(-config.steps // (config.eval_every or config.steps)), kept and kept + 1
    return min(saves, kept + 1) if kept else saves


def checkpoint_bytes(config: RunConfig, vocab_size: int) -> int:
    """Weights and two moments."""
    bytes_per_parameter = (4 if config.master_weights else 2) + 8
    return bytes_per_parameter * count_parameters(parameter_table(config.shape(vocab_size)))


def check_disk(config: RunConfig, vocab_size: int) -> None:
    """Refuses a run whose checkpoints will not fit in `config.out`: weights and two moments each."""
    # Those of an earlier start are there already.
    checkpoints = most_checkpoints(config) - len(list(Path(config.out).glob("checkpoints/step_*")))
    needed = checkpoints * checkpoint_bytes(config, vocab_size)
    existing = [folder for folder in (Path(config.out), *Path(config.out).absolute().parents) if folder.is_dir()]
    free = shutil.disk_usage(existing[0]).free
    if needed > free:
        raise StorageError(
            f"{checkpoints} checkpoints take {human_bytes(needed)}, {existing[0]} has {human_bytes(free)} free;"
            " free some space, choose another --out or keep fewer with --keep-checkpoints"
        )


def header_lines(
    config: RunConfig,
    dataset: Dataset,
    device: torch.device,
    ops: ModuleType,
    memory_bytes: dict[str, int],
    started: str,
    ranks: Ranks,
) -> list[str]:
    """The header of a run: versions, model, data, batch, numbers, memory. `started`: from where, in a word or two."""
    shape = config.shape(dataset.tokenizer.vocab_size)
    samples_per_epoch = Batches(dataset.splits["train"], config.sequence_length, config.seed).samples_per_epoch
    lanes = f"{config.lanes} lanes x " if config.lanes > 1 else ""
    return [
        f"handgrad {handgrad.__version__}, torch {torch.__version__}, {devices.describe(device)}",
        f"model      {shape.num_layers} layers, {shape.num_heads} heads, {shape.channels} channels,"
        f" context {shape.sequence_length}: {human_count(count_parameters(parameter_table(shape)))} parameters",
        *freezing_lines(config, shape),
        f"data       {config.data}: {human_count(dataset.tokens('train'))} training and"
        f" {human_count(dataset.tokens('validation'))} validation tokens, {dataset.tokenizer.kind} vocabulary of"
        f" {shape.vocab_size} (padded to {shape.padded_vocab_size})",
        *rank_lines(config, ranks),
        f"batch      {config.tokens_per_step} tokens a step = {lanes}{config.micro_steps} x {config.micro_batch} x"
        f" {config.sequence_length}; {config.steps} steps = {human_count(config.steps * config.tokens_per_step)} tokens,"
        f" {config.steps * config.samples_per_step / samples_per_epoch:.1f} epochs",
        f"numbers    {config.precision}, recompute {config.recompute}, {started}",
        *fp8_lines(config),
        *dropout_lines(config),
        f"operations {', '.join([ops.__name__.rsplit('.', 1)[-1], *(f'{k}: {v}' for k, v in ops.versions().items())])}",
        "memory",
        *memory_table([memory_bytes]),
    ]


def trained_parameters(config: RunConfig, shape: ModelShape) -> int:
    return count_parameters(row for row in freeze(parameter_table(shape), config.freeze) if not row.frozen)


def freezing_lines(config: RunConfig, shape: ModelShape) -> list[str]:
    """What is trained, if it is not everything."""
    if not config.freeze:
        return []
    trained, everything = trained_parameters(config, shape), count_parameters(parameter_table(shape))
    return [f"trained    {human_count(trained)} of {human_count(everything)} parameters; frozen: {config.freeze}"]


def rank_lines(config: RunConfig, ranks: Ranks) -> list[str]:
    """How many processes train, and what they share."""
    if ranks.size == 1:
        return []
    shared = ("nothing", "master weights and moments", "master weights, moments and gradients")[config.zero]
    nodes = f" on {ranks.nodes} nodes" if ranks.nodes > 1 else ""
    lanes = config.lanes // ranks.size
    return [
        f"ranks      {ranks.size}{nodes}, {lanes} of {config.lanes} lanes each; shared (zero {config.zero}): {shared};"
        f" gradients travel in {config.reduce_precision}"
    ]


def fp8_lines(config: RunConfig) -> list[str]:
    """Which products of an fp8 run are in fp8, and how they are scaled."""
    if config.precision != "fp8":
        return []
    window = f" over {config.fp8_window} steps, margin {config.fp8_margin}" if config.fp8_scaling == "delayed" else ""
    products = fp8_products(config).describe(config.num_layers)
    return [f"fp8        {products}; gradients {config.fp8_gradients}, {config.fp8_scaling} scaling{window}"]


def dropout_lines(config: RunConfig) -> list[str]:
    """What is left out in training, and what it costs: beside the masks' arithmetic, passes over (N, C)."""
    if not config.dropout:
        return []
    # A branch is written and read again, forward; its gradient, backward, and that once more for the bias (5 a half).
    # The embedding is changed in place both ways.
    passes = 10 * config.num_layers + 4
    tokens = config.micro_batch * config.sequence_length
    moved = passes * tokens * config.channels * devices.DTYPES[config.precision].itemsize
    return [
        f"dropout    {config.dropout:g} after the embedding, in attention and on both branches of a block;"
        f" masks take no memory, and a micro-batch moves {human_bytes(moved)} more"
    ]


def run_record(config: RunConfig, dataset: Dataset, device: torch.device, memory_bytes: dict[str, int]) -> dict[str, Any]:
    """The same for programs: the "run" line of metrics.jsonl."""
    shape: ModelShape = config.shape(dataset.tokenizer.vocab_size)
    manifest = dataset.manifest
    return {
        "handgrad": handgrad.__version__,
        "torch": torch.__version__,
        "device": devices.describe(device),
        "precision": config.precision,
        "parameters": count_parameters(parameter_table(shape)),
        "trained_parameters": trained_parameters(config, shape),
        "tokens_per_step": config.tokens_per_step,
        "steps": config.steps,
        "vocab_size": shape.vocab_size,
        "memory_bytes": memory_bytes,
        "data": {
            "folder": config.data,
            "identity": dataset.identity,
            "tokenizer": dataset.tokenizer.kind,
            "train_tokens": dataset.tokens("train"),
            "validation_tokens": dataset.tokens("validation"),
            "validation_text_bytes": manifest["splits"]["validation"]["text_bytes"] if manifest else None,
        },
        "floor_nats_per_token": dataset.floor("validation"),
        "flops_per_token": flops_per_token(shape),
    }
