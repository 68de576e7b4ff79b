"""Assembles a training from its design: memory, feed and step. Here fp8, dropout, adapters, offload, lanes and ranks join
the plain path."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from handgrad.joins import offload
from handgrad.joins.audit.digest import StateDigest, with_digest
from handgrad.joins.documents import within_documents
from handgrad.joins.dropout.bind import WithDropout
from handgrad.joins.fp8.bind import with_fp8
from handgrad.joins.fp8.frozen import (
    WEIGHT_SCRATCH,
    WithDequantizedWeights,
    WithFp8Adapters,
    WithFp8FrozenProducts,
    quantize_frozen,
    shared_operand_views,
)
from handgrad.joins.fp8.scaling import Scaling
from handgrad.joins.lora.bind import WithAdapters, adapters_by_weight, with_adapters
from handgrad.joins.masked import WithUntrained
from handgrad.joins.parallel.gradient_sync import GradientSync
from handgrad.joins.parallel.ranks import Ranks
from handgrad.joins.parallel.replicas import Replicas, with_replicas
from handgrad.joins.parallel.step import ParallelStep, with_sync
from handgrad.machine import devices
from handgrad.memory.layout import gradient_ring, moved
from handgrad.memory.rows import ParameterRow
from handgrad.run.host_copy import host_state
from handgrad.training.design import Design
from handgrad.training.feed import SAMPLE_NUMBERS, BatchFeed, Source
from handgrad.training.state import BASE, TrainingState, make_state, model_weights
from handgrad.training.step import Feed, TrainStep, plain_program

TrainedTokens = Callable[[int, int], int]  # (first sample, samples) -> the number of their tokens that are trained


@dataclass
class Assembly:
    """The parts of a training."""

    design: Design
    state: TrainingState
    feed: Feed
    stepper: TrainStep
    scaling: Scaling | None  # of fp8
    sync: GradientSync | None  # of several lanes or ranks
    validation_ops: Any  # which read `state.weights`
    plain_ops: Any  # of text and tasks: they read `state.plain_weights`
    digest: StateDigest | None = None  # of an audited run

    def load_base_weight(self, row: ParameterRow, values: Tensor) -> None:
        """Loads the stored part of a frozen weight that is no parameter."""
        if row.name in self.design.rounded:
            assert self.scaling is not None
            quantize_frozen(self.scaling, self.state.views, row.name, values)
        else:
            row.stored(self.state.views[BASE]).copy_(values)

    def await_weights(self) -> None:
        """Waits until the weights of the last update are complete here, and the state on the host."""
        self.await_state()
        if self.sync is not None:
            self.sync.await_all_weights()

    def await_state(self) -> None:
        """With offload, waits until no copy of the state is under way: nothing else orders the host behind them."""
        if self.design.host_plan.buffers:
            devices.synchronize(self.design.device)


def allocate(design: Design) -> tuple[TrainingState, Scaling | None]:
    """Allocates the plan's memory, with initial weights, and the scales of an fp8 run."""
    views = design.plan.allocate(design.device)
    if design.host_plan.buffers:
        views |= host_state(design)
    scaling = None
    if design.rounded:
        views |= shared_operand_views(design.fp8, views)
    if design.fp8 is not None and design.fp8.table:  # empty if all GEMMs stay in bf16
        scaling = Scaling(design.fp8, design.ops, views, model_weights(design, views))
        scaling.reset(1.0 / design.batch.gradient_tokens)
    gradients = {}
    if design.sharding.shards_gradients:
        ring = gradient_ring(design.buckets)
        rows = moved(design.parameters, design.buckets, ring)
        gradients = {row.name: row.view(views["gradients"][0]) for row in rows}
    return make_state(design, views, {} if scaling is None else scaling.tensors, gradients), scaling


def assemble(
    design: Design,
    source: Source,
    ranks: Ranks | None = None,
    *,
    graphs: bool | None = None,
    trained_tokens: TrainedTokens | None = None,
) -> Assembly:
    """Allocates the memory and binds the step to it."""
    state, scaling = allocate(design)
    return bind(state, scaling, source, ranks, graphs=graphs, trained_tokens=trained_tokens)


def model_operations(state: TrainingState, *, untrained: bool) -> Any:
    """The operations of the model's passes, before `pass_operations` binds tensors. `untrained`: some targets are
    below 0."""
    design = state.design
    ops: Any = design.ops
    if design.rounded:
        ops = WithFp8FrozenProducts(design.plain_ops, design.ops, state.views[WEIGHT_SCRATCH])
    return WithUntrained(ops) if untrained else ops


def pass_operations(state: TrainingState, scaling: Scaling | None, model_ops: Any, w: Any, g: Any, act: Any, d: Any) -> Any:
    """`model_ops` for passes over weights, their gradients, activations and their gradients: with documents, adapters and
    dropout bound to these tensors."""
    design = state.design
    ops = within_documents(model_ops, act)
    if design.lora is not None:
        return with_adapters_of(state, ops, w)
    if not design.dropout:
        return ops
    samples = state.views[SAMPLE_NUMBERS]
    return WithDropout(ops, w, g, act, d, samples=samples, probability=design.dropout, seed=design.seed)


def with_adapters_of(state: TrainingState, ops: Any, weights: Any) -> WithAdapters:
    """`ops` with the adapters of the run. `weights`: the tensors that the model passes to them."""
    overlay = WithFp8Adapters if state.design.rounded else WithAdapters
    return overlay(ops, adapters_by_weight(state, weights), state.views)


def evaluation_operations(state: TrainingState, model_ops: Any) -> tuple[Any, Any]:
    """The operations (of validation, which reads `state.weights`; of text and tasks, which read
    `state.plain_weights`)."""
    design = state.design
    if design.lora is None:
        return design.ops, design.plain_ops
    validation = with_adapters_of(state, model_ops, state.weights)  # `mean_loss` binds documents to its own
    if not design.rounded:
        return validation, validation
    plain_ops: Any = WithDequantizedWeights(design.plain_ops, state.views[WEIGHT_SCRATCH])
    return validation, WithAdapters(plain_ops, adapters_by_weight(state, state.plain_weights), state.views)


def bind(
    state: TrainingState,
    scaling: Scaling | None,
    source: Source | None = None,
    ranks: Ranks | None = None,
    *,
    feed: Feed | None = None,
    graphs: bool | None = None,
    trained_tokens: TrainedTokens | None = None,
) -> Assembly:
    """The step over a state: the plain program, and the launches of the packages beside it. `feed`: used instead of one
    that reads `source`. `graphs`: captures CUDA graphs, by default where the backend can. `trained_tokens`: of a source
    that does not train all of them."""
    design, ranks = state.design, ranks or Ranks()
    ops, batch, guards = design.ops, design.batch, design.guards
    devices.keep_freed_memory(design.device)
    devices.set_arithmetic(design.device, design.precision)
    if graphs is None:
        graphs = design.device.type == "cuda" and ops.CAPTURABLE
    if feed is None:
        assert source is not None
        feed = BatchFeed(source, state.activations, state.views.get(SAMPLE_NUMBERS))

    model_ops = model_operations(state, untrained=trained_tokens is not None)
    passes = partial(pass_operations, state, scaling, model_ops)
    own_tensors = state.weights, state.weight_gradients, state.activations, state.activation_gradients
    program = plain_program(state, ops, passes(*own_tensors))
    if design.host_plan.buffers:
        program = offload.with_offload(program, state, ops)
    if trained_tokens is not None:
        count = trained_tokens
        program.trained_tokens = lambda step: count(batch.first_sample(step), batch.samples(step))
    if design.lora is not None:
        program = with_adapters(program, {bucket.name for bucket in design.buckets})
    sync = None if design.sharding.lanes == 1 else GradientSync(state, ranks)
    if sync is not None:
        program = with_sync(program, sync)
    if scaling is not None:
        program = with_fp8(program, state, scaling, feed, sync, passes, graphs=graphs)
    digest = StateDigest(state, ranks, guards.audit_every, graphs=graphs) if guards.audit_every else None
    if digest is not None:
        program = with_digest(program, digest)
    replicas = Replicas(state, ranks, guards.replicas_every) if sync is not None and ranks.size > 1 else None
    if replicas is not None:
        program = with_replicas(program, replicas)

    if sync is None:
        stepper = TrainStep(state, feed, program, graphs=graphs)
    else:
        stepper = ParallelStep(state, feed, program, ranks, sync, replicas, graphs=graphs)
    validation_ops, plain_ops = evaluation_operations(state, model_ops)
    made = Assembly(design, state, feed, stepper, scaling, sync, validation_ops, plain_ops, digest)
    made.await_state()  # compiling ahead has copied it; now the host may write it
    return made
