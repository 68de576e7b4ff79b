"""All tensors of a training run, planned as one table and allocated once."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from handgrad.arena import Buffer, Plan, make_plan
from handgrad.config import ModelShape, RunConfig
from handgrad.dropout.bind import Block, WithDropout
from handgrad.fp8.scaling import Scaling, fp8_buffers, make_scaling, tensors_of
from handgrad.fp8.tables import Forms, quantized_table
from handgrad.models.activations import Activations, activations, dropout_operations, model_buffers
from handgrad.models.freezing import freeze
from handgrad.models.parameters import ModelTensors, ParameterRow, flat_elements, initialize, model_tensors, parameter_table
from handgrad.ops import CONTROLS, RESULTS
from handgrad.parallel.buckets import Bucket, NormSegment, UpdateRun, buckets, gradient_places, norm_blocks, placed

INITIAL_LOSS_SCALE = 2.0**16  # of fp16: halved within a few skipped steps where it is too large


@dataclass
class TrainingState:
    """The run's memory, and the two structures of names over it. `master` is `parameters` itself in fp32, and without
    master weights; else it is this rank's shard of them, as the moments are (`model.buckets`)."""

    shape: ModelShape
    table: tuple[ParameterRow, ...]
    buckets: tuple[Bucket, ...]
    rank: int
    ranks: int
    sharers: int  # ranks that share master weights and moments: all of them, or 1 with zero 0
    plan: Plan
    device: torch.device
    ops: ModuleType
    parameters: Tensor  # flat, in the precision of the run
    master: Tensor  # flat float32: what the optimizer updates
    gradients: Tensor  # flat float32: a lane's sum, and in the end the step's where this rank owns it; with zero 2 a ring
    gradient_places: dict[str, slice]  # of the buckets in it
    gradient_shard: Tensor | None  # with zero 2: the step's sum, where this rank owns it
    lane_stack: Tensor  # (1 + levels, elements): `gradients` and sums of lanes that wait for others
    first_moments: Tensor  # flat float32
    second_moments: Tensor  # flat float32
    norm_partials: Tensor  # one float32 per block of the flat buffers
    controls: Tensor  # what the host decides for a step (places in `handgrad.ops`)
    results: Tensor  # what a step found out
    sum_of_losses: Tensor  # (1) over the tokens of a lane's step
    lane_losses: Tensor  # (lanes) those sums
    checksum: Tensor  # (1) int64 of the parameters
    exchange: Tensor  # bytes: buckets on their way between ranks; empty for one rank
    loss_scale: Tensor  # (3) S / tokens_per_step, S, updates since S last changed; S is 1 but in fp16
    weights: ModelTensors  # as the training's products read them
    plain_weights: ModelTensors  # the same without fp8 forms
    weight_gradients: ModelTensors
    activations: Activations
    scaling: Scaling | None  # of an fp8 run

    @property
    def sharer(self) -> int:
        """This rank's place among the sharers."""
        return self.rank if self.sharers > 1 else 0

    def reduced(self, place: NormSegment | UpdateRun | Bucket) -> Tensor:
        """The step's gradient where this rank owns it."""
        if self.gradient_shard is not None:
            local = place.local(self.ranks) if isinstance(place, Bucket) else place.local
            return self.gradient_shard[local]
        return self.gradients[place.owned(self.rank, self.ranks) if isinstance(place, Bucket) else place.flat]

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of all that a checkpoint holds beside its numbers, weights under their own names; of a run whose
        master weights and moments are not shared out."""
        assert self.sharers == 1
        for prefix, flat in (("", self.master), ("m.", self.first_moments), ("v.", self.second_moments)):
            for row in self.table:
                yield prefix + row.name, row.stored(flat)

    def take_weight(self, row: ParameterRow, values: Tensor) -> None:
        """Takes up the stored part of a parameter: as the model reads it, and what this rank keeps of it in full."""
        row.stored(self.parameters).copy_(values)
        if self.master is not self.parameters:
            self.take(self.master, row, values)

    def take(self, shard: Tensor, row: ParameterRow, values: Tensor) -> None:
        """Copies the stored part of a parameter into what `shard` (master weights or moments) has of it."""
        start, flat = row.offset, values.reshape(-1)
        for bucket in self.buckets:
            owned, local = bucket.owned(self.sharer, self.sharers), bucket.local(self.sharers)
            first, end = max(start, owned.start), min(start + flat.numel(), owned.stop)
            if first < end:
                place = local.start + first - owned.start
                shard[place : place + end - first].copy_(flat[first - start : end - start])

    def set_loss_scale(self, scale: float, good_steps: float, tokens_per_step: int) -> None:
        """Sets the factor of the loss, and for how many updates it has held."""
        self.loss_scale.copy_(torch.tensor([scale / tokens_per_step, scale, good_steps], dtype=self.loss_scale.dtype))

    def requantize(self) -> None:
        """Makes the fp8 weights of a resumed run, at the scales they had."""
        if self.scaling is not None and self.scaling.calibrated:
            totals = self.scaling.totals.clone()
            self.scaling.quantize_weights(self.ops)
            self.scaling.totals.copy_(totals)  # which have counted them already


def with_dropout(
    ops: ModuleType, w: ModelTensors, g: ModelTensors, act: Activations, probability: float, seed: int
) -> ModuleType:
    """The operations of a micro-step."""
    if act.samples is None:
        return ops
    blocks = [
        Block(
            lse=a.lse,
            proj_bias=w.proj_bias,
            fcproj_bias=w.fcproj_bias,
            dproj_weight_acc=g.proj_weight,
            dproj_bias_acc=g.proj_bias,
            dfcproj_weight_acc=g.fcproj_weight,
            dfcproj_bias_acc=g.fcproj_bias,
        )
        for a, w, g in zip(act.blocks, w.blocks, g.blocks, strict=True)
    ]
    sites = {"samples": act.samples, "probability": probability, "seed": seed, "blocks": blocks, "dbranch": act.dln}
    return WithDropout(ops, dropout_operations(ops), **sites)


def training_plan(
    config: RunConfig, shape: ModelShape, dtype: torch.dtype, device: torch.device, ops: ModuleType, ranks: int = 1
) -> Plan:
    """Every tensor of one rank of a run as a row: what `TrainingState` allocates and what `handgrad plan` prints."""
    lanes = max(1, config.lanes)
    table = parameter_table(shape, lanes)
    elements, all_buckets = flat_elements(table, lanes), buckets(table, lanes)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    double = torch.float32 if device.type == "mps" else torch.float64  # which Apple GPUs do not have
    shard = elements // (ranks if config.zero else 1)
    levels = (lanes // ranks).bit_length()  # the lane at work, and a sum for every level of the tree over a rank's lanes
    buffers = [Buffer("parameters", (elements,), dtype, "parameters")]
    if dtype != exact and config.master_weights:
        buffers.append(Buffer("master", (shard,), exact, "master weights"))
    places = gradient_places(all_buckets, config.zero if ranks > 1 else 0)
    if config.zero == 2 and ranks > 1:
        buffers.append(Buffer("gradient_shard", (shard,), exact, "gradients"))
    buffers += [
        Buffer("gradients", (levels, max(place.stop for place in places.values())), exact, "gradients"),
        Buffer("first_moments", (shard,), exact, "moments"),
        Buffer("second_moments", (shard,), exact, "moments"),
        Buffer("norm_partials", (norm_blocks(all_buckets, lanes),), exact, "gradients"),
        Buffer("controls", (CONTROLS,), double, "gradients"),
        Buffer("results", (RESULTS,), double, "gradients"),
        Buffer("sum_of_losses", (1,), double, "gradients"),
        Buffer("lane_losses", (lanes,), double, "gradients"),
        Buffer("loss_scale", (3,), exact, "gradients"),
        Buffer("checksum", (1,), torch.int64, "gradients"),
    ]
    if ranks > 1:
        # The first in memory is the last to be sent, and may be on its way together with the one before.
        travelling = all_buckets[0].elements + max(bucket.elements for bucket in all_buckets[1:])
        buffers.append(Buffer("exchange", (travelling * exact.itemsize,), torch.uint8, "exchange"))
    buffers += fp8_buffers(config, shape, ops, ranks)
    return make_plan([*buffers, *model_buffers(config, shape, config.micro_batch, dtype, ops)])


def largest_micro_batch(
    config: RunConfig,
    shape: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    ops: ModuleType,
    available_bytes: int,
    ranks: int = 1,
) -> int:
    """The largest micro-batch (samples) that divides a lane's step and whose plan fits; 0 if not even one sample does."""
    samples = config.samples_per_step // max(1, config.lanes)
    divisors = [n for n in range(samples, 0, -1) if samples % n == 0]
    for micro_batch in divisors:
        plan = training_plan(dataclasses.replace(config, micro_batch=micro_batch), shape, dtype, device, ops, ranks)
        if plan.total_bytes <= available_bytes:
            return micro_batch
    return 0


def allocate_state(
    config: RunConfig,
    shape: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    ops: ModuleType,
    rank: int = 0,
    ranks: int = 1,
) -> TrainingState:
    """Allocates the plan of one rank and fills in the initial weights of `config.seed`."""
    plan = training_plan(config, shape, dtype, device, ops, ranks)
    views = plan.allocate(device)
    lanes = max(1, config.lanes)
    table = freeze(parameter_table(shape, lanes), config.freeze)
    all_buckets = buckets(table, lanes)
    parameters, quantized = views["parameters"], quantized_table(config)
    gradients = views["gradients"][0]
    places = gradient_places(all_buckets, config.zero if ranks > 1 else 0)
    state = TrainingState(
        shape=shape,
        table=table,
        buckets=all_buckets,
        rank=rank,
        ranks=ranks,
        sharers=ranks if config.zero else 1,
        plan=plan,
        device=device,
        ops=ops,
        parameters=parameters,
        master=views.get("master", parameters),
        gradients=gradients,
        gradient_places=places,
        gradient_shard=views.get("gradient_shard"),
        lane_stack=views["gradients"],
        first_moments=views["first_moments"],
        second_moments=views["second_moments"],
        norm_partials=views["norm_partials"],
        controls=views["controls"],
        results=views["results"],
        sum_of_losses=views["sum_of_losses"],
        lane_losses=views["lane_losses"],
        checksum=views["checksum"],
        exchange=views.get("exchange", torch.empty(0, dtype=torch.uint8, device=device)),
        loss_scale=views["loss_scale"],
        weights=tensors_of(config, table, views, current=config.fp8_scaling == "current"),
        plain_weights=model_tensors(parameters, table),
        weight_gradients=model_tensors(gradients, placed(table, all_buckets, places)),
        activations=activations(views, Forms(quantized, views, current=config.fp8_scaling == "current")),
        scaling=make_scaling(config, table, views) if quantized else None,
    )
    if state.scaling is not None:
        state.scaling.reset(config, 1.0 / config.tokens_per_step)
    state.set_loss_scale(INITIAL_LOSS_SCALE if dtype == torch.float16 else 1.0, 0.0, config.tokens_per_step)
    initialize(table, config.seed, state.take_weight)
    return state
