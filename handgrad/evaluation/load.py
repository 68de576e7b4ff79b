"""A model from a checkpoint, ready to evaluate or to write: weights and the buffers asked for, nothing of training."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad import world
from handgrad.arena import Buffer, make_plan
from handgrad.checkpoint import WEIGHTS_FILE, Checkpoint
from handgrad.config import FIELDS, ModelShape, RunConfig, check, convert
from handgrad.data.tokenizer import Tokenizer, read_tokenizer
from handgrad.errors import DataError, UsageError
from handgrad.model.parameters import ModelTensors, flat_elements, model_tensors, parameter_table


@dataclass
class LoadedModel:
    """Weights in the precision asked for, the tokenizer they were trained with, and the buffers that were asked for."""

    config: RunConfig
    shape: ModelShape
    tokenizer: Tokenizer
    ops: ModuleType
    device: torch.device
    weights: ModelTensors
    views: dict[str, Tensor]
    step: int


def checkpoint_config(checkpoint: Checkpoint) -> RunConfig:
    """The configuration of the run that saved the checkpoint, with the default of what an older version did not know;
    `DataError` if it does not hold."""
    stored: dict[str, Any] = checkpoint.manifest["config"]
    try:
        return check(RunConfig(**{name: convert(name, stored[name]) for name in FIELDS if name in stored}))
    except UsageError as error:
        raise DataError(f"{checkpoint.folder}: its configuration does not hold: {error}") from None


def load_model(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    ops: ModuleType,
    buffers: Callable[[RunConfig, ModelShape], list[Buffer]],
) -> LoadedModel:
    """Loads the weights; `buffers` says what else to allocate, given the run's configuration and the model's sizes.

    Raises `DataError` when the checkpoint's parts do not belong together.
    """
    config = checkpoint_config(checkpoint)
    tokenizer = read_tokenizer(checkpoint.folder, checkpoint.manifest.get("tokenizer"))
    shape = config.shape(tokenizer.vocab_size)
    ops.check_sizes(length=shape.sequence_length, num_heads=shape.num_heads, channels=shape.channels)
    table = parameter_table(shape)
    parameters = Buffer("parameters", (flat_elements(table),), dtype, "parameters")
    plan = make_plan([parameters, *buffers(config, shape)])
    fewer = "try fewer at once (--micro-batch of `evaluate`, --batch of `sample`) or --precision bf16"
    check_available(plan.total_bytes, device, str(checkpoint.folder), fewer)
    views = plan.allocate(device)
    flat = views["parameters"]
    checkpoint.load(WEIGHTS_FILE, {row.name: (row.stored_shape, row.stored(flat).copy_) for row in table})
    weights = model_tensors(flat, table)
    return LoadedModel(config, shape, tokenizer, ops, device, weights, views, checkpoint.step)


def check_available(needed_bytes: int, device: torch.device, what: str, advice: str) -> None:
    """Raises `DataError` when the device has not that much memory left."""
    available = world.available_bytes(device)
    if available is not None and needed_bytes > available:
        raise DataError(f"{what} needs {needed_bytes >> 20} MiB so, {device.type} has {available >> 20} MiB free; {advice}")
