"""Assembles a training from its design: memory, feed and step. Adds fp8, dropout, adapters, offload, lanes and ranks to the
plain path."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from handgrad.joins import distill, documents, offload, policy, preference
from handgrad.joins.audit.digest import StateDigest
from handgrad.joins.dropout.bind import WithDropout
from handgrad.joins.fp8 import bind as fp8, with_lora
from handgrad.joins.fp8.scaling import Scaling
from handgrad.joins.lora import bind as lora
from handgrad.joins.offload import host_state
from handgrad.joins.parallel.gradient_sync import GradientSync, gradient_ring, moved
from handgrad.joins.parallel.ranks import Ranks
from handgrad.joins.parallel.replicas import Replicas
from handgrad.joins.parallel.step import ParallelStep
from handgrad.machine import devices
from handgrad.memory.rows import ParameterRow
from handgrad.training.design import Design
from handgrad.training.feed import OF_ANSWERS, SAMPLE_NUMBERS, BatchFeed, Source
from handgrad.training.state import FROZEN, TrainingState, make_state
from handgrad.training.step import Feed, TrainStep, plain_program

TrainedTokens = Callable[[int, int], int]  # (first sample, number of samples) -> their trained tokens


@dataclass
class Assembly:
    """The parts of a training."""

    design: Design
    state: TrainingState
    feed: Feed
    stepper: TrainStep
    scaling: Scaling | None  # of fp8
    sync: GradientSync | None  # of several lanes or ranks
    model_ops: Any  # of the step's forward and backward
    validation_ops: Any  # read `state.weights`
    plain_ops: Any  # for sampling and tasks: read `state.plain_weights`
    digest: StateDigest | None  # of an audited run
    start: Tensor | None = None  # of a run on rewards: its first parameters, on the host

    def load_frozen_weight(self, row: ParameterRow, values: Tensor) -> None:
        """Loads the stored part of a weight that adapters leave frozen."""
        if row.name in self.design.fp8_only:
            assert self.scaling is not None
            with_lora.quantize_frozen(self.scaling, self.state.views, row.name, values)
        else:
            row.stored(self.state.views[FROZEN]).copy_(values)

    def await_weights(self) -> None:
        """Waits until this rank has all weights of the last update and, with offload, the host has the state."""
        self.await_state()
        if self.sync is not None:
            self.sync.await_all_weights()

    def await_state(self) -> None:
        """With offload, waits for all copies of the state: nothing else makes the host wait for them."""
        if self.design.host_plan.buffers:
            devices.synchronize(self.design.device)


def allocate(design: Design) -> tuple[TrainingState, Scaling | None]:
    """Allocates the plan's memory, draws the initial weights, and makes the scales of an fp8 run."""
    views = design.plan.allocate(design.device)
    if design.host_plan.buffers:
        views |= host_state(design)
    weights: dict[str, Any]
    if design.frozen:
        weights = {row.name: row.view(views[FROZEN]) for row in design.frozen if row.name not in design.fp8_only}
    else:
        weights = {row.name: row.view(views["parameters"]) for row in design.parameters}
    scaling = None
    if design.fp8_only:
        views |= with_lora.shared_operand_views(design.fp8, views)
    if design.fp8 is not None and design.fp8.table:  # the table is empty if all GEMMs stay in bf16
        scaling = Scaling(design.fp8, design.ops, views, weights)
        scaling.reset(1.0 / design.batch.gradient_tokens)
        weights |= {name: scaling.tensors[name] for name in design.fp8_only}
    gradients = {}
    if design.sharding.shards_gradients:
        rows = moved(design.parameters, design.buckets, gradient_ring(design.buckets))
        gradients = {row.name: row.view(views["gradients"][0]) for row in rows}
    state = make_state(design, views, weights, {} if scaling is None else scaling.tensors, gradients)
    state.weights, state.plain_weights = (lora.with_adapters(state, each) for each in (state.weights, state.plain_weights))
    return state, scaling


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


def training_operations(state: TrainingState, *, masked: bool) -> Any:
    """The operations for the model's forward and backward. `masked`: some tokens are not trained."""
    design = state.design
    ops = documents.operations(frozen_operations(state), state.activations, masked=masked)
    if design.lora is not None:
        return adapter_operations(state, ops)
    if not design.dropout:
        return ops
    tensors = state.weights, state.weight_gradients, state.activations, state.activation_gradients
    return WithDropout(ops, *tensors, samples=state.views[SAMPLE_NUMBERS], probability=design.dropout, seed=design.seed)


def frozen_operations(state: TrainingState) -> Any:
    """The run's operations, with GEMMs that read fp8 for weights that exist only in fp8."""
    if not (design := state.design).fp8_only:
        return design.ops
    return with_lora.WithFp8FrozenProducts(design.plain_ops, design.ops, state.views[with_lora.DEQUANT_SCRATCH])


def adapter_operations(state: TrainingState, ops: Any) -> Any:
    return (with_lora.WithFp8Adapters if state.design.fp8_only else lora.WithAdapters)(ops, state.views)


def evaluation_operations(state: TrainingState) -> tuple[Any, Any]:
    """(operations for validation, which read `state.weights`; operations for sampling and tasks, which read
    `state.plain_weights`). `mean_loss` adds documents and masked targets."""
    if (design := state.design).lora is None:
        return design.ops, design.plain_ops
    validation = adapter_operations(state, frozen_operations(state))
    if not design.fp8_only:
        return validation, validation
    plain_ops: Any = with_lora.WithDequantizedWeights(design.plain_ops, state.views[with_lora.DEQUANT_SCRATCH])
    return validation, lora.WithAdapters(plain_ops, state.views)


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
    """Builds the step over a state: the plain program plus the launches of its joins. `feed`: replaces the feed that reads
    `source`. `graphs`: capture CUDA graphs, by default if the backend can. `trained_tokens`: for a source with tokens that
    are not trained."""
    design, ranks = state.design, ranks or Ranks()
    batch, guards = design.batch, design.guards
    devices.keep_freed_memory(design.device)
    devices.set_arithmetic(design.device, design.precision)
    if graphs is None:
        graphs = design.device.type == "cuda" and design.ops.BACKEND.capturable
    if feed is None:
        assert source is not None
        more = {name: state.views[name] for name in (SAMPLE_NUMBERS, *OF_ANSWERS, "positions") if name in state.views}
        feed = BatchFeed(source, state.activations, more)

    model_ops = training_operations(state, masked=trained_tokens is not None or design.preference is not None)
    if design.teacher is not None:
        model_ops = distill.WithTeacher(model_ops, state)
    if design.preference is not None:
        program = preference.program(state, design.ops, model_ops, design.preference)
    elif design.policy is not None:
        program = policy.program(state, design.ops, model_ops, design.policy, source)
    else:
        program = plain_program(state, design.ops, model_ops)
    if design.teacher is not None:
        program = model_ops.launches(program)
    sync = GradientSync(state, ranks) if design.sharding.lanes > 1 else None
    replicas = Replicas(state, ranks, guards.replicas_every) if sync is not None and ranks.size > 1 else None
    digest = StateDigest(state, ranks, guards.audit_every, graphs=graphs) if guards.audit_every else None
    if trained_tokens is not None and design.preference is None:
        count = trained_tokens
        program = replace(program, trained_tokens=lambda step: count(batch.first_sample(step), batch.samples(step)))
    if design.host_plan.buffers:
        program = offload.launches(program, state)
    if design.lora is not None:
        program = lora.launches(program, {bucket.name for bucket in design.buckets})
    if replicas is not None:
        program = replicas.launches(program)
    if sync is not None:
        program = sync.launches(program)
    if scaling is not None:
        program = fp8.launches(program, state, scaling, feed, sync, model_ops, graphs=graphs)
    if digest is not None:
        program = digest.launches(program)

    if sync is None:
        stepper = TrainStep(state, feed, program, graphs=graphs)
    else:
        stepper = ParallelStep(state, feed, program, ranks, sync, replicas, graphs=graphs)
    assembly = Assembly(design, state, feed, stepper, scaling, sync, model_ops, *evaluation_operations(state), digest)
    assembly.await_state()  # compiling ahead launched copies of it; afterwards the host may write it
    return assembly
