"""All tensors of a training run, planned as one table and allocated once."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from handgrad.arena import Buffer, Plan, make_plan
from handgrad.config import ModelShape, RunConfig
from handgrad.model.activations import Activations, activations, model_buffers
from handgrad.model.parameters import (
    BLOCK_ELEMENTS,
    ModelTensors,
    ParameterRow,
    flat_elements,
    initialize,
    model_tensors,
    parameter_table,
)
from handgrad.model.quantized import Forms, quantized_table
from handgrad.ops import CONTROLS, RESULTS
from handgrad.training.scaling import Scaling, fp8_buffers, make_scaling, tensors_of

INITIAL_LOSS_SCALE = 2.0**16  # of fp16: halved within a few skipped steps where it is too large


@dataclass
class TrainingState:
    """The run's memory, and the two structures of names over it. `master` is `parameters` itself in fp32, and without
    master weights."""

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
    controls: Tensor  # what the host decides for a step (places in `handgrad.ops`)
    results: Tensor  # what a step found out
    sum_of_losses: Tensor  # (1) over the step's tokens
    loss_scale: Tensor  # (3) S / tokens_per_step, S, updates since S last changed; S is 1 but in fp16
    weights: ModelTensors  # as the training's products read them
    plain_weights: ModelTensors  # the same without fp8 forms
    weight_gradients: ModelTensors
    activations: Activations
    scaling: Scaling | None  # of an fp8 run

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of all that a checkpoint holds beside its numbers; weights under their own names."""
        for prefix, flat in (("", self.master), ("m.", self.first_moments), ("v.", self.second_moments)):
            for row in self.table:
                yield prefix + row.name, row.stored(flat)

    def set_loss_scale(self, scale: float, good_steps: float, tokens_per_step: int) -> None:
        """Sets the factor of the loss, and for how many updates it has held."""
        self.loss_scale.copy_(torch.tensor([scale / tokens_per_step, scale, good_steps], dtype=self.loss_scale.dtype))

    def publish_master(self) -> None:
        """Rounds the master weights into the weights that the model reads."""
        if self.parameters is not self.master:
            self.parameters.copy_(self.master)

    def requantize(self) -> None:
        """Makes the fp8 weights of a resumed run, at the scales they had."""
        if self.scaling is not None and self.scaling.calibrated:
            totals = self.scaling.totals.clone()
            self.scaling.quantize_weights(self.ops)
            self.scaling.totals.copy_(totals)  # which have counted them already


def training_plan(config: RunConfig, shape: ModelShape, dtype: torch.dtype, device: torch.device, ops: ModuleType) -> Plan:
    """Every tensor of a run as a row: what `TrainingState` allocates and what `handgrad plan` prints."""
    elements = flat_elements(parameter_table(shape))
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    double = torch.float32 if device.type == "mps" else torch.float64  # which Apple GPUs do not have
    buffers = [Buffer("parameters", (elements,), dtype, "parameters")]
    if dtype != exact and config.master_weights:
        buffers.append(Buffer("master", (elements,), exact, "master weights"))
    buffers += [
        Buffer("gradients", (elements,), exact, "gradients"),
        Buffer("first_moments", (elements,), exact, "moments"),
        Buffer("second_moments", (elements,), exact, "moments"),
        Buffer("norm_partials", (elements // BLOCK_ELEMENTS,), exact, "gradients"),
        Buffer("controls", (CONTROLS,), double, "gradients"),
        Buffer("results", (RESULTS,), double, "gradients"),
        Buffer("sum_of_losses", (1,), double, "gradients"),
        Buffer("loss_scale", (3,), exact, "gradients"),
    ]
    buffers += fp8_buffers(config, shape, ops)
    return make_plan([*buffers, *model_buffers(config, shape, config.micro_batch, dtype, ops)])


def largest_micro_batch(
    config: RunConfig, shape: ModelShape, dtype: torch.dtype, device: torch.device, ops: ModuleType, available_bytes: int
) -> int:
    """The largest micro-batch (samples) that divides the step and whose plan fits; 0 if not even one sample does."""
    divisors = [n for n in range(config.samples_per_step, 0, -1) if config.samples_per_step % n == 0]
    for micro_batch in divisors:
        plan = training_plan(dataclasses.replace(config, micro_batch=micro_batch), shape, dtype, device, ops)
        if plan.total_bytes <= available_bytes:
            return micro_batch
    return 0


def allocate_state(
    config: RunConfig, shape: ModelShape, dtype: torch.dtype, device: torch.device, ops: ModuleType
) -> TrainingState:
    """Allocates the plan and fills in the initial weights of `config.seed`."""
    plan = training_plan(config, shape, dtype, device, ops)
    views = plan.allocate(device)
    table = parameter_table(shape)
    parameters, quantized = views["parameters"], quantized_table(config)
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
        controls=views["controls"],
        results=views["results"],
        sum_of_losses=views["sum_of_losses"],
        loss_scale=views["loss_scale"],
        weights=tensors_of(config, table, views, current=config.fp8_scaling == "current"),
        plain_weights=model_tensors(parameters, table),
        weight_gradients=model_tensors(views["gradients"], table),
        activations=activations(views, Forms(quantized, views, current=config.fp8_scaling == "current")),
        scaling=make_scaling(config, table, views) if quantized else None,
    )
    if state.scaling is not None:
        state.scaling.reset(config, 1.0 / config.tokens_per_step)
    state.set_loss_scale(INITIAL_LOSS_SCALE if dtype == torch.float16 else 1.0, 0.0, config.tokens_per_step)
    initialize(state.master, table, config.seed)
    state.publish_master()
    return state
