"""One optimizer step: micro-batches, their gradients, the verdict on them, AdamW.

The device does all of it without asking the host. What the host decides for a step (learning rate, limits) goes to the
device ahead of it, what the step found out comes back behind it, and in between the host may launch the next step's
micro-batches. On a CUDA GPU with the kernels backend, micro-step and update are recorded as CUDA graphs after their
first run.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from handgrad.config import RunConfig
from handgrad.model import transformer
from handgrad.model.activations import Activations
from handgrad.model.parameters import BLOCK_ELEMENTS, ParameterRow, decay_runs
from handgrad.ops import CONTROLS, LOSS_NOT_FINITE, LOSS_OUTLIER, NORM_NOT_FINITE, NORM_OUTLIER, RESULTS, UPDATE
from handgrad.ops.fp8 import REPORT_PLACES
from handgrad.training.outliers import Outliers
from handgrad.training.schedule import learning_rate
from handgrad.training.state import TrainingState
from handgrad.training.watching import Watched, watched

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
    quantized: tuple[Watched, ...] = ()  # what an fp8 step found out about its quantised tensors


class Feed(Protocol):
    """What puts micro-batches into the model's buffers: `BatchFeed`, or a benchmark's own."""

    def fill(self, first_sample: int) -> None: ...


class Stepper:
    """Makes the steps of a run: `begin`, `finish` and `result`, in this order for each; `begin` of the next step may come
    before `result` of the last."""

    def __init__(self, config: RunConfig, state: TrainingState, feed: Feed, *, graphs: bool | None = None):
        """`graphs`: record CUDA graphs (default: where the device and the backend can)."""
        self.config, self.state, self.feed = config, state, feed
        self.losses, self.norms = Outliers(), Outliers()
        cuda = state.device.type == "cuda"
        graphs = cuda and state.ops.CAPTURABLE if graphs is None else graphs
        calibration = [] if state.scaling is None else [self.launch_calibration]
        state.ops.compile_ahead(self.launch_micro_step, self.launch_update, *calibration)
        self.micro_step = Replayed(self.launch_micro_step) if graphs else self.launch_micro_step
        self.update = Replayed(self.launch_update) if graphs else self.launch_update
        dtype = state.controls.dtype
        self.controls = [torch.zeros(CONTROLS, dtype=dtype, pin_memory=cuda) for _ in range(IN_FLIGHT)]
        self.results = [torch.zeros(RESULTS, dtype=dtype, pin_memory=cuda) for _ in range(IN_FLIGHT)]
        events = range(IN_FLIGHT if cuda else 0)
        self.begun, self.done = ([torch.cuda.Event(enable_timing=True) for _ in events] for _ in range(2))
        report = 0 if state.scaling is None else len(state.scaling.table)
        self.reports = [torch.zeros(report, REPORT_PLACES, dtype=torch.float64, pin_memory=cuda) for _ in range(IN_FLIGHT)]
        self.clock = [0.0] * IN_FLIGHT  # where the host makes the steps itself: their beginning, then their length

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
        first = 0 if self.config.overfit_one_batch else step * self.config.samples_per_step
        self.calibrate(step)
        self.state.gradients.zero_()
        self.state.sum_of_losses.zero_()
        for micro_step in range(self.config.micro_steps):
            self.feed.fill(first + micro_step * self.config.micro_batch)
            self.micro_step()

    def calibrate(self, step: int) -> None:
        """Gives an fp8 run its first scales, unless it has some: from its weights and the first micro-batch of `step`."""
        scaling = self.state.scaling
        if scaling is not None and not scaling.calibrated:
            self.feed.fill(0 if self.config.overfit_one_batch else step * self.config.samples_per_step)
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
        self.update()
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
        elapsed_seconds = self.clock[slot]
        if self.done:
            self.done[slot].synchronize()
            elapsed_seconds = self.begun[slot].elapsed_time(self.done[slot]) / 1e3
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
            found = watched(self.state.scaling, self.reports[slot], self.config.micro_steps, counted=self.counts(step))
        return StepResult(loss, norm, rate, loss_z, norm_z, skipped, loss_scale, elapsed_seconds, found)

    def launch_micro_step(self) -> None:
        self.launch_gradients(self.state.activations)
        self.state.ops.loss_sum(self.state.sum_of_losses, self.state.activations.losses)
        if self.state.scaling is not None:
            self.state.scaling.fold_micro_step(self.state.ops)

    def launch_gradients(self, act: Activations) -> None:
        state = self.state
        transformer.loss_and_gradients(
            state.ops,
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
        self.launch_gradients(scaling.calibrating_activations)
        scaling.statistics[: scaling.first_weight].zero_()  # whose parts may be other kernels' than a step's

    def launch_update(self) -> None:
        """The norm in blocks of fixed size, the verdict, AdamW on the flat buffers, one call per run of equal decay."""
        state, config = self.state, self.config
        state.ops.squared_norms(state.norm_partials, state.gradients)
        state.ops.verdict(
            state.results,
            state.loss_scale,
            state.sum_of_losses,
            state.norm_partials,
            state.controls,
            tokens_per_step=config.tokens_per_step,
            clip_norm=config.clip_norm,
            dynamic_loss_scale=config.precision == "fp16",
        )
        for run, decays in decay_runs(state.table):
            state.ops.adamw_update(
                state.parameters[run],
                state.master[run],
                state.first_moments[run],
                state.second_moments[run],
                state.gradients[run],
                state.controls,
                state.results,
                beta1=config.beta1,
                beta2=config.beta2,
                epsilon=config.adam_epsilon,
                weight_decay=config.weight_decay if decays else 0.0,
                seed=config.seed,
                first_element=run.start,
            )
        if state.scaling is not None:
            state.scaling.update(state.ops, state.controls, config)
            state.scaling.quantize_weights(state.ops)


class Replayed:
    """A sequence of launches that is made once as it is (which loads and compiles what it needs), then recorded as a CUDA
    graph, then replayed. It must not allocate, and must not read what the host changes."""

    def __init__(self, launch: Callable[[], None]):
        self.launch = launch
        self.launched = False
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if not self.launched:
            self.launch()
            self.launched = True
            return
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            # Other threads (a sampler of the GPU's power, say) may call the driver during the recording.
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.launch()
        self.graph.replay()


def non_finite_tensors(state: TrainingState) -> list[str]:
    """Names of the parameters in blocks of the gradient that hold a NaN or an infinity, for the message about a skipped
    step. The blocks' sums are the last update's; the gradients themselves may be the next step's already."""
    blocks = (~torch.isfinite(state.norm_partials)).nonzero().flatten().tolist()

    def touches(row: ParameterRow) -> bool:
        return any(row.offset < (b + 1) * BLOCK_ELEMENTS and row.offset + row.elements > b * BLOCK_ELEMENTS for b in blocks)

    return [row.name for row in state.table if touches(row)]
