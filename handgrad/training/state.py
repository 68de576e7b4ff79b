"""All tensors of a training run: planned as rows, allocated once, named."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from handgrad.machine.devices import accumulation_dtype
from handgrad.memory.arena import Buffer, Interval
from handgrad.memory.layout import Layout, Sharding, norm_parts, update_parts
from handgrad.memory.rows import BLOCK_ELEMENTS, KIND, ParameterRow, flat_elements, initialize, named
from handgrad.ops import CONTROLS, RESULTS
from handgrad.optimizers import Owned
from handgrad.training.design import Design

FROZEN = "frozen"  # the flat buffer of frozen weights
AT_UPDATE: tuple[Interval, ...] = ((1 << 59, 1 << 59),)  # a tick after every stage's
OPTIMIZER_SCRATCH = "optimizer_scratch"
INITIAL_LOSS_SCALE = 2.0**16  # of fp16: if too large, a few skipped steps halve it


def flat_buffers(
    elements: int,
    dtype: torch.dtype,
    device: torch.device,
    state: dict[str, int],
    *,
    master_weights: bool,
    rounded_moments: bool,
    blocks: int,
) -> dict[str, Buffer]:
    """The rows other than activations, by name: flat buffers of `elements`, and the scalars of a step. The global norm sums
    `blocks` partial sums. `state`: elements per tensor of optimizer state on this rank; `rounded_moments`: in bf16."""
    exact = accumulation_dtype(dtype)
    double = torch.float32 if device.type == "mps" else torch.float64  # Apple GPUs have no float64
    of_state = torch.bfloat16 if rounded_moments else exact
    rows = [Buffer("parameters", (elements,), dtype, "parameters")]
    if dtype != exact and master_weights:
        rows.append(Buffer("master", (elements,), exact, "master weights"))
    rows += [
        Buffer("gradients", (elements,), exact, "gradients"),
        *(Buffer(f"optimizer.{name}", (numbers,), of_state, "moments") for name, numbers in state.items()),
        Buffer("norm_partials", (blocks,), exact, "gradients"),
        Buffer("controls", (CONTROLS,), double, "gradients"),
        Buffer("results", (RESULTS,), double, "gradients"),
        Buffer("sum_of_losses", (1,), double, "gradients"),
        Buffer("losses_of_step", (1,), double, "gradients"),
        Buffer("loss_scale", (3,), exact, "gradients"),
    ]
    return {row.name: row for row in rows}


def update_scratch(size_bytes: int) -> list[Buffer]:
    """The row of the optimizer's scratch, if it needs any. It reuses activation memory, which is dead at the update."""
    return [Buffer(OPTIMIZER_SCRATCH, (size_bytes,), torch.uint8, KIND, AT_UPDATE)] if size_bytes else []


@dataclass(frozen=True)
class SavedBuffer:
    """A flat buffer that checkpoints save, or this process's shard of it."""

    values: Tensor
    layout: Layout
    sharding: Sharding

    @property
    def is_whole(self) -> bool:
        return self.values.numel() == self.layout.elements

    def load(self, row: ParameterRow, values: Tensor) -> None:
        """Copies the stored part of a row into this process's share of it."""
        for piece, part in self.pieces(row):
            piece.copy_(values.reshape(-1)[part])

    def pieces(self, row: ParameterRow) -> Iterator[tuple[Tensor, slice]]:
        """Yields this process's share of the stored part of a row: (view of the shard, slice of the flattened row)."""
        start, stop = row.offset, row.offset + math.prod(row.stored_shape)
        shard, shards = self.sharding.shard, self.sharding.shards
        for bucket in self.layout.buckets:
            owned, local = bucket.owned(shard, shards), bucket.local(shard, shards)
            first, end = max(start, owned.start), min(stop, owned.stop)
            if first < end:
                into = local.start + first - owned.start
                yield self.values[into : into + end - first], slice(first - start, end - start)


@dataclass
class TrainingState:
    """The run's tensors, by name."""

    design: Design
    views: dict[str, Tensor]  # of the plan
    parameters: Tensor  # flat, in the run's dtype
    master: Tensor  # flat float32 master weights; `parameters` itself in fp32 or without master weights
    gradients: Tensor  # flat float32
    optimizer: dict[str, Tensor]  # flat float32, or bf16
    saved: list[SavedBuffer]  # `master`, then the optimizer's
    norm_partials: Tensor  # sum of squares of each gradient block
    controls: Tensor  # the host's decisions for a step (`handgrad.ops` names the slots)
    results: Tensor  # the step's results
    sum_of_losses: Tensor  # (1) over the tokens of one lane in a step
    losses_of_step: Tensor  # (lanes) `sum_of_losses` of each lane
    loss_scale: Tensor  # (3) S / gradient_tokens, S, updates since S last changed; S is 1 except in fp16
    weights: Any  # as the GEMMs of training read them
    plain_weights: Any  # in 16 or 32 bits
    named_weights: dict[str, Any]  # the same by name
    weight_gradients: Any
    named_gradients: dict[str, Tensor]  # of the parameters, by name
    activations: Any
    activation_gradients: Any
    owned: list[Owned]  # the ranges and parameters that this process updates
    frozen: list[Tensor]  # gradients of frozen parameters
    norms: list[tuple[Tensor, Tensor]]  # (sums of squares, gradient) of this rank's parts of the global norm

    def load_weight(self, row: ParameterRow, values: Tensor) -> None:
        """Loads the stored part of a parameter into the model's weights and, in full precision, the master weights."""
        row.stored(self.parameters).copy_(values)
        if self.master is not self.parameters:
            self.saved[0].load(row, values)

    def non_finite_parameters(self) -> list[str]:
        """Parameters in gradient blocks that are not finite, by the last update's sums: the next step may have begun."""
        sums, odd = self.norm_partials.cpu(), list[tuple[int, int]]()
        for part in norm_parts(self.design.buckets, self.design.sharding.lanes, 0, 1):
            for block in (~torch.isfinite(sums[part.partials])).nonzero().flatten().tolist():
                start = part.flat.start + block * BLOCK_ELEMENTS
                odd.append((start, min(start + BLOCK_ELEMENTS, part.flat.stop)))
        rows = [row for row in self.design.parameters if not row.frozen]
        return [row.name for row in rows if any(row.offset < b and row.offset + row.elements > a for a, b in odd)]

    def set_loss_scale(self, scale: float, good_steps: float) -> None:
        """Sets the loss scale, and the number of updates since it last changed."""
        values = [scale / self.design.batch.gradient_tokens, scale, good_steps]
        self.loss_scale.copy_(torch.tensor(values, dtype=self.loss_scale.dtype))


def make_state(
    design: Design, views: dict[str, Tensor], weights: dict[str, Any], forms: dict[str, Any], gradients: dict[str, Tensor]
) -> TrainingState:
    """Names the plan's `views` and draws the initial weights. `weights`: the model's, by name; `forms`: what GEMMs read
    instead of the view or weight of that name; `gradients`: by parameter name, if they do not share one flat
    buffer."""
    table, model, sharding = design.parameters, design.model, design.sharding
    bound = partial(named, layers=design.shape.num_layers)
    parameters = views["parameters"]
    master, flat = views.get("master", parameters), views["gradients"].view(-1)[: flat_elements(table, sharding.lanes)]
    gradients = gradients or {row.name: row.view(flat) for row in table}
    weight_gradients: dict[str, Any] = gradients
    if design.frozen:  # frozen weights have no gradients
        weight_gradients = dict.fromkeys(weights)
    optimizer = {name: views[f"optimizer.{name}"] for name in design.optimizer_state}
    layouts = Layout(table, design.buckets), *design.optimizer_state.values()
    shard = sharding.shard, sharding.shards
    reduced = views.get("gradient_shard")
    partials = views["norm_partials"].view(sharding.shards, -1)[sharding.shard]
    parts, *state_parts = (update_parts(each.rows, each.buckets, *shard, design.optimizer.kind) for each in layouts)
    local = [flat[part.flat] if reduced is None else reduced[part.local] for part in parts]
    owned = []
    for part, gradient, *of_state in zip(parts, local, *state_parts, strict=True):
        shape = part.shape or (-1,)
        published = parameters[part.flat].view(shape)
        weight = published if master is parameters else master[part.local].view(shape)
        shares = zip(optimizer.items(), of_state, strict=True)
        state = {name: values[share.local].view(share.shape or (-1,)) for (name, values), share in shares}
        if not part.frozen:
            owned.append(Owned(part.kind, published, weight, gradient.view(shape), state, part.flat.start))
    norms = [
        (partials[part.partials], flat[part.flat] if reduced is None else reduced[part.local])
        for part in norm_parts(design.buckets, sharding.lanes, *shard)
    ]
    training = TrainingState(
        design=design,
        views=views,
        parameters=parameters,
        master=master,
        gradients=flat,
        optimizer=optimizer,
        saved=[SavedBuffer(*each, sharding) for each in zip((master, *optimizer.values()), layouts, strict=True)],
        norm_partials=views["norm_partials"],
        controls=views["controls"],
        results=views["results"],
        sum_of_losses=views["sum_of_losses"],
        losses_of_step=views["losses_of_step"],
        loss_scale=views["loss_scale"],
        weights=bound(model.Weights, weights | forms),
        plain_weights=bound(model.Weights, weights),
        named_weights=weights,
        weight_gradients=bound(model.Weights, weight_gradients),
        named_gradients=gradients,
        activations=bound(model.Activations, views | forms),
        activation_gradients=bound(model.Gradients, views | forms),
        owned=owned,
        frozen=[gradient for part, gradient in zip(parts, local, strict=True) if part.frozen],
        norms=norms,
    )
    training.set_loss_scale(INITIAL_LOSS_SCALE if design.dtype == torch.float16 else 1.0, 0.0)
    initialize(table, design.seed, training.load_weight)
    return training
