"""All tensors of a training run, planned as one table and allocated once."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from handgrad.arena import Buffer, Plan, make_plan
from handgrad.config import ModelShape, RunConfig
from handgrad.model.activations import Activations, activation_buffers, activations, head_chunk_tokens
from handgrad.model.parameters import (
    BLOCK_ELEMENTS,
    ModelTensors,
    ParameterRow,
    flat_elements,
    initialize,
    model_tensors,
    parameter_table,
)


@dataclass
class TrainingState:
    """The run's memory, and the two structures of names over it. `master` is `parameters` itself in fp32."""

    shape: ModelShape
    table: tuple[ParameterRow, ...]
    plan: Plan
    device: torch.device
    ops: ModuleType
    parameters: Tensor  # flat, in the precision of the run
    master: Tensor  # flat float32: what the optimizer updates
    gradients: Tensor  # flat float32
    first_moments: Tensor  # flat float32
    second_moments: Tensor  # flat float32
    norm_partials: Tensor  # one float32 per block of the flat buffers
    weights: ModelTensors
    weight_gradients: ModelTensors
    activations: Activations

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of all that a checkpoint holds beside its numbers; weights under their own names."""
        for prefix, flat in (("", self.master), ("m.", self.first_moments), ("v.", self.second_moments)):
            for row in self.table:
                yield prefix + row.name, row.stored(flat)

    def publish_master(self) -> None:
        """Rounds the master weights into the weights that the model reads."""
        if self.parameters is not self.master:
            self.parameters.copy_(self.master)


def training_plan(config: RunConfig, shape: ModelShape, dtype: torch.dtype) -> Plan:
    """Every tensor of a run as a row: what `TrainingState` allocates and what `handgrad plan` prints."""
    elements = flat_elements(parameter_table(shape))
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    buffers = [Buffer("parameters", (elements,), dtype, "parameters")]
    if dtype != exact:
        buffers.append(Buffer("master", (elements,), exact, "master weights"))
    buffers += [
        Buffer("gradients", (elements,), exact, "gradients"),
        Buffer("first_moments", (elements,), exact, "moments"),
        Buffer("second_moments", (elements,), exact, "moments"),
        Buffer("norm_partials", (elements // BLOCK_ELEMENTS,), exact, "gradients"),
    ]
    tokens = config.micro_batch * config.sequence_length
    chunk = head_chunk_tokens(config.head_chunk_tokens, tokens, shape.padded_vocab_size, dtype.itemsize)
    buffers += activation_buffers(
        shape, config.micro_batch, config.sequence_length, dtype, recompute=config.recompute, chunk=chunk
    )
    return make_plan(buffers)


def largest_micro_batch(config: RunConfig, shape: ModelShape, dtype: torch.dtype, available_bytes: int) -> int:
    """The largest micro-batch (samples) that divides the step and whose plan fits; 0 if not even one sample does."""
    divisors = [n for n in range(config.samples_per_step, 0, -1) if config.samples_per_step % n == 0]
    for micro_batch in divisors:
        plan = training_plan(dataclasses.replace(config, micro_batch=micro_batch), shape, dtype)
        if plan.total_bytes <= available_bytes:
            return micro_batch
    return 0


def allocate_state(
    config: RunConfig, shape: ModelShape, dtype: torch.dtype, device: torch.device, ops: ModuleType
) -> TrainingState:
    """Allocates the plan and fills in the initial weights of `config.seed`."""
    plan = training_plan(config, shape, dtype)
    views = plan.allocate(device)
    table = parameter_table(shape)
    parameters = views["parameters"]
    state = TrainingState(
        shape=shape,
        table=table,
        plan=plan,
        device=device,
        ops=ops,
        parameters=parameters,
        master=views.get("master", parameters),
        gradients=views["gradients"],
        first_moments=views["first_moments"],
        second_moments=views["second_moments"],
        norm_partials=views["norm_partials"],
        weights=model_tensors(parameters, table),
        weight_gradients=model_tensors(views["gradients"], table),
        activations=activations(views),
    )
    initialize(state.master, table, config.seed)
    state.publish_master()
    return state
