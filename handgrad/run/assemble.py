"""Assembles a training from its design: memory, feed and step. Here fp8, dropout, adapters, offload, lanes and ranks join
the plain path."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from handgrad import devices
from handgrad.audit.digest import StateDigest, with_digest
from handgrad.dropout.bind import WithDropout
from handgrad.fp8.bind import with_fp8
from handgrad.fp8.dropout import WithFp8Dropout
from handgrad.fp8.frozen import AT_WORK, FrozenProducts, RoundedWeights, WithFp8Adapters, operand_views, take
from handgrad.fp8.scaling import Scaling
from handgrad.layout import gradient_ring, moved
from handgrad.lora.bind import WithAdapters, bound_adapters, with_adapters
from handgrad.models.documents import within_documents
from handgrad.models.rows import ParameterRow
from handgrad.models.untrained import WithUntrained
from handgrad.parallel.gradient_sync import GradientSync
from handgrad.parallel.ranks import Ranks
from handgrad.parallel.replicas import Replicas, with_replicas
from handgrad.parallel.step import ParallelStep, with_sync
from handgrad.run.host_copy import host_state
from handgrad.training import offload
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
    ops: Any  # of validation, which reads `state.weights`
    plain_ops: Any  # of text and tasks, which read `state.plain_weights`
    digest: StateDigest | None = None  # of an audited run

    def take_base(self, row: ParameterRow, values: Tensor) -> None:
        """Takes the stored part of a frozen weight beside the parameters."""
        if row.name in self.design.rounded:
            assert self.scaling is not None
            take(self.scaling, self.state.views, row.name, values)
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
    """The memory of the plan with the initial weights, and the scales of an fp8 run."""
    views = design.plan.allocate(design.device)
    if design.host_plan.buffers:
        views |= host_state(design)
    scaling = None
    if design.rounded:
        views |= operand_views(design.fp8, views)
    if design.fp8 is not None and design.fp8.table:  # none if all GEMMs have left fp8
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
    """All that makes steps: memory, and `bind`."""
    state, scaling = allocate(design)
    return bind(state, scaling, source, ranks, graphs=graphs, trained_tokens=trained_tokens)


def pass_operations(state: TrainingState, scaling: Scaling | None, ops: Any, *tensors: Any) -> Any:
    """The operations of passes over weights, their gradients, activations and theirs (`tensors`)."""
    weights, _, act, _ = tensors
    design, samples = state.design, state.views.get(SAMPLE_NUMBERS)
    within = within_documents(ops, act)
    if design.lora is not None:
        return adapted(state, within, weights)
    if samples is None:
        return within
    dropping = WithDropout if scaling is None else WithFp8Dropout
    return dropping(within, *tensors, samples=samples, probability=design.dropout, seed=design.seed)


def adapted(state: TrainingState, ops: Any, weights: Any) -> WithAdapters:
    adapting = WithFp8Adapters if state.design.rounded else WithAdapters
    return adapting(ops, bound_adapters(state, weights), state.views)


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
    """The step over a state. `feed`: in the place of one that reads `source`. `trained_tokens`: of a source that does not
    train all of them."""
    ranks, design, ops = ranks or Ranks(), state.design, state.design.ops
    devices.keep_freed_memory(design.device)
    if feed is None:
        assert source is not None
        feed = BatchFeed(source, state.activations, state.views.get(SAMPLE_NUMBERS))
    sync = None if design.sharding.lanes == 1 else GradientSync(state, ranks)
    graphs = design.device.type == "cuda" and ops.CAPTURABLE if graphs is None else graphs
    model_ops: Any = FrozenProducts(design.plain_ops, ops, state.views[AT_WORK]) if design.rounded else ops
    model_ops = model_ops if trained_tokens is None else WithUntrained(model_ops)
    passes_over = partial(pass_operations, state, scaling, model_ops)
    passes = passes_over(state.weights, state.weight_gradients, state.activations, state.activation_gradients)
    program, batch = plain_program(state, ops, passes), design.batch
    if design.host_plan.buffers:
        program = offload.with_offload(program, state, ops)
    if trained_tokens is not None:
        count = trained_tokens
        program.trained_tokens = lambda step: count(batch.first_sample(step), batch.samples(step))
    reads = ops, design.plain_ops
    if design.lora is not None:
        validation = adapted(state, model_ops, state.weights)  # `mean_loss` binds documents to its own
        reads = validation, validation
        if design.rounded:  # text and tasks read weights in 16 bits
            plain_ops: Any = RoundedWeights(design.plain_ops, state.views[AT_WORK])
            reads = validation, WithAdapters(plain_ops, bound_adapters(state, state.plain_weights), state.views)
        program = with_adapters(program, {bucket.name for bucket in design.buckets})
    if sync is not None:
        program = with_sync(program, sync)
    if scaling is not None:
        program = with_fp8(program, state, scaling, feed, sync, passes_over, graphs=graphs)
    digest = None
    if design.guards.audit_every:
        digest = StateDigest(state, ranks, design.guards.audit_every, graphs=graphs)
        program = with_digest(program, digest)
    replicas = Replicas(state, ranks.rank, design.guards.replicas_every) if sync is not None and ranks.size > 1 else None
    if replicas is not None:
        program = with_replicas(program, replicas)
    if sync is None:
        stepper = TrainStep(state, feed, program, graphs=graphs)
    else:
        stepper = ParallelStep(state, feed, program, ranks, sync, replicas, graphs=graphs)
    made = Assembly(design, state, feed, stepper, scaling, sync, *reads, digest)
    made.await_state()  # compiling ahead has copied it; now the host may write it
    return made
