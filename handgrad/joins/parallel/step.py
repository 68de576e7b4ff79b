"""The optimizer step of a run with several lanes or ranks: the plain step, with gradients summed over all of them.

Micro-batch m of lane l at step s is a pure function of (s, l, m): lanes split a step's samples into consecutive ranges, and
each lane takes its micro-batches in order.
"""

from collections.abc import Callable

import torch

from handgrad.joins.parallel.gradient_sync import GradientSync
from handgrad.joins.parallel.ranks import Ranks
from handgrad.joins.parallel.replicas import REPORT, Replicas
from handgrad.machine.graphs import Replayed, capture
from handgrad.models.passes import Stage, no_launch
from handgrad.training.state import TrainingState
from handgrad.training.step import IN_FLIGHT, Feed, Program, StepResult, TrainStep


class ParallelStep(TrainStep):
    """`TrainStep` over this rank's lanes: the first micro-step awaits weights, the last one sends gradients, by bucket."""

    def __init__(
        self,
        state: TrainingState,
        feed: Feed,
        program: Program,
        ranks: Ranks,
        sync: GradientSync,
        replicas: Replicas | None,
        *,
        graphs: bool,
    ):
        """`replicas`: with several ranks."""
        super().__init__(state, feed, program, graphs=graphs)
        self.ranks, self.sync, self.replicas = ranks, sync, replicas
        kinds = ((True, False), (False, True), (True, True)) if ranks.size > 1 else ()  # (waits, sends)
        self.paused = {kind: PausedStages(program.micro_step, *kind, graphs=self.graphs) for kind in kinds}
        self.captures_ahead = self.graphs and bool(kinds) and len(self.design.batch.schedule.stages) > 1
        events = range(IN_FLIGHT if self.design.device.type == "cuda" else 0)
        self.compute_start, self.compute_end = ([torch.cuda.Event(enable_timing=True) for _ in events] for _ in range(2))
        self.compute_clock = [0.0] * IN_FLIGHT  # on a CPU: start of this rank's own work, then its duration
        self.compute_seconds = 0.0  # this rank's own work on micro-batches, in the last step read

    def accumulate_gradients(self, step: int) -> None:
        self.sync.step = step
        if self.captures_ahead and any(stages.launched for stages in self.paused.values()):
            self.capture_ahead()
        self.sync.await_weights(self.sync.buckets[0].name)
        self.time_compute(step, begins=True)
        for lane in range(self.sync.sharding.lanes_per_rank):
            self.run_lane(step, lane)
        self.time_compute(step, begins=False)
        self.sync.await_gradients()

    def capture_ahead(self) -> None:
        """Captures the kinds of micro-steps that later stages of the batch need, so that no later step waits for a capture.
        Their launches have already run eagerly in another kind."""
        self.captures_ahead = False
        batch, lanes = self.design.batch, self.sync.sharding.lanes_per_rank
        counts = [lanes * batch.micro_steps(stage.first_step) for stage in batch.schedule.stages]
        for kind in sorted({(m == 0, m == count - 1) for count in counts for m in range(count)}):
            launches = self.paused.get(kind, self.micro_step)
            assert isinstance(launches, PausedStages | Replayed)
            launches.capture()

    def run_lane(self, step: int, lane: int) -> None:
        """Runs the micro-batches of one of this rank's lanes, from zeroed sums."""
        state, batch, lanes = self.state, self.design.batch, self.sync.sharding.lanes_per_rank
        micro_steps = batch.micro_steps(step)
        global_lane = self.ranks.rank * lanes + lane
        first = batch.first_sample(step) + global_lane * micro_steps * batch.micro_batch
        self.sync.gradients.zero_()
        state.sum_of_losses.zero_()
        for micro_step in range(micro_steps):
            first_sample = first + micro_step * batch.micro_batch
            self.feed.fill(first_sample)
            kind = lane == micro_step == 0, lane == lanes - 1 and micro_step == micro_steps - 1
            if kind in self.paused:  # also without a gradient: others wait for what it sends
                self.paused[kind](self.at_pause)
            else:
                for launch in self.micro_step if self.program.has_gradient(first_sample) else self.program.losses_alone:
                    launch()
        state.losses_of_step[global_lane].copy_(state.sum_of_losses[0])
        last = lane == lanes - 1
        if not last or self.ranks.size == 1:
            self.sync.stack_lane(lane, slice(None), last=last)

    def at_pause(self, stage: Stage) -> None:
        if stage.done:
            self.sync.send_gradients(stage.bucket)
        else:
            self.sync.await_weights(stage.bucket)

    def time_compute(self, step: int, *, begins: bool) -> None:
        """Records when this rank's own work begins or ends. On a CPU, excludes time spent waiting for others."""
        index = step % IN_FLIGHT
        if self.compute_end:
            (self.compute_start if begins else self.compute_end)[index].record()
            return
        own = self.ranks.clock() - self.ranks.waited_seconds
        self.compute_clock[index] = own if begins else own - self.compute_clock[index]

    def result(self, step: int) -> StepResult:
        with self.ranks.waiting("the result of the step"):
            result = super().result(step)
        if self.replicas is not None:
            self.replicas.compare(step, result.reports[REPORT])
        index = step % IN_FLIGHT
        self.compute_seconds = self.compute_clock[index]
        if self.compute_end:
            self.compute_seconds = self.compute_start[index].elapsed_time(self.compute_end[index]) / 1e3
        return result


class PausedStages:
    """The stages of a micro-step with pauses: if `waits`, before a stage that reads a bucket; if `sends`, after a stage
    that completes one. Each section between pauses is its own graph."""

    def __init__(self, stages: list[Stage], waits: bool, sends: bool, *, graphs: bool):
        self.stretches: list[tuple[list[Callable[[], None]], Stage | None]] = [([], None)]
        self.graphs = graphs
        for stage in stages:
            pauses = bool(stage.bucket) and (sends if stage.done else waits)
            if pauses and not stage.done:
                self.end_stretch(stage)
            if stage.run is not no_launch:
                self.stretches[-1][0].append(stage.run)
            if pauses and stage.done:
                self.end_stretch(stage)
        self.launched = False
        self.captured: list[tuple[torch.cuda.CUDAGraph | None, Stage | None]] = []

    def end_stretch(self, stage: Stage) -> None:
        self.stretches[-1] = self.stretches[-1][0], stage
        self.stretches.append(([], None))

    def __call__(self, at: Callable[[Stage], None]) -> None:
        """Runs all stages; calls `at` at each pause."""
        if not (self.graphs and self.launched):
            for launches, stage in self.stretches:
                for launch in launches:
                    launch()
                if stage is not None:
                    at(stage)
            self.launched = True
            return
        self.capture()
        for graph, stage in self.captured:
            if graph is not None:
                graph.replay()
            if stage is not None:
                at(stage)

    def capture(self) -> None:
        """Captures the graphs, unless already done. Their launches must have run eagerly before."""
        if self.captured:
            return
        self.launched = True
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        self.captured = [(capture(run, stream) if run else None, stage) for run, stage in self.stretches]
