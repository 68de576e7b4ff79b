"""Checks that refuse a run before it writes or allocates anything."""

import os
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from handgrad.data.batches import validation_batches
from handgrad.data.codes import RGB, Codes
from handgrad.data.mixture import apart
from handgrad.data.recommended import tokenizer_of
from handgrad.data.shards import Dataset
from handgrad.data.tokenizer import tokenizer_record
from handgrad.errors import ConfigError, DataError, StorageError, UsageError
from handgrad.format import human_bytes
from handgrad.machine import devices
from handgrad.networks.vqvae import parse_vqvae
from handgrad.run.checkpointing import checkpoint_rows
from handgrad.run.packing import training_batches
from handgrad.run.resolve import largest_micro_batch, memory_bytes
from handgrad.settings.config import RunConfig, check
from handgrad.storage import checkpoint
from handgrad.storage.run_files import BEST, CHECKPOINTS
from handgrad.training.design import Design


def check_names(config: RunConfig) -> None:
    """Refuses paths that are not UTF-8. Linux allows them, but the log and safetensors do not."""
    for name in ("data", "out", "init_from", "teacher"):
        path = getattr(config, name)
        try:
            path.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{name} must be a path in UTF-8, found {os.fsencode(path)!r}; rename the folder") from None


def check_bytes(architecture: str, data: str, codes: Codes | None) -> Codes:
    """Returns the form of the pictures in `data`; raises `DataError` unless they are in bytes, which a vqvae reads."""
    if codes is None or codes.decoder != RGB:
        where = f"{data} was prepared {'as codes' if codes else 'from text'}"
        raise DataError(f"{architecture} takes pictures in bytes, {where}; prepare them with --codes rgb")
    return codes


def check_pictures(config: RunConfig, dataset: Dataset) -> None:
    """Raises `DataError` unless the data are pictures in bytes, of the network's size."""
    codes = check_bytes(config.architecture, config.data, dataset.codes)
    rows, columns = parse_vqvae(config.vqvae).sides
    if codes.size != (rows, columns):
        length, (height, width) = codes.rows * codes.columns, codes.size
        remedy = f"try --sequence-length {length} --vqvae size={height}x{width}"
        raise DataError(f"expected pictures of {rows} x {columns} in {config.data}, found {height} x {width}; {remedy}")


def check_fits(config: RunConfig, design: Design, dataset: Dataset, ranks: int = 1, *, more_bytes: int = 0) -> None:
    """Refuses pictures of another size, a step beyond an epoch, and a plan that does not fit beside `more_bytes`."""
    if design.shape.network.pictures:
        check_pictures(config, dataset)
    samples = training_batches(config, dataset).samples_per_epoch
    for one in () if config.reward else apart(dataset):  # refuses a split without a sample
        validation_batches(one.dataset, config.sequence_length, packing=config.packing)
    if samples < (largest := config.batch.largest // config.sequence_length):
        lanes = config.lanes if config.lanes <= samples else 1
        micro_batch = min(config.micro_batch, samples // lanes)
        fitting = samples // (micro_batch * lanes) * micro_batch * lanes * config.sequence_length
        raise DataError(
            f"one step takes {largest} samples of {config.sequence_length} tokens, the training split of"
            f" {config.data} has {samples}; add text, or try --micro-batch {micro_batch} --tokens-per-step {fitting}"
            + (" --batch-schedule ''" if config.batch_schedule else "")
        )
    shape, device = design.shape, design.device
    for each in (shape, *([design.teacher.shape] if design.teacher else [])):
        design.plain_ops.check_sizes(**each.kernel_sizes)
    needed = sum(memory_bytes(design).values()) + more_bytes
    host, free = design.host_plan.total_bytes, devices.available_bytes(torch.device("cpu"))
    if free is not None and host > free:
        raise DataError(
            f"offload needs {human_bytes(host)} of host memory, {human_bytes(free)} are free; --offload false needs none"
        )
    available = devices.available_bytes(device)
    if available is not None and needed > available:
        fitting = largest_micro_batch(config, shape.vocab_size, available - more_bytes, ranks)
        advice = f"try --micro-batch {fitting}" if fitting else "even one sample at a time does not fit"
        raise DataError(
            f"the run needs {human_bytes(needed)}, {device.type} has {human_bytes(available)} free;"
            f" {advice} (`handgrad plan` shows what takes it)"
        )


def check_tokenizer(config: RunConfig, dataset: Dataset, *, allow_changes: bool) -> None:
    """Refuses shards whose tokenizer differs from the run in `out` or, before its first checkpoint, from the run in
    `init_from`. Call it first: differing sizes and batches may only be consequences."""
    begun = checkpoint.peek(Path(config.out))
    source = config.init_from.removesuffix(f"/{BEST}")
    peeked = begun or (checkpoint.peek(Path(source)) if source else None)
    record = peeked[1].get("tokenizer") if peeked else None
    if not peeked or not isinstance(record, dict) or record.get("sha256") == dataset.tokenizer.sha256:
        return
    spec = tokenizer_flag(record, config.out if begun else config.init_from)
    if begun is None:
        raise DataError(other_tokenizer(config.init_from, record, spec, dataset))
    if not allow_changes or record.get("vocab_size") != dataset.tokenizer.vocab_size:  # no weight would fit
        trained_on = peeked[1]["config"].get("data")
        remedy = f"{spec}, or choose another --out"
        if trained_on and trained_on != config.data:
            remedy += f", or the run's --data {trained_on}"
        raise ConfigError(other_tokenizer(config.out, record, remedy, dataset))


def tokenizer_flag(record: dict[str, Any], model: str) -> str:
    """The option of `handgrad prepare` for the tokenizer of `record`: its name, or its model's, perhaps imported first."""
    if (kind := record.get("kind")) in ("gpt2", "bytes"):
        return f"--tokenizer {kind}"
    option, first = tokenizer_of(model)
    return f"{first}{shlex.join(option)}"


def other_tokenizer(source: str, record: dict[str, Any], remedy: str, dataset: Dataset) -> str:
    """The message about weights whose tokenizer (a manifest's `record`) differs from the data's."""
    old, new = (
        f"{one.get('kind')}, {one.get('vocab_size')} words" for one in (record, tokenizer_record(dataset.tokenizer))
    )
    return (
        f"{source} was trained with another tokenizer ({old}) than {dataset.folder} ({new}); prepare the text with {remedy}"
    )


def check_shared_gradients(config: RunConfig, ranks: int) -> None:
    """Refuses ZeRO 2 if a rank would have to keep sums of gradients that it has already sent."""
    micro_batches = config.batch.largest // (config.sequence_length * config.micro_batch * ranks)
    if config.zero == 2 and ranks > 1 and micro_batches > 1:
        raise UsageError(
            f"zero 2 keeps no gradients from one micro-batch to the next, so each of {ranks} ranks can have one a step,"
            f" found {micro_batches}; use --zero 1, or --micro-batch {config.micro_batch * micro_batches}, or more ranks"
        )


def check_offload(config: RunConfig, device: torch.device, ranks: int) -> None:
    """Refuses offload that moves nothing, and offload with ranks that would send state from the host."""
    if config.offload and device.type not in ("cuda", "meta"):
        raise UsageError(f"offload moves the optimizer's state off a GPU, found device {device.type}; leave it off")
    if config.offload and ranks > 1:
        raise UsageError(f"offload is for one GPU, found {ranks} ranks, which share the state already: --offload false")


def can_offload(config: RunConfig, device: torch.device, ranks: int) -> bool:
    """True if the run could keep the optimizer's state on the host."""
    try:
        check_offload(check(replace(config, offload=True)), device, ranks)
    except UsageError:
        return False
    return True


def most_checkpoints(config: RunConfig) -> int:
    """The most checkpoints on disk at once. A run removes the oldest only after the newest is complete."""
    saves = -(-config.steps // (config.save_every or config.steps))
    count, oldest = config.keep_checkpoints, max(0, saves - config.keep_checkpoints) * config.save_every
    if config.keep_best:  # a new best is complete before the old best goes
        saves, count = saves + -(-config.steps // (config.eval_every or config.steps)), count and count + 1
        oldest = config.steps  # the best, and all the newest, may come at steps other than `save_every`'s
    majors = max(0, oldest - 1) // config.keep_every if config.keep_every else 0  # older than the newest ones
    return min(saves, count + 1 + majors) if count else saves


def checkpoint_bytes(design: Design) -> int:
    """Bytes of weights and optimizer state."""
    return sum(row.size_bytes for row in checkpoint_rows(design))


def check_disk(config: RunConfig, design: Design) -> None:
    """Refuses a run whose checkpoints will not fit in `config.out`."""
    # Checkpoints of an earlier start already have their space.
    checkpoints = most_checkpoints(config) - len(checkpoint.folders(Path(config.out) / CHECKPOINTS))
    needed = checkpoints * checkpoint_bytes(design)
    existing = [folder for folder in (Path(config.out), *Path(config.out).absolute().parents) if folder.is_dir()]
    free = shutil.disk_usage(existing[0]).free
    if needed > free:
        fewer = "a larger --keep-every" if config.keep_every else "--keep-checkpoints"
        raise StorageError(
            f"{checkpoints} checkpoints take {human_bytes(needed)}, {existing[0]} has {human_bytes(free)} free;"
            f" free some space, choose another --out or keep fewer with {fewer}"
        )
