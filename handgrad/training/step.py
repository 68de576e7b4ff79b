"""One optimizer step: micro-batches, their gradients, the verdict on them, AdamW.

The device does all of it without asking the host. What the host decides for a step (learning rate, limits) goes to the
device ahead of it, what the step found out comes back behind it, and in between the host may launch the next step's
micro-batches. On a CUDA GPU with the kernels backend, micro-step and update are recorded as CUDA graphs after their
first run.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from handgrad.config import RunConfig
from handgrad.fp8.formats import REPORT_PLACES
from handgrad.fp8.monitor import Watched, watched
from handgrad.graphs import Replayed, ReplayedStages
from handgrad.models import transformer
from handgrad.models.activations import Activations
from handgrad.models.parameters import BLOCK_ELEMENTS
from handgrad.models.transformer import Pause
from handgrad.ops import CONTROLS, LOSS_NOT_FINITE, LOSS_OUTLIER, NORM_NOT_FINITE, NORM_OUTLIER, RESULTS, UPDATE
from handgrad.parallel.buckets import UpdateRun, norm_segments, update_runs
from handgrad.parallel.gradient_sync import Reduction
from handgrad.parallel.ranks import Ranks
from handgrad.training.schedule import learning_rate
from handgrad.training.spikes import Outliers
from handgrad.training.state import TrainingState, with_dropout

IN_FLIGHT = 2  # steps whose results are not yet read, at most


@dataclass(frozen=True)
class StepResult:
    """What one step was. `skipped` says why no update was made, or is None."""

    loss: float  # mean over the step's tokens, nats
    norm: float  # of the whole gradient, before clipping
    learning_rate: float
    loss_z: float | None
    norm_z: float | None
    skipped: str | None
    loss_scale: float = 1.0  # of fp16's dynamic loss scaling
    elapsed_seconds: float = field(default=0.0, compare=False)  # from its first micro-batch to its update
    compute_seconds: float = field(default=0.0, compare=False)  # of them, this rank's own work on micro-batches
    quantized: tuple[Watched, ...] = ()  # what an fp8 step found out about its quantised tensors


class Feed(Protocol):
    """What puts micro-batches into the model's buffers: `BatchFeed`, or a benchmark's own."""

    def fill(self, first_sample: int) -> None: ...


class Stepper:
    """Makes the steps of a run: `begin`, `finish` and `result`, in this order for each; `begin` of the next step may come
    before `result` of the last."""

    def __init__(
        self,
        config: RunConfig,
        state: TrainingState,
        feed: Feed,
        ranks: Ranks | None = None,
        *,
        graphs: bool | None = None,
    ):
        """`graphs`: record CUDA graphs (default: where the device and the backend can)."""
        self.config, self.state, self.feed = config, state, feed
        self.ranks = Ranks() if ranks is None else ranks
        self.reduction = Reduction(config, state, self.ranks)
        self.losses, self.norms = Outliers(), Outliers()
        cuda = state.device.type == "cuda"
        graphs = cuda and state.ops.CAPTURABLE if graphs is None else graphs
        calibration = [] if state.scaling is None else [self.launch_calibration]
        launches = (self.launch_micro_step, self.launch_norms, self.launch_update, self.launch_requantizing)
        state.ops.compile_ahead(*launches, self.reduction.launch_sums, *calibration)
        replayed = Replayed if graphs else lambda launch: launch
        self.micro_step = replayed(self.launch_micro_step)
        kinds = ((True, False), (False, True), (True, True)) if self.ranks.size > 1 else ()
        self.staged = {kind: ReplayedStages(self.stages, partial(concerns, *kind), graphs=graphs) for kind in kinds}
        self.take_norms, self.update = replayed(self.launch_norms), replayed(self.launch_update)
        self.requantize = replayed(self.launch_requantizing)
        dtype = state.controls.dtype
        self.controls = [torch.zeros(CONTROLS, dtype=dtype, pin_memory=cuda) for _ in range(IN_FLIGHT)]
        self.results = [torch.zeros(RESULTS, dtype=dtype, pin_memory=cuda) for _ in range(IN_FLIGHT)]
        events = range(IN_FLIGHT if cuda else 0)
        self.begun, self.done, self.computing, self.computed = (
            [torch.cuda.Event(enable_timing=True) for _ in events] for _ in range(4)
        )
        report = 0 if state.scaling is None else len(state.scaling.table)
        self.reports = [torch.zeros(report, REPORT_PLACES, dtype=torch.float64, pin_memory=cuda) for _ in range(IN_FLIGHT)]
        self.clock = [0.0] * IN_FLIGHT  # where the host makes the steps itself: their beginning, then their length
        self.compute_clock = [0.0] * IN_FLIGHT  # the same of its own work

    def step(self, step: int) -> StepResult:
        """The whole of 0-based `step`, waiting for its result."""
        self.begin(step)
        self.finish(step)
        return self.result(step)

    def begin(self, step: int) -> None:
        """Launches the micro-batches of `step`: samples `step * samples_per_step` onwards, whatever happened before."""
        slot = step % IN_FLIGHT
        self.clock[slot] = time.perf_counter()
        if self.begun:
            self.begun[slot].record()
        self.calibrate(step)
        self.reduction.await_weights(self.state.buckets[0].name)
        self.clock_compute(slot, begins=True)
        for lane in range(self.reduction.lanes):
            self.run_lane(step, lane)
        self.clock_compute(slot, begins=False)
        self.reduction.all_received()

    def run_lane(self, step: int, lane: int) -> None:
        """The micro-batches of one of this rank's lanes, from zeroed sums."""
        state, lanes, micro_steps = self.state, self.reduction.lanes, self.config.micro_steps
        place = self.ranks.rank * lanes + lane
        first = self.first_sample(step) + place * micro_steps * self.config.micro_batch
        state.gradients.zero_()
        state.sum_of_losses.zero_()
        for micro_step in range(micro_steps):
            self.feed.fill(first + micro_step * self.config.micro_batch)
            opens, closes = lane == micro_step == 0, lane == lanes - 1 and micro_step == micro_steps - 1
            self.staged.get((opens, closes), self.micro_step_alone)(self.pause)
        state.lane_losses[place].copy_(state.sum_of_losses[0])
        last = lane == lanes - 1
        if not last or self.ranks.size == 1:
            self.reduction.stack_lane(lane, slice(None), last=last)

    def micro_step_alone(self, pause: Callable[[Pause], None]) -> None:
        """A micro-step that has nothing to do with other ranks."""
        self.micro_step()

    def pause(self, pause: Pause) -> None:
        """Between two stages: a step's first micro-step has to wait for weights, its last sends gradients."""
        if pause.gradients_are_done:
            self.reduction.on_its_way(pause)
        else:
            self.reduction.await_weights(pause.bucket)

    def clock_compute(self, slot: int, *, begins: bool) -> None:
        """Notes when this rank's own work begins or ends; what a CPU waited for others in between does not count."""
        if self.done:
            (self.computing if begins else self.computed)[slot].record()
            return
        own = time.perf_counter() - self.ranks.waited_seconds
        self.compute_clock[slot] = own if begins else own - self.compute_clock[slot]

    def first_sample(self, step: int) -> int:
        return 0 if self.config.overfit_one_batch else step * self.config.samples_per_step

    def calibrate(self, step: int) -> None:
        """Gives an fp8 run its first scales, unless it has some: from its weights and the first micro-batch of `step`."""
        scaling = self.state.scaling
        if scaling is not None and not scaling.calibrated:
            self.feed.fill(self.first_sample(step))
            scaling.count(self.counts(step))
            self.launch_calibration()
            scaling.calibrated = True

    def counts(self, step: int) -> bool:
        """Whether an fp8 step counts the numbers that were clipped or vanished."""
        return (step + 1) % self.config.fp8_count_every == 0

    def finish(self, step: int) -> None:
        """Launches the update of `step`. The spike limits follow from the results before it, so they are read by now."""
        config, slot = self.config, step % IN_FLIGHT
        controls = [
            step + 1,
            learning_rate(config, step),
            self.losses.limit(config.skip_loss_z),
            self.norms.limit(config.skip_norm_z),
        ]
        self.controls[slot].copy_(torch.tensor(controls, dtype=self.controls[slot].dtype))
        self.state.controls.copy_(self.controls[slot], non_blocking=True)
        self.take_norms()
        if self.ranks.size > 1:
            self.reduction.collect_sums()
        self.update()
        self.reduction.publish()
        if self.state.scaling is not None:
            self.reduction.await_all_weights()
            self.requantize()
        self.results[slot].copy_(self.state.results, non_blocking=bool(self.done))
        if self.state.scaling is not None:
            self.reports[slot].copy_(self.state.scaling.report, non_blocking=bool(self.done))
        if self.done:
            self.done[slot].record()
        else:
            self.clock[slot] = time.perf_counter() - self.clock[slot]

    def result(self, step: int) -> StepResult:
        """Waits for `step` and takes its loss and norm into the windows, unless it was skipped."""
        slot = step % IN_FLIGHT
        elapsed_seconds, compute_seconds = self.clock[slot], self.compute_clock[slot]
        if self.done:
            with self.ranks.waiting("the result of the step"):
                self.done[slot].synchronize()
            elapsed_seconds = self.begun[slot].elapsed_time(self.done[slot]) / 1e3
            compute_seconds = self.computing[slot].elapsed_time(self.computed[slot]) / 1e3
        loss, norm, _, code, loss_scale = self.results[slot].tolist()
        loss_z, norm_z = self.losses.z_score(loss), self.norms.z_score(norm)
        reasons = {
            LOSS_NOT_FINITE: f"loss is {loss}",
            NORM_NOT_FINITE: f"gradient norm is {norm}",
            LOSS_OUTLIER: f"loss z-score {loss_z or 0:.1f} > {self.config.skip_loss_z:g}",
            NORM_OUTLIER: f"norm z-score {norm_z or 0:.1f} > {self.config.skip_norm_z:g}",
        }
        if code == UPDATE:
            self.losses.add(loss)
            self.norms.add(norm)
        rate, skipped = learning_rate(self.config, step), reasons.get(int(code))
        found: tuple[Watched, ...] = ()
        if self.state.scaling is not None:
            micro_steps = self.config.samples_per_step // self.config.micro_batch
            found = watched(self.state.scaling, self.reports[slot], micro_steps, counted=self.counts(step))
        times = {"elapsed_seconds": elapsed_seconds, "compute_seconds": compute_seconds}
        return StepResult(loss, norm, rate, loss_z, norm_z, skipped, loss_scale, **times, quantized=found)

    def launch_micro_step(self) -> None:
        for _ in self.stages():
            pass

    def stages(self) -> Iterator[Pause]:
        """One micro-batch: its gradients, its losses, what fp8 found out."""
        yield from self.gradient_stages(self.state.activations)
        self.state.ops.loss_sum(self.state.sum_of_losses, self.state.activations.losses)
        if self.state.scaling is not None:
            self.state.scaling.fold_micro_step(self.state.ops)

    def gradient_stages(self, act: Activations) -> Iterator[Pause]:
        state, config = self.state, self.config
        return transformer.gradient_stages(
            with_dropout(state.ops, state.weights, state.weight_gradients, act, config.dropout, config.seed),
            state.weights,
            state.weight_gradients,
            act,
            state.loss_scale[:1],
            vocab_size=state.shape.vocab_size,
            recompute=self.config.recompute,
        )

    def launch_calibration(self) -> None:
        """The first scales of an fp8 run: of its weights, and of one micro-batch whose gradients nobody takes."""
        scaling = self.state.scaling
        assert scaling is not None
        scaling.quantize_weights(self.state.ops, calibrate=True)
        for _ in self.gradient_stages(scaling.calibrating_activations):
            pass
        scaling.statistics[: scaling.first_weight].zero_()  # whose parts may be other kernels' than a step's

    def launch_norms(self) -> None:
        """The sums of squares of what this rank owns, in blocks of fixed size. Frozen parameters' gradients become zeros
        first, so that the blocks stay where they are however many ranks there are."""
        state, place = self.state, self.state.sharer
        for run in self.update_runs(frozen=True):
            state.reduced(run).zero_()
        share = state.norm_partials.view(state.sharers, -1)[place]
        for segment in norm_segments(state.buckets, state.lane_losses.numel(), place, state.sharers):
            partials = share[segment.partials]
            state.ops.squared_norms(partials, state.reduced(segment), block_elements=BLOCK_ELEMENTS)

    def update_runs(self, *, frozen: bool) -> list[UpdateRun]:
        """What this rank owns of the flat buffers and does not update, or does."""
        state = self.state
        runs = update_runs(state.table, state.buckets, state.sharer, state.sharers)
        return [run for run in runs if run.frozen == frozen]

    def launch_update(self) -> None:
        """The verdict, and AdamW on what this rank owns of the flat buffers, one call per run of equal decay."""
        state, config = self.state, self.config
        state.ops.verdict(
            state.results,
            state.loss_scale,
            state.lane_losses,
            state.norm_partials,
            state.controls,
            tokens_per_step=config.tokens_per_step,
            clip_norm=config.clip_norm,
            dynamic_loss_scale=config.precision == "fp16",
        )
        for run in self.update_runs(frozen=False):
            parameters = state.parameters[run.flat]
            state.ops.adamw_update(
                parameters,
                parameters if state.master is state.parameters else state.master[run.local],
                state.first_moments[run.local],
                state.second_moments[run.local],
                state.reduced(run),
                state.controls,
                state.results,
                beta1=config.beta1,
                beta2=config.beta2,
                epsilon=config.adam_epsilon,
                weight_decay=config.weight_decay if run.decays else 0.0,
                seed=config.seed,
                first_element=run.flat.start,
            )
        if state.scaling is not None:
            state.scaling.update(state.ops, state.controls, config)

    def launch_requantizing(self) -> None:
        """The new weights in fp8, at their new scales."""
        if self.state.scaling is not None:
            self.state.scaling.quantize_weights(self.state.ops)


def concerns(opens: bool, closes: bool, pause: Pause) -> bool:
    """Whether other ranks have to do with a pause of a step's first micro-step (`opens`) or of its last (`closes`)."""
    return closes if pause.gradients_are_done else opens


def non_finite_tensors(state: TrainingState) -> list[str]:
    """Names of the parameters in blocks of the gradient that hold a NaN or an infinity, for the message about a skipped
    step. The blocks' sums are the last update's; the gradients themselves may be the next step's already."""
    sums = state.norm_partials.cpu()
    odd: list[tuple[int, int]] = []
    for segment in norm_segments(state.buckets, state.lane_losses.numel(), 0, 1):
        for block in (~torch.isfinite(sums[segment.partials])).nonzero().flatten().tolist():
            start = segment.flat.start + block * BLOCK_ELEMENTS
            odd.append((start, min(start + BLOCK_ELEMENTS, segment.flat.stop)))
    rows = [row for row in state.table if not row.frozen]
    return [row.name for row in rows if any(row.offset < b and row.offset + row.elements > a for a, b in odd)]
