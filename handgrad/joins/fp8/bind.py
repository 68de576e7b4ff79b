"""Binds fp8 into a training step: adds its launches to the plain program."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

from handgrad.joins.fp8.scaling import Scaling
from handgrad.joins.lora.bind import with_adapters
from handgrad.joins.parallel.gradient_sync import GradientSync
from handgrad.machine.graphs import Replayed
from handgrad.memory.rows import named
from handgrad.models.passes import Stage
from handgrad.training.state import TrainingState
from handgrad.training.step import Feed, Program

REPORT = "fp8"


def operations(ops: ModuleType) -> ModuleType:
    """`handgrad.joins.fp8.reference` or `handgrad.joins.fp8.cuda`, to match the plain operations `ops`."""
    return import_module(f"handgrad.joins.fp8.{'cuda' if ops.BACKEND.name == 'cuda' else 'reference'}")


def launches(
    program: Program,
    state: TrainingState,
    scaling: Scaling,
    feed: Feed,
    sync: GradientSync | None,
    model_ops: Any,
    *,
    graphs: bool,
) -> Program:
    """Adds to the program: calibration before the first step, statistics of every micro-step, and new scales and fp8
    weights after the update. `model_ops`: operations for forward and backward."""
    design, calibration = state.design, calibration_stages(state, scaling, model_ops)

    def launch_calibration() -> None:
        """Computes the first scales from the weights and one micro-batch. Discards its gradients."""
        scaling.totals[scaling.fp8.first_weight :].zero_()  # of an earlier calibration
        scaling.quantize_weights(calibrate=True)
        for stage in calibration:
            stage.run()

    def calibrate(step: int) -> None:
        if scaling.calibrates(step):
            feed.fill(design.batch.first_sample(step))
            scaling.set_counting(scaling.fp8.counts(step))
            launch_calibration()
            scaling.conclude_calibration(step)

    requantize: Callable[[], None] = Replayed([scaling.quantize_weights]) if graphs else scaling.quantize_weights
    between_ranks = sync is not None and sync.ranks.size > 1
    return program.adding(
        micro_step=[Stage("", scaling.fold_micro_step)],
        update=[partial(scaling.update, state.controls)],
        before_step=[calibrate],
        before_update=[partial(gather_statistics, scaling, sync)] if between_ranks else [],
        after_update=[*([sync.await_all_weights] if sync and between_ranks else []), requantize],
        compiled_ahead=[scaling.quantize_weights, launch_calibration],
        reports={REPORT: scaling.report},
        rolled_back=[scaling.scaling, scaling.history, scaling.totals],
        after_rollback=[scaling.requantize],
    )


def calibration_stages(state: TrainingState, scaling: Scaling, ops: Any) -> list[Stage]:
    """A forward and backward pass in which each tensor sets its own scale."""
    design = state.design
    model, layers = design.model, design.shape.num_layers
    weights = state.named_weights | scaling.calibrating
    views = state.views | scaling.calibrating
    w, act, d = (
        named(kind, held, layers)
        for kind, held in ((model.Weights, weights), (model.Activations, views), (model.Gradients, views))
    )
    w = with_adapters(state, w)
    tensors = w, state.weight_gradients, act, d
    backward = model.backward(ops, *tensors, state.loss_scale[:1], design.shape, recompute=design.recompute)
    return [*model.forward(ops, w, act, design.shape), *backward]


def gather_statistics(scaling: Scaling, sync: GradientSync) -> None:
    """Gathers all ranks' totals and joins them on every rank."""
    own = scaling.totals[: scaling.fp8.first_weight]
    sync.ranks.wait(sync.ranks.all_gather(scaling.everyone, own, "fp8 statistics"), "fp8 statistics")
    scaling.join_ranks()
