"""A model from a checkpoint or from other weights, ready to evaluate or to write: its weights and the buffers asked for,
nothing of training."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad import devices
from handgrad.arena import Buffer, make_plan
from handgrad.checkpoint import WEIGHTS_FILE, Checkpoint
from handgrad.config import FIELDS, ModelShape, RunConfig, check, convert
from handgrad.data.tokenizer import Tokenizer, read_tokenizer
from handgrad.errors import DataError, UsageError
from handgrad.models import named_weights, parameter_table
from handgrad.models.rows import ParameterRow, flat_elements


@dataclass(frozen=True)
class Weights:
    """A model's weights wherever they lie, read one by one when they are asked for (`interop.sources` opens them)."""

    shape: ModelShape
    tokenizer: Tokenizer
    weight: Callable[[ParameterRow], Tensor]  # of a row of `shape`'s table: float32, row.stored_shape; or `DataError`
    origin: dict[str, Any]  # for a manifest: what they were "from", the "source" as it was named, "sha256" by file
    config: RunConfig  # of the run that they are from; of weights from elsewhere the sizes alone
    checkpoint: Checkpoint | None = None  # that holds them, if it is one of ours


def checkpoint_weights(found: Checkpoint, named: str = "") -> Weights:
    """The weights of a checkpoint of ours, `named` so by the user. Raises `DataError` when its configuration or its
    tokenizer does not hold."""
    tokenizer, config = read_tokenizer(found.folder, found.manifest.get("tokenizer")), checkpoint_config(found)
    digest = found.manifest["files"][WEIGHTS_FILE]["sha256"]
    source = named or str(found.folder)
    origin = {"from": "checkpoint", "source": source, "step": found.step, "sha256": {WEIGHTS_FILE: digest}}

    def weight(row: ParameterRow) -> Tensor:
        return found.tensor(WEIGHTS_FILE, row.name, row.stored_shape).to(torch.float32)

    return Weights(config.shape(tokenizer.vocab_size), tokenizer, weight, origin, config, found)


@dataclass
class LoadedModel:
    """Weights in the precision asked for, the tokenizer they were trained with, and the buffers that were asked for."""

    config: RunConfig
    shape: ModelShape
    tokenizer: Tokenizer
    ops: ModuleType
    device: torch.device
    weights: Any
    views: dict[str, Tensor]


def checkpoint_config(checkpoint: Checkpoint) -> RunConfig:
    """The configuration of the run that saved the checkpoint, with the default of what an older version did not know;
    `DataError` if it does not hold."""
    stored: dict[str, Any] = checkpoint.manifest["config"]
    try:
        return check(RunConfig(**{name: convert(name, stored[name]) for name in FIELDS if name in stored}))
    except UsageError as error:
        raise DataError(f"{checkpoint.folder}: its configuration does not hold: {error}") from None


def load_model(
    source: Checkpoint | Weights,
    device: torch.device,
    dtype: torch.dtype,
    ops: ModuleType,
    buffers: Callable[[RunConfig, ModelShape], list[Buffer]],
) -> LoadedModel:
    """Loads the weights; `buffers` says what else to allocate, given the run's configuration and the model's sizes.

    Raises `DataError` when the checkpoint's parts do not belong together, or what `Weights.weight` finds.
    """
    weights = checkpoint_weights(source) if isinstance(source, Checkpoint) else source
    config, shape = weights.config, weights.shape
    ops.check_sizes(length=shape.sequence_length, num_heads=shape.num_heads, channels=shape.channels)
    table = parameter_table(shape)
    parameters = Buffer("parameters", (flat_elements(table),), dtype, "parameters")
    plan = make_plan([parameters, *buffers(config, shape)])
    fewer = "try fewer at once (--micro-batch of `evaluate`, --batch of `sample`) or --precision bf16"
    check_available(plan.total_bytes, device, weights.origin["source"], fewer)
    views = plan.allocate(device)
    flat = views["parameters"]
    if weights.checkpoint is not None:
        weights.checkpoint.load(WEIGHTS_FILE, {row.name: (row.stored_shape, row.stored(flat).copy_) for row in table})
    else:
        for row in table:
            row.stored(flat).copy_(weights.weight(row))
    return LoadedModel(config, shape, weights.tokenizer, ops, device, named_weights(shape, flat, table), views)


def check_available(needed_bytes: int, device: torch.device, what: str, advice: str) -> None:
    """Raises `DataError` when the device has not that much memory left."""
    available = devices.available_bytes(device)
    if available is not None and needed_bytes > available:
        raise DataError(f"{what} needs {needed_bytes >> 20} MiB so, {device.type} has {available >> 20} MiB free; {advice}")
