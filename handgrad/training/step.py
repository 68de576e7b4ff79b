"""One optimizer step: micro-batches, their gradients, the verdict on them, the update.

The device never waits for the host within a step. The host sends its decisions (learning rate, limits) before the step and
reads the results after it; meanwhile it can launch the next step's micro-batches. On a CUDA GPU with the kernels backend,
launches run once eagerly, are then captured as CUDA graphs, and replayed from there on.
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

WINDOW = 128  # steps in the window of the spike detector
IN_FLIGHT = 2  # most steps launched whose results the host has not read
NOTHING_TRAINED = "none of its tokens is trained"  # reason for a skipped update


@dataclass(frozen=True)
class StepResult:
    """One step's results. `skipped`: the reason why the step made no update, else None."""

    loss: float  # mean over the step's trained tokens, nats
    norm: float  # of the whole gradient, before clipping
    learning_rate: float
    loss_z: float | None
    norm_z: float | None
    skipped: str | None
    loss_scale: float = 1.0  # of fp16's dynamic loss scaling
    elapsed_seconds: float = field(default=0.0, compare=False)  # from its first micro-batch to its update
    reports: dict[str, Tensor] = field(default_factory=dict, compare=False)  # further results by name, on the host
    trained_tokens: int | None = field(default=None, compare=False)  # tokens in the mean loss


class Feed(Protocol):
    """Fills the model's buffers with micro-batches: `BatchFeed`, or a benchmark's own class."""

    def fill(self, first_sample: int) -> None: ...


@dataclass
class Program:
    """The launches of a step, in order. The joins add theirs before `TrainStep` is built."""

    micro_step: list[Stage]
    norms: list[Callable[[], object]]
    update: list[Callable[[], object]]
    trained_tokens: Callable[[int], int]  # step number -> divisor of its means
    has_gradient: Callable[[int], bool] = lambda _: True  # a micro-batch's first sample -> whether it is worth a pass
    losses_alone: list[Callable[[], object]] = field(default_factory=list)  # the launches of one without a gradient; eager
    before_step: list[Callable[[int], None]] = field(default_factory=list)  # called with the step number
    before_update: list[Callable[[], None]] = field(default_factory=list)  # between norms and update; eager
    after_update: list[Callable[[], None]] = field(default_factory=list)  # eager
    compiled_ahead: list[Callable[[], None]] = field(default_factory=list)  # further launches to compile
    reports: dict[str, Tensor] = field(default_factory=dict)  # device tensors to copy back with the results
    rolled_back: list[Tensor] = field(default_factory=list)  # change even in a step without an update; see `relaunch`
    after_rollback: list[Callable[[], None]] = field(default_factory=list)  # recompute what `rolled_back` determines; eager

    def adding(self, *, reports: Mapping[str, Tensor] | None = None, **launches: list[Any]) -> "Program":
        """A copy of the program with `launches` appended to its lists, by name, and `reports` added."""
        longer: dict[str, Any] = {name: [*getattr(self, name), *more] for name, more in launches.items()}
        return replace(self, reports={**self.reports, **(reports or {})}, **longer)


def plain_program(state: TrainingState, ops: Any, model_ops: Any, pairs: tuple[Tensor, Tensor] | None = None) -> Program:
    """Forward and backward with `model_ops`, then norm, verdict and optimizer with `ops`. `pairs`: (weights, losses)."""
    design = state.design
    model, act, d, w = design.model, state.activations, state.activation_gradients, state.weights
    scale, losses = pairs or (state.loss_scale[:1], act.losses)
    passes = [
        *model.forward(model_ops, w, act, design.shape),
        *model.backward(model_ops, w, state.weight_gradients, act, d, scale, design.shape, recompute=design.recompute),
        Stage("", partial(ops.loss_sum, state.sum_of_losses, losses)),
    ]
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
    # Zero the gradients of frozen parameters instead of skipping them: the norm keeps its block layout.
    frozen = [gradient.zero_ for gradient in state.frozen]
    scratch = state.views.get(OPTIMIZER_SCRATCH)
    update = partial(design.optimizer.update, ops, state.owned, state.controls, state.results, scratch)
    rolled_back = [state.loss_scale] if design.guards.loss_scaling else []
    return Program(passes, [*frozen, *norms], [verdict, update], design.batch.tokens, rolled_back=rolled_back)


@dataclass
class StepSlot:
    """The host's side of one step in flight."""

    controls: Tensor  # sent to the device. With a GPU it is pinned, and so are the three tensors read back
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
    """The reason why a step with verdict `code` and this many trained `tokens` makes no update."""
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
    """Detects spikes in a series from its last values. Checkpoints save the window, its only state."""

    def __init__(self, values: Iterable[float] = ()):
        self.values = deque(values, maxlen=WINDOW)

    def z_score(self, value: float) -> float | None:
        """(value - mean) / deviation of the window *before* this value; None until the window is full.

        In a window that contains the value itself, its z-score could never exceed sqrt(127) = 11.3, and a spike would hide
        the next one."""
        if len(self.values) < WINDOW or not math.isfinite(value):
            return None
        mean, deviation = self.statistics()
        if deviation == 0:
            return 0.0 if value == mean else math.copysign(math.inf, value - mean)
        return (value - mean) / deviation

    def limit(self, z: float) -> float:
        """The value whose z-score is `z`; infinite until the window is full, or if `z` is 0."""
        if not z or len(self.values) < WINDOW:
            return math.inf
        mean, deviation = self.statistics()
        return mean + z * deviation

    def statistics(self) -> tuple[float, float]:
        """Mean and standard deviation of a full window."""
        mean = math.fsum(self.values) / WINDOW
        return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in self.values) / WINDOW)

    def add(self, value: float) -> None:
        """Adds a value to the window. Ignores non-finite values: one would blind the detector for 128 steps."""
        if math.isfinite(value):
            self.values.append(value)


class TrainStep:
    """Runs training steps: call `begin`, `finish` and `result` for each, in this order. The next step's `begin` may come
    before `result`.

    A skipped step changes nothing but `Program.rolled_back`. So `relaunch` can restore that and recompute the step's
    gradients; `launch_norm` and `launch_update`, the halves of `finish`, follow."""

    def __init__(self, state: TrainingState, feed: Feed, program: Program, *, graphs: bool):
        """`graphs`: capture CUDA graphs."""
        self.design, self.state, self.feed, self.program, self.graphs = state.design, state, feed, program, graphs
        self.loss_window, self.norm_window = SpikeWindow(), SpikeWindow()
        stages = [stage.run for stage in program.micro_step]
        state.results.fill_(math.nan)  # no verdict, so no update: `compile_ahead` runs what is not Triton's
        self.design.ops.compile_ahead(*stages, *program.norms, *program.update, *program.compiled_ahead)
        self.micro_step, self.norms, self.update = (
            Replayed(launches) if graphs else launches for launches in (stages, program.norms, program.update)
        )
        self.slots = [make_slot(state, program) for _ in range(IN_FLIGHT)]
        self.last_begun = -1

    def slot(self, step: int) -> StepSlot:
        return self.slots[step % IN_FLIGHT]

    def step(self, step: int) -> StepResult:
        """Runs 0-based `step` and waits for its result."""
        self.begin(step)
        self.finish(step)
        return self.result(step)

    def begin(self, step: int) -> None:
        """Launches the micro-batches of `step`. The step number alone determines their samples."""
        slot, self.last_begun = self.slot(step), step
        slot.start_seconds = time.perf_counter()
        if slot.start is not None:
            slot.start.record()
        self.run_before_step(step)
        for snapshot, tensor in zip(slot.snapshots, self.program.rolled_back, strict=True):
            snapshot.copy_(tensor)
        self.accumulate_gradients(step)

    def relaunch(self, step: int) -> None:
        """Launches a skipped `step`, the last one read, again. Overwrites the gradients of the step after it."""
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
        """Zeroes the gradients and losses, then accumulates both over the step's micro-batches."""
        state, batch = self.state, self.design.batch
        first = batch.first_sample(step)
        state.gradients.zero_()
        state.sum_of_losses.zero_()
        for first_sample in range(first, first + batch.samples(step), batch.micro_batch):
            self.feed.fill(first_sample)
            for launch in self.micro_step if self.program.has_gradient(first_sample) else self.program.losses_alone:
                launch()
        state.losses_of_step.copy_(state.sum_of_losses)

    def finish(self, step: int) -> None:
        """Launches the update of `step`."""
        self.launch_norm(step)
        self.launch_update(step)

    def launch_norm(self, step: int) -> None:
        """Sends the host's decisions, by all results before `step`, which set the spike limits, and launches the norm."""
        guards, slot = self.design.guards, self.slot(step)
        limits = self.loss_window.limit(guards.loss_z), self.norm_window.limit(guards.norm_z)
        tokens = slot.trained_tokens = self.program.trained_tokens(step)
        if not tokens:
            limits, tokens = (-math.inf, math.inf), 1  # the mean of nothing is 0, above the limit: no update
        slot.learning_rate = self.design.schedule.rate(step)
        slot.controls.copy_(torch.tensor([step + 1, slot.learning_rate, *limits, tokens], dtype=slot.controls.dtype))
        self.state.controls.copy_(slot.controls, non_blocking=True)
        for launch in (*self.norms, *self.program.before_update):
            launch()

    def launch_update(self, step: int) -> None:
        """Launches verdict and update, and copies the results to the host."""
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
        """Waits for `step`. Adds its loss and norm to the windows, unless the step was skipped."""
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
        """Call it after a step that stays skipped. Records an outlier as the limit itself: a lasting rise stops being an
        outlier, and one huge norm does not blind the detector."""
        limit = self.norm_window.limit(self.design.guards.norm_z)
        if limit < norm < math.inf:
            self.norm_window.add(limit)
