"""One optimizer step: micro-batches, their gradients, the verdict on them, the update.

The device makes a step without asking the host. The host's decisions (learning rate, limits) go to the device ahead of it,
its findings come back behind it, and in between the host may launch the next step's micro-batches. On a CUDA GPU with the
kernels backend, launches run once eagerly, then are captured as CUDA graphs, then replayed.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from handgrad.machine.graphs import Replayed
from handgrad.memory.rows import BLOCK_ELEMENTS
from handgrad.models.passes import Stage
from handgrad.ops import CONTROLS, LOSS_NOT_FINITE, LOSS_OUTLIER, NORM_NOT_FINITE, NORM_OUTLIER, RESULTS, UPDATE
from handgrad.training.design import Guards
from handgrad.training.state import OPTIMIZER_SCRATCH, TrainingState

WINDOW = 128  # steps that a loss or a norm is compared with
IN_FLIGHT = 2  # steps whose results are not yet read, at most
NOTHING_TRAINED = "none of its tokens is trained"  # why a step makes no update


@dataclass(frozen=True)
class StepResult:
    """One step's findings. `skipped` says why no update was made, or is None."""

    loss: float  # mean over the step's trained tokens, nats
    norm: float  # of the whole gradient, before clipping
    learning_rate: float
    loss_z: float | None
    norm_z: float | None
    skipped: str | None
    loss_scale: float = 1.0  # of fp16's dynamic loss scaling
    elapsed_seconds: float = field(default=0.0, compare=False)  # from its first micro-batch to its update
    reports: dict[str, Tensor] = field(default_factory=dict, compare=False)  # further findings by name, on the host
    trained_tokens: int | None = field(default=None, compare=False)  # the tokens that its loss is the mean of


class Feed(Protocol):
    """Puts micro-batches into the model's buffers: `BatchFeed`, or a benchmark's own."""

    def fill(self, first_sample: int) -> None: ...


@dataclass
class Program:
    """The launches of a step, in their order. Packages beside the plain path add theirs before the step is made."""

    micro_step: list[Stage]
    norms: list[Callable[[], object]]
    update: list[Callable[[], object]]
    trained_tokens: Callable[[int], int]  # of a step's number: the divisor of its means
    before_step: list[Callable[[int], None]] = field(default_factory=list)  # of a step's number
    before_update: list[Callable[[], None]] = field(default_factory=list)  # between norms and update; eager
    after_update: list[Callable[[], None]] = field(default_factory=list)  # eager
    compiled_ahead: list[Callable[[], None]] = field(default_factory=list)  # launches beside those above
    reports: dict[str, Tensor] = field(default_factory=dict)  # device tensors that travel with a step's results
    rolled_back: list[Tensor] = field(default_factory=list)  # change even in a step without an update; see `relaunch`
    after_rollback: list[Callable[[], None]] = field(default_factory=list)  # remake what follows from these; eager

    def adding(self, *, reports: Mapping[str, Tensor] | None = None, **launches: list[Any]) -> "Program":
        """The program with these at the ends of its lists, by name."""
        longer: dict[str, Any] = {name: [*getattr(self, name), *more] for name, more in launches.items()}
        return replace(self, reports={**self.reports, **(reports or {})}, **longer)


def plain_program(state: TrainingState, ops: Any, model_ops: Any) -> Program:
    """Forward and backward of a micro-batch with `model_ops`, then norm, verdict and optimizer with `ops`."""
    design = state.design
    model, act, d, w = design.model, state.activations, state.activation_gradients, state.weights
    tensors = w, state.weight_gradients, act, d, state.loss_scale[:1]
    passes = [
        *model.forward(model_ops, w, act, design.shape),
        *model.backward(model_ops, *tensors, design.shape, recompute=design.recompute),
    ]
    losses = Stage("", partial(ops.loss_sum, state.sum_of_losses, act.losses))
    verdict = partial(
        ops.verdict,
        state.results,
        state.loss_scale,
        state.losses_of_step,
        state.norm_partials,
        state.controls,
        gradient_tokens=design.batch.gradient_tokens,
        clip_norm=design.guards.clip_norm,
        dynamic_loss_scale=design.guards.loss_scaling,
    )
    norms = [partial(ops.squared_norms, sums, part, block_elements=BLOCK_ELEMENTS) for sums, part in state.norms]
    # Frozen parameters' gradients become zeros first: the norm's blocks stay where they are.
    frozen = [gradient.zero_ for gradient in state.frozen]
    scratch = state.views.get(OPTIMIZER_SCRATCH)
    update = partial(design.optimizer.update, ops, state.owned, state.controls, state.results, scratch)
    rolled_back = [state.loss_scale] if design.guards.loss_scaling else []
    return Program([*passes, losses], [*frozen, *norms], [verdict, update], design.batch.tokens, rolled_back=rolled_back)


@dataclass
class StepSlot:
    """The host's side of one step in flight."""

    controls: Tensor  # to the device; pinned for a GPU, as are the three that come back
    results: Tensor
    losses: Tensor  # of `TrainingState.losses_of_step`
    reports: dict[str, Tensor]
    snapshots: list[Tensor]  # of `Program.rolled_back` before the step, on the device
    start: torch.cuda.Event | None  # None on a CPU
    end: torch.cuda.Event | None
    start_seconds: float = 0.0  # on a CPU
    elapsed_seconds: float = 0.0
    trained_tokens: int = 0
    learning_rate: float = 0.0


def make_slot(state: TrainingState, program: Program) -> StepSlot:
    on_gpu, dtype = state.design.device.type == "cuda", state.controls.dtype
    return StepSlot(
        controls=torch.zeros(CONTROLS, dtype=dtype, pin_memory=on_gpu),
        results=torch.zeros(RESULTS, dtype=dtype, pin_memory=on_gpu),
        losses=torch.zeros_like(state.losses_of_step, device="cpu", pin_memory=on_gpu),
        reports={n: torch.zeros_like(t, device="cpu", pin_memory=on_gpu) for n, t in program.reports.items()},
        snapshots=[torch.empty_like(tensor) for tensor in program.rolled_back],
        start=torch.cuda.Event(enable_timing=True) if on_gpu else None,
        end=torch.cuda.Event(enable_timing=True) if on_gpu else None,
    )


def skip_reason(
    code: float, guards: Guards, tokens: int, loss: float, norm: float, loss_z: float | None, norm_z: float | None
) -> str:
    """Why a step of so many trained tokens with this verdict makes no update."""
    if not tokens:
        return NOTHING_TRAINED
    reasons = {
        LOSS_NOT_FINITE: f"loss is {loss}",
        NORM_NOT_FINITE: f"gradient norm is {norm}",
        LOSS_OUTLIER: f"loss z-score {loss_z or 0:.1f} > {guards.loss_z:g}",
        NORM_OUTLIER: f"norm z-score {norm_z or 0:.1f} > {guards.norm_z:g}",
    }
    return reasons[int(code)]


class SpikeWindow:
    """The last values of one series, to find spikes. Its state is the window, which travels with the checkpoint."""

    def __init__(self, values: Iterable[float] = ()):
        self.values = deque(values, maxlen=WINDOW)

    def z_score(self, value: float) -> float | None:
        """(value - mean) / deviation of the window *before* this value; None until the window is full.

        Judged against a window that contains it, a value can never exceed sqrt(127) = 11.3 deviations, and a second spike
        in a row hides behind the first.
        """
        if len(self.values) < WINDOW or not math.isfinite(value):
            return None
        mean, deviation = self.statistics()
        if deviation == 0:
            return 0.0 if value == mean else math.copysign(math.inf, value - mean)
        return (value - mean) / deviation

    def limit(self, z: float) -> float:
        """The value above which a z-score exceeds `z`: infinite while the window is not full, or where `z` is 0."""
        if not z or len(self.values) < WINDOW:
            return math.inf
        mean, deviation = self.statistics()
        return mean + z * deviation

    def statistics(self) -> tuple[float, float]:
        """Mean and standard deviation of a full window."""
        mean = math.fsum(self.values) / WINDOW
        return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in self.values) / WINDOW)

    def add(self, value: float) -> None:
        """Takes a value into the window. Non-finite ones stay out: they would blind the detector for 128 steps."""
        if math.isfinite(value):
            self.values.append(value)


class TrainStep:
    """Makes the steps of a run: `begin`, `finish` and `result`, in this order for each; `begin` of the next step may come
    before `result` of the last.

    A step that has made no update has changed nothing but `Program.rolled_back`. So `relaunch` can compute its gradients
    once more from the state before it; `launch_norm` and `launch_update` follow, the halves of `finish`."""

    def __init__(self, state: TrainingState, feed: Feed, program: Program, *, graphs: bool):
        """`graphs`: capture CUDA graphs."""
        self.design, self.state, self.feed, self.program, self.graphs = state.design, state, feed, program, graphs
        self.loss_window, self.norm_window = SpikeWindow(), SpikeWindow()
        stages = [stage.run for stage in program.micro_step]
        self.design.ops.compile_ahead(*stages, *program.norms, *program.update, *program.compiled_ahead)
        self.micro_step, self.norms, self.update = (
            Replayed(launches) if graphs else launches for launches in (stages, program.norms, program.update)
        )
        self.slots = [make_slot(state, program) for _ in range(IN_FLIGHT)]
        self.last_begun = -1

    def slot(self, step: int) -> StepSlot:
        return self.slots[step % IN_FLIGHT]

    def step(self, step: int) -> StepResult:
        """The whole of 0-based `step`, waiting for its result."""
        self.begin(step)
        self.finish(step)
        return self.result(step)

    def begin(self, step: int) -> None:
        """Launches the micro-batches of `step`: which samples they are follows from `step` alone."""
        slot, self.last_begun = self.slot(step), step
        slot.start_seconds = time.perf_counter()
        if slot.start is not None:
            slot.start.record()
        self.run_before_step(step)
        for snapshot, tensor in zip(slot.snapshots, self.program.rolled_back, strict=True):
            snapshot.copy_(tensor)
        self.accumulate_gradients(step)

    def relaunch(self, step: int) -> None:
        """Launches the micro-batches of `step` once more, a step without an update whose result was read last. The
        gradients of the step behind it are lost."""
        for snapshot, tensor in zip(self.slot(step).snapshots, self.program.rolled_back, strict=True):
            tensor.copy_(snapshot)
        for remake in self.program.after_rollback:
            remake()
        self.run_before_step(step)
        self.accumulate_gradients(step)

    def run_before_step(self, step: int) -> None:
        for call in self.program.before_step:
            call(step)

    def accumulate_gradients(self, step: int) -> None:
        """The gradients of the step's micro-batches, summed from zero, and their losses."""
        state, batch = self.state, self.design.batch
        first = batch.first_sample(step)
        state.gradients.zero_()
        state.sum_of_losses.zero_()
        for micro_step in range(batch.micro_steps(step)):
            self.feed.fill(first + micro_step * batch.micro_batch)
            for launch in self.micro_step:
                launch()
        state.losses_of_step.copy_(state.sum_of_losses)

    def finish(self, step: int) -> None:
        """Launches the update of `step`."""
        self.launch_norm(step)
        self.launch_update(step)

    def launch_norm(self, step: int) -> None:
        """Sends the host's decisions, then launches the norm. The spike limits follow from the results before `step`: those
        are read by now."""
        guards, slot = self.design.guards, self.slot(step)
        limits = self.loss_window.limit(guards.loss_z), self.norm_window.limit(guards.norm_z)
        tokens = slot.trained_tokens = self.program.trained_tokens(step)
        if not tokens:
            limits, tokens = (-math.inf, math.inf), 1  # the mean of nothing is 0, above the limit: no update
        slot.learning_rate = self.design.schedule.rate(step)
        controls = [step + 1, slot.learning_rate, *limits, tokens]
        slot.controls.copy_(torch.tensor(controls, dtype=slot.controls.dtype))
        self.state.controls.copy_(slot.controls, non_blocking=True)
        for launch in (*self.norms, *self.program.before_update):
            launch()

    def launch_update(self, step: int) -> None:
        """Launches verdict and update, and the results' way back."""
        slot = self.slot(step)
        for launch in (*self.update, *self.program.after_update):
            launch()
        on_host = slot.results, slot.losses, *slot.reports.values()
        on_device = self.state.results, self.state.losses_of_step, *self.program.reports.values()
        for host, device in zip(on_host, on_device, strict=True):
            host.copy_(device, non_blocking=slot.end is not None)
        if slot.end is not None:
            slot.end.record()
        slot.elapsed_seconds = time.perf_counter() - slot.start_seconds

    def result(self, step: int) -> StepResult:
        """Waits for `step` and takes its loss and norm into the windows, unless it was skipped."""
        slot, guards = self.slot(step), self.design.guards
        if slot.start is not None and slot.end is not None:
            slot.end.synchronize()
            slot.elapsed_seconds = slot.start.elapsed_time(slot.end) / 1e3
        loss, norm, _, code, loss_scale = slot.results.tolist()
        loss_z, norm_z = self.loss_window.z_score(loss), self.norm_window.z_score(norm)
        if code == UPDATE:
            self.loss_window.add(loss)
            self.norm_window.add(norm)
        skipped = None if code == UPDATE else skip_reason(code, guards, slot.trained_tokens, loss, norm, loss_z, norm_z)
        numbers = loss, norm, slot.learning_rate, loss_z, norm_z, skipped, loss_scale, slot.elapsed_seconds
        return StepResult(*numbers, slot.reports, slot.trained_tokens)

    def raise_norm_limit(self, norm: float) -> None:
        """After a step that was skipped for good: a norm beyond the limit enters its window as the limit. So norms that
        rise for good are soon no spikes, and a single large one hides no other."""
        limit = self.norm_window.limit(self.design.guards.norm_z)
        if limit < norm < math.inf:
            self.norm_window.add(limit)
