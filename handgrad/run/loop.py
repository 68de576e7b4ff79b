"""A training run from its configuration to its last checkpoint: resume, step, watch, save, stop when asked."""

import math
from dataclasses import asdict
from types import ModuleType
from typing import Any

import torch

import handgrad
from handgrad import checkpoint, devices, power
from handgrad.arena import make_plan
from handgrad.config import RunConfig, to_dict
from handgrad.data.batches import Batches, validation_batches
from handgrad.data.shards import Dataset
from handgrad.data.tokenizer import tokenizer_files, tokenizer_record
from handgrad.errors import NumericsError
from handgrad.evaluation.load import Weights
from handgrad.evaluation.loss import bits_per_byte, floor_note, mean_loss
from handgrad.format import speed
from handgrad.fp8.monitor import LeftFp8, saturation_line
from handgrad.fp8.tables import part_of
from handgrad.generation.decode import decode_buffers, decode_tensors
from handgrad.generation.text import write_document
from handgrad.models.parameters import flops_per_token
from handgrad.ops import SMALLEST_LOSS_SCALE
from handgrad.parallel.ranks import Ranks
from handgrad.parallel.stragglers import Stragglers
from handgrad.run import console
from handgrad.run.folder import RunFolder, write_text
from handgrad.run.header import header_lines, run_record
from handgrad.run.initial_weights import take_weights
from handgrad.run.log import Voice
from handgrad.run.saving import changed_versions, load_run, origin_of, run_numbers, save_state
from handgrad.run.signals import Onlooker, OnStep, StopSignals, preempted
from handgrad.run.tasks import TaskWatch
from handgrad.run_files import SAMPLES
from handgrad.training.feed import BatchFeed
from handgrad.training.state import allocate_state
from handgrad.training.step import Stepper, StepResult, non_finite_tensors


class Run:
    """The parts of one run in one place. Everything here is made before the first step."""

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        folder: RunFolder,
        device: torch.device,
        dtype: torch.dtype,
        ops: ModuleType,
        ranks: Ranks,
        weights: Weights | None = None,
        tasks: TaskWatch | None = None,
        *,
        allow_changes: bool,
        shows: console.Shows,
    ):
        """`weights`: what it starts from, unless it is resumed or they are drawn."""
        self.config, self.dataset, self.device, self.ops, self.ranks = config, dataset, device, ops, ranks
        self.tasks = tasks
        self.tokenizer = dataset.tokenizer
        self.shape = config.shape(self.tokenizer.vocab_size)
        self.train_batches = Batches(dataset.splits["train"], config.sequence_length, config.seed)
        self.validation_batches = validation_batches(dataset, config.sequence_length)
        self.folder = folder
        ranks.agree("versions and data", {**self.versions(), **self.identity()})
        folder.settle(self.identity(), ranks, allow_changes=allow_changes)

        self.dtype = dtype
        self.left_fp8 = LeftFp8(**({} if folder.resumed is None else folder.resumed.manifest.get("left_fp8", {})))
        generation = make_plan(decode_buffers(self.shape, 1, dtype, ops))
        self.decode = decode_tensors(generation.allocate(device))
        self.completed, self.skips_in_a_row, self.compute_seconds = 0, 0, 0.0
        self.allocate()
        self.origin = weights.origin if weights else folder.resumed and origin_of(folder.resumed)
        if weights is not None:
            take_weights(weights, self.state)
        self.restore(folder.resumed)
        self.voice = Voice(self.folder.path, config.steps, self.completed, ranks, shows)
        self.best: tuple[int, float] | None = ranks.from_first(self.folder.best_validated, "the best checkpoint")
        self.stragglers = Stragglers()
        self.pace = console.Pace()
        self.validation_loss: float | None = None  # the last one, in nats
        self.first_step = self.until = self.completed  # of this process, and where it is to stop for now
        self.signals = StopSignals(keeps_process=False)
        self.onlooker = Onlooker(None)
        self.told_to_stop: int | None = None  # what any of the ranks was told, as all of them know it
        self.poisoned = False  # the last step's loss or gradient was not finite: its state is not worth keeping
        self.last_saved = self.completed if self.folder.resumed else -1
        self.memory_bytes = self.state.plan.size_bytes | generation.size_bytes
        if tasks is not None:
            tasks.allocate()
            self.memory_bytes |= tasks.plan.size_bytes

    # Before the first step.

    def versions(self) -> dict[str, str]:
        """What, beside the configuration and the data, the bits depend on."""
        return {
            "handgrad": handgrad.__version__,
            "torch": torch.__version__,
            "device": devices.describe(self.device),
            **self.ops.versions(),
        }

    def identity(self) -> dict[str, Any]:
        return {"data": self.dataset.identity, "tokenizer": self.tokenizer.sha256}

    def allocate(self) -> None:
        """State and stepper, with the products in bf16 that have left fp8."""
        config = self.left_fp8.config(self.config)
        place = self.ranks.rank, self.ranks.size
        self.state = allocate_state(config, self.shape, self.dtype, self.device, self.ops, *place)
        self.stepper = Stepper(config, self.state, BatchFeed(self.train_batches, self.state.activations), self.ranks)

    def restore(self, resumed: checkpoint.Checkpoint | None) -> None:
        """From the newest valid checkpoint; without one, as it is."""
        if resumed is not None:
            load_run(resumed, self.config, self.state, self.stepper)
            self.completed, self.skips_in_a_row = resumed.step, resumed.manifest["skips_in_a_row"]
            self.folder.changes += changed_versions(resumed, self.versions())

    # The run.

    def train(self) -> float | None:
        """The whole of what is left; returns the last validation loss of this process in nats, if there was one."""
        self.begin()
        self.advance(self.config.steps)
        return self.validation_loss

    def begin(self) -> None:
        """Says what the run is, and makes up for what was due when the last process ended."""
        source = f"weights of {self.config.init_from}, " if self.config.init_from else ""
        fresh = f"{source}seed {self.config.seed}"
        started = f"resumed at step {self.completed}" if self.folder.resumed else fresh
        header = header_lines(self.config, self.dataset, self.device, self.ops, self.memory_bytes, started, self.ranks)
        for line in (*header, *self.folder.passed_over, *(self.tasks.notes if self.tasks else ())):
            self.voice.say(line)
        for change in self.folder.changes:
            self.event(f"configuration changed: {change}")
        record = run_record(self.config, self.dataset, self.device, self.memory_bytes)
        self.voice.record("run", step=self.completed, ranks=self.ranks.size, **record)
        self.stepper.calibrate(self.completed)
        if self.folder.resumed:
            self.watch()
        if self.completed >= self.config.steps:
            self.voice.say(f"{self.folder.path} is finished: {self.completed} of {self.config.steps} steps are done")
            self.finish()
            return
        power.sensors(self.device)  # loads NVML, which takes longer than a step

    def advance(self, until: int, on_step: OnStep | None = None, *, keeps_process: bool = False) -> None:
        """Makes the steps that are left up to `until`, with all that is due after each. Where it stops makes no difference
        to what is computed.

        `on_step` is called with each step's number and result once they are there: on a GPU the next step may be at work
        by then. What it raises is raised here, when the run stands still after a whole step. A signal to stop becomes
        `Preempted`, after the step that was under way and a save (`keeps_process`: see `StopSignals`).
        """
        self.until, self.onlooker, self.told_to_stop = until, Onlooker(on_step), None
        steps = range(self.completed, until)
        with StopSignals(keeps_process=keeps_process) as self.signals:
            for step in steps:
                if self.one_step(step):  # else its result comes with the next step's
                    self.stand_still()
        if steps and self.completed == self.config.steps:
            self.finish()

    def finish(self) -> None:
        if self.last_saved != self.completed:
            raise NumericsError(
                f"the last step's numbers were not finite and were not saved; the newest checkpoint is of step"
                f" {max(0, self.last_saved)}: lower --learning-rate and start from it"
            )
        self.voice.record("end", step=self.completed)

    def stand_still(self) -> None:
        """Between two steps: what is due then, and what ends the steps here."""
        if self.left_fp8.due(self.completed):
            self.leave_fp8()
        if self.checks_ranks(self.completed):
            self.compare_replicas()
        if self.due(self.config.save_every):
            self.save()  # before anything that could fail
        self.watch()
        self.onlooker.pass_on()
        self.told_to_stop = self.told_to_stop or (
            self.signals.told if self.ranks.size == 1 else None
        )  # since the roll call
        if self.told_to_stop is not None and self.completed < self.config.steps:
            self.save()
            raise preempted(self.told_to_stop, self.completed, self.last_saved)

    def watch(self) -> None:
        """The validation and the sample that are due after the completed step and not yet in the record."""
        recorded = self.voice.recorded
        if self.due(self.config.eval_every) and self.validation_batches and ("validation", self.completed) not in recorded:
            self.validation_loss = loss = self.validate()
            better = self.config.keep_best and self.is_best(loss)
            note = f"{floor_note(loss, self.dataset)}{', the best so far' if better else ''}"
            line = f"step {self.completed}: validation loss {loss:.4f}{note}"
            self.voice.validation(self.completed, loss, bits_per_byte(loss, self.dataset), line)
            if better:
                self.prune()  # the best one before
        if self.tasks is not None and self.due(self.config.eval_every):
            self.stepper.reduction.await_all_weights()
            self.tasks.watch(self.completed, self.state, self.voice)
        if self.due(self.config.sample_every) and self.config.sample_tokens and ("sample", self.completed) not in recorded:
            if self.ranks.leads:
                self.sample()
            self.ranks.barrier("a sample of text")

    def is_best(self, loss: float) -> bool:
        """Whether a loss is the lowest of a step that has, or now gets, a checkpoint. The checkpoint comes before the
        record of the loss: a run that ends in between makes this validation again."""
        if not math.isfinite(loss) or (self.best is not None and loss >= self.best[1]):
            return False
        self.save()
        if self.last_saved != self.completed:
            return False
        self.best = self.completed, loss
        return True

    def due(self, every: int, completed: int | None = None) -> bool:
        """Whether something done `every` steps (0: only at the end) is due after the completed step."""
        completed = self.completed if completed is None else completed
        return completed == self.config.steps or bool(every and completed % every == 0)

    def one_step(self, step: int) -> bool:
        """Launches `step`, and takes in the result of the one before while the device works on this one's micro-batches.

        True when the run stands still after `step`, so that it can be saved and watched: where something is due, when a
        signal has come, and always on a CPU, which has nothing to work on meanwhile.
        """
        self.ranks.begin(step, checking=self.checks_ranks(step + 1))
        self.ranks.at("its micro-batches")
        self.stepper.begin(step)
        if self.completed < step:
            self.take_in(step - 1)
        self.stepper.finish(step)
        self.roll_call()
        every = (self.config.save_every, self.config.eval_every, self.config.sample_every)
        pause = not works_ahead(self.device) or self.told_to_stop is not None or step == self.first_step
        pause = pause or step + 1 == self.until or self.onlooker.raised is not None
        pause = pause or self.left_fp8.due(step + 1) or self.checks_ranks(step + 1)
        if pause or any(self.due(n, step + 1) for n in every):
            self.take_in(step)
            return True
        return False

    def roll_call(self) -> None:
        """Makes sure that all ranks stand at the same place, and shares what each has to say: a signal, its pace."""
        told = self.ranks.roll_call([self.signals.told or 0, self.compute_seconds], "roll call")
        self.told_to_stop = int(max(row[0] for row in told)) or None
        if self.ranks.size > 1:
            self.stragglers.add([row[1] for row in told])

    def checks_ranks(self, completed: int) -> bool:
        every = self.config.check_ranks_every
        return self.ranks.size > 1 and bool(every and completed % every == 0)

    def compare_replicas(self) -> None:
        """Raises `NumericsError` unless all ranks hold the same weights, bit by bit."""
        self.stepper.reduction.await_all_weights()
        self.ops.checksum(self.state.checksum, self.state.parameters)
        self.ranks.compare_replicas(int(self.state.checksum.item()))

    def take_in(self, step: int) -> None:
        """Waits for the result of `step`, records and shows it."""
        result = self.stepper.result(step)
        self.completed = step + 1
        self.compute_seconds = result.compute_seconds
        self.voice.step(self.completed, result, self.config.tokens_per_step)
        if self.config.gpu_every and self.completed % self.config.gpu_every == 0:
            self.voice.gpu(self.completed, self.device)
        self.show(result)
        if self.completed % self.config.log_every == 0 and (found := self.stragglers.report()):
            figures, line = found
            self.voice.record("ranks", step=self.completed, **figures)
            if line:
                self.event(f"step {self.completed}: {line}")
        self.watch_fp8(result)
        # Dynamic loss scaling looks for the largest scale by overflowing: down to the smallest one that is no fault.
        overflow = math.isfinite(result.loss) and not math.isfinite(result.norm)
        regular = overflow and result.loss_scale > SMALLEST_LOSS_SCALE
        self.poisoned = not regular and not (math.isfinite(result.loss) and math.isfinite(result.norm))
        if regular:
            self.event(f"step {self.completed} made no update: a gradient overflowed at loss scale {result.loss_scale:g}")
        elif result.skipped:
            self.on_skip(result)
        else:
            self.skips_in_a_row = 0
        self.onlooker.show(self.completed, result)

    def watch_fp8(self, result: StepResult) -> None:
        """Names the tensors that saturate; their products leave fp8 where that is the policy, one step later: that step may
        be on its way already."""
        policy = self.config.fp8_on_saturation
        for line in result.quantized:
            if line.saturated_steps == self.config.fp8_saturation_steps:
                self.event(saturation_line(line, self.completed, policy))
                if policy == "bf16":
                    self.left_fp8.leave(part_of(line.name), self.completed + 1)

    def leave_fp8(self) -> None:
        """Goes on with other products in bf16: another plan, so the run is saved and taken up from there."""
        if self.poisoned:
            return  # nothing to take up; the next good step asks again
        parts = self.left_fp8.settle(self.completed)
        self.save()
        del self.state, self.stepper
        self.allocate()
        self.restore(checkpoint.open_checkpoint(checkpoint.folder_of(self.folder.checkpoints, self.completed)))
        self.event(f"step {self.completed}: {', '.join(parts)} goes on in bf16")

    def show(self, result: StepResult) -> None:
        mean_seconds = self.pace.add(result.elapsed_seconds)
        tokens_per_second = self.config.tokens_per_step / mean_seconds
        peak = devices.peak_flops(self.device)
        rate = speed(tokens_per_second, flops_per_token(self.shape), peak and peak * self.ranks.size)
        line = console.step_line(self.completed, self.config.steps, result, result.elapsed_seconds, tokens_per_second, rate)
        self.voice.show(self.completed, line, (self.config.steps - self.completed) * mean_seconds)
        if self.completed == 1 or self.due(self.config.log_every) or result.skipped:
            self.voice.say(line)

    def on_skip(self, result: StepResult) -> None:
        self.skips_in_a_row += 1
        named = ", ".join(non_finite_tensors(self.state)[:4])
        where = f"; non-finite gradients at {named}" if named else ""
        self.event(f"step {self.completed} made no update: {result.skipped}{where}")
        if self.skips_in_a_row >= self.config.max_skips:
            raise NumericsError(
                f"{self.skips_in_a_row} updates in a row were skipped, the last at step {self.completed}"
                f" ({result.skipped}){where}; the last checkpoint is clean: lower --learning-rate and start from it"
            )

    def validate(self) -> float:
        assert self.validation_batches is not None
        self.stepper.reduction.await_all_weights()
        act = self.state.activations
        model = self.ops, self.state.weights, act, self.validation_batches
        samples = max(1, self.config.eval_tokens // self.config.sequence_length)
        sizes = {"samples": samples, "vocab_size": self.shape.vocab_size}
        return mean_loss(*model, **sizes, host_buffers=devices.host_buffers(act.tokens, act.targets), ranks=self.ranks)

    def sample(self) -> None:
        self.stepper.reduction.await_all_weights()
        model = self.ops, self.state.plain_weights, self.decode, self.tokenizer
        seed = self.config.seed + self.completed
        text = write_document(*model, max_tokens=self.config.sample_tokens, seed=seed)
        write_text(self.folder.path / SAMPLES / f"step_{self.completed:08d}.txt", text)
        self.voice.record("sample", step=self.completed, text=text)
        self.voice.say(f"step {self.completed}, the model writes: {text}")

    def save(self) -> None:
        if self.last_saved == self.completed:
            return
        if self.poisoned:
            self.event(f"step {self.completed}: not saved, because the step's numbers were not finite")
            return
        extra = tokenizer_files(self.tokenizer)
        manifest = {
            "handgrad": handgrad.__version__,
            "versions": self.versions(),
            "config": to_dict(self.config),
            "vocab_size": self.shape.vocab_size,
            "tokenizer": tokenizer_record(self.tokenizer),
            "identity": self.identity(),
            **run_numbers(self.state, self.stepper),
            "skips_in_a_row": self.skips_in_a_row,
            "left_fp8": asdict(self.left_fp8),
            **({"init": self.origin} if self.origin else {}),
        }
        self.voice.sync()
        self.stepper.reduction.await_all_weights()
        folder = save_state(self.folder.checkpoints, self.completed, self.state, self.ranks, manifest, extra)
        self.last_saved = self.completed
        self.prune()
        self.voice.say(f"step {self.completed}: saved {folder}")

    def prune(self) -> None:
        """Removes the checkpoints that need not be kept."""
        best = self.best[0] if self.best and self.config.keep_best else None
        keep = self.folder.checkpoints, self.last_saved, self.config.keep_checkpoints, best
        self.ranks.from_first(lambda: checkpoint.prune(*keep), "old checkpoints")

    def event(self, line: str) -> None:
        self.voice.event(self.completed, line)


def works_ahead(device: torch.device) -> bool:
    """Whether the next step's micro-batches are launched before the last step's result is read."""
    return device.type == "cuda"
