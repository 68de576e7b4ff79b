"""The training loop, from design to last checkpoint: resumes, steps, validates, saves, stops."""

import math
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from handgrad.data.mixture import continued
from handgrad.data.shards import Dataset
from handgrad.data.tokenizer import tokenizer_files
from handgrad.errors import STOPPING, NumericsError, Preempted, end_interrupted, end_stopped, forget_signals, is_repeat
from handgrad.evaluation.load import Weights
from handgrad.evaluation.loss import floor_of
from handgrad.evaluation.outcome import Outcome, outcome_of
from handgrad.evaluation.rewards import Reward
from handgrad.joins.fp8.bind import REPORT
from handgrad.joins.fp8.scaling import Scaling, findings, saturation_line, summary
from handgrad.joins.parallel.ranks import Ranks
from handgrad.joins.parallel.step import ParallelStep
from handgrad.joins.parallel.stragglers import Stragglers
from handgrad.machine import power
from handgrad.run import audit
from handgrad.run.assemble import assemble
from handgrad.run.autosize import usual_rate
from handgrad.run.checkpointing import (
    begin_state,
    changed_versions,
    host_copy,
    origin_of,
    run_facts,
    run_numbers,
    versions_of,
)
from handgrad.run.console import ConsoleMode
from handgrad.run.evaluating import Evaluations, TaskEvaluation
from handgrad.run.folder import RunFolder
from handgrad.run.header import header_lines, origin_text, run_record
from handgrad.run.log import RunLog, StepLines, read_curves
from handgrad.run.packing import identity_of, trained_tokens, training_batches
from handgrad.run.resolve import memory_bytes
from handgrad.run.rollouts import Rollouts
from handgrad.run.saves import SaveCheck, Saves
from handgrad.run.step_check import checked_result, is_overflow
from handgrad.settings.config import RunConfig, to_dict
from handgrad.storage import checkpoint
from handgrad.training.design import Design
from handgrad.training.step import NOTHING_TRAINED, StepResult

OnStep = Callable[[int, StepResult], None]  # (step number from 1, result)


class Run:
    """One run with all its parts, built before the first step."""

    def __init__(
        self,
        config: RunConfig,
        design: Design,
        dataset: Dataset,
        folder: RunFolder,
        ranks: Ranks,
        weights: Weights | None = None,
        teacher: Weights | None = None,
        tasks: TaskEvaluation | None = None,
        *,
        allow_changes: bool,
        console: ConsoleMode,
        reward: Reward | None = None,
    ):
        """`weights`: initial weights, unless the run resumes or draws them; with adapters, the base. `teacher`: to learn
        from, if any. `reward`: replaces `config.reward`."""
        dataset = continued(dataset, folder.resumed)
        self.config, self.design, self.dataset, self.folder, self.ranks = config, design, dataset, folder, ranks
        self.batch, batches = config.batch, training_batches(config, dataset)
        versions, identity = versions_of(design.device, design.plain_ops), identity_of(config, dataset, teacher)
        ranks.check_equal("versions and data", {**versions, **identity})
        ranks.from_rank_0(lambda: folder.check_identity(identity, allow_changes=allow_changes), "the run's data")

        resumed = folder.resumed
        copy, self.save_lines = host_copy(config, self.design, ranks)  # before other parts take the memory
        self.training = assemble(design, batches, ranks, trained_tokens=trained_tokens(batches))
        self.origin = origin_of(resumed) if resumed else weights.origin if weights else None
        # Every checkpoint's manifest has these.
        self.facts = {**run_facts(config, dataset, self.origin), "versions": versions, "identity": identity}
        self.teacher = teacher.origin if teacher else None
        self.completed, self.skips_in_a_row = begin_state(self.training, config, weights, resumed, teacher)
        if resumed is not None:
            folder.changes += changed_versions(resumed, versions)
        ranks.from_rank_0(folder.write_config, "the configuration")
        self.log = RunLog(folder.path, config.steps, self.completed, ranks, console, audited=bool(config.audit_every))
        self.audit = audit.Audit(config.audit_every, ranks, self.log)
        facts = audit.facts(config, versions, identity, self.origin, dataset)
        self.audit.begin(self.training, facts, resumed, allow_changes=allow_changes)
        check, files = SaveCheck(self.training.state, ranks), tokenizer_files(dataset.tokenizer)
        self.saves = Saves(config, folder, ranks, self.log, check, copy, files, self.audit.seal)
        self.evaluations = Evaluations(config, self.training, dataset, ranks, self.log, tasks)
        connections = self.training, self.evaluations.decode, ranks, reward or config.reward, folder.path
        self.rollouts = self.evaluations.rollouts = batches.bind(*connections) if isinstance(batches, Rollouts) else None
        self.step_lines, self.stragglers = StepLines(self.log, config, design, ranks.size), Stragglers()
        self.first_step = self.until = self.completed  # this process's first step; `until`: the next stop
        self.signals = StopSignals(keeps_process=False)
        self.on_step: OnStep | None = None
        self.callback_error: BaseException | None = None  # raised when the run pauses: the next step may be running
        self.stop_signal: int | None = None  # a signal that some rank received and all ranks know
        self.step_seconds = 0.0  # of the last step
        self.outcome: Outcome | None = None  # of the finished run, on rank 0

    def begin(self) -> None:
        """Logs the header, then runs the validation and the sample that the last process left due."""
        source = f"weights of {self.config.init_from}, " if self.config.init_from else ""
        started = f"resumed at step {self.completed}" if self.folder.resumed else f"{source}seed {self.config.seed}"
        tasks = self.evaluations.tasks
        memory = memory_bytes(self.design) | (tasks.plan.size_bytes if tasks else {})
        described = self.config, self.design, self.dataset, memory
        header = header_lines(*described, started, self.ranks, self.origin, self.teacher)
        for line in (*header, *self.save_lines, *self.folder.passed_over, *(tasks.notes if tasks else ())):
            self.log.line(line)
        for text in (*self.log.notes, *(f"configuration changed: {change}" for change in self.folder.changes)):
            self.event(text)
        record = run_record(*described, self.origin, self.teacher)
        record["host_bytes"] = 0 if self.saves.copy is None else self.saves.copy.size_bytes
        if not self.log.has_end(self.config.steps):
            self.log.record("run", step=self.completed, ranks=self.ranks.size, **record, **self.folder.failure)
        self.log.send_to(self.config.log_to, {**to_dict(self.config), **record}, self.completed)
        self.training.stepper.run_before_step(self.completed)
        if self.folder.resumed:
            self.evaluate_and_sample()
        elif self.origin:
            self.log.record("event", step=0, text=f"starts from the weights of {origin_text(self.origin)}")
            if self.config.eval_every:
                self.evaluate()  # the curve begins at their loss
        if self.completed >= self.config.steps:
            self.log.line(f"{self.folder.path} is finished: {self.completed} of {self.config.steps} steps are done")
            self.finish()
            return
        power.sensors(self.design.device)  # loads NVML, which takes longer than a step

    def advance(self, until: int, on_step: OnStep | None = None, *, keeps_process: bool = False) -> None:
        """Runs the remaining steps up to `until`, and whatever is due after each. The bits do not depend on where it stops.

        Calls `on_step` with each step's number and result as soon as they arrive; on a GPU the next step may already run.
        Raises an exception of `on_step` after a whole step. On a stop signal, finishes the current step, saves, and raises
        `Preempted` (`keeps_process`: see `StopSignals`)."""
        self.until, self.on_step, self.callback_error, self.stop_signal = until, on_step, None, None
        steps = range(self.completed, until)
        with StopSignals(keeps_process=keeps_process) as self.signals:
            for step in steps:
                self.ranks.begin_step(step)
                self.ranks.set_status("its micro-batches")
                self.training.stepper.begin(step)
                if self.completed < step:  # read the last result while the device runs this step's micro-batches
                    self.read_result(step - 1)
                self.training.stepper.finish(step)
                self.sync_with_ranks()
                if self.pauses_after(step):  # else read its result during the next step
                    self.read_result(step)
                    self.between_steps()
        self.log.display.keep_line()
        if steps and self.completed == self.config.steps:
            self.finish()

    def finish(self) -> None:
        if self.saves.last_saved != self.completed:
            raise NumericsError(
                f"the last step's numbers were not finite and were not saved; the newest checkpoint is of step"
                f" {max(0, self.saves.last_saved)}: lower --learning-rate and start from it"
            )
        judges = self.ranks.is_rank_0 and self.rollouts is None  # the loss of a run on rewards has no aim
        self.outcome = outcome = self.judged() if judges else None
        if outcome is not None:
            self.log.line(f"result     {outcome.text}")
        if not self.log.has_end(self.completed):
            if outcome is not None:
                self.log.record("result", step=self.completed, outcome=outcome.kind, text=outcome.text)
            self.log.record("end", step=self.completed)
            self.log.sync()

    def judged(self) -> Outcome | None:
        """The outcome of the whole run, by its record."""
        best = checkpoint.best_validated(self.folder.path)
        uniform = self.design.shape.vocab_size if self.design.preference is None else 2  # a guess among answers
        known = math.log(uniform), floor_of(self.dataset, self.config.packing), usual_rate(self.config)
        return outcome_of(self.config, *read_curves(self.folder.path), *known, best)

    def pauses_after(self, step: int) -> bool:
        """True if something is due after `step`, if a signal has come, or on a CPU, which does not run ahead."""
        every = (self.config.save_every, self.config.eval_every, self.config.sample_every)
        return (
            self.design.device.type != "cuda"
            or self.stop_signal is not None
            or self.callback_error is not None
            or step == self.first_step
            or step + 1 == self.until
            or any(self.due(n, step + 1) for n in every)
        )

    def between_steps(self) -> None:
        """Does whatever is due. Stops the loop after a signal or an exception in `on_step`."""
        if self.due(self.config.save_every):
            self.save()  # before anything that could fail
        if self.completed == self.until:
            self.saves.wait()  # no further step overlaps the write
        self.evaluate_and_sample()
        if self.callback_error is not None:
            if self.ranks.size == 1:  # with several, other ranks may not have the error
                self.saves.wait()
            raise self.callback_error
        if self.stop_signal is None and self.ranks.size == 1:  # one may have come since the step ended
            self.stop_signal = self.signals.received
        if self.stop_signal is not None and self.completed < self.config.steps:
            self.save()
            self.saves.wait()
            raise preempted(self.stop_signal, self.completed, self.saves.last_saved)

    def evaluate_and_sample(self) -> None:
        """Runs the evaluation and the sample due after the completed step, unless the record has them."""
        if self.due(self.config.eval_every):
            self.evaluate()
        if self.due(self.config.sample_every):
            self.evaluations.sample(self.completed)

    def evaluate(self) -> None:
        """Runs validation and tasks after the completed step, unless the record has them."""
        if self.evaluations.validate(self.completed, self.is_best):
            self.saves.prune()  # removes the previous best
        self.evaluations.run_tasks(self.completed)

    def is_best(self, loss: float) -> bool:
        """True if the run keeps its best step and `loss` is the lowest of all checkpoints; saves this step first. The save
        completes before the record gets the loss, so a run that ends in between repeats this validation."""
        best, wanted = self.saves.best, self.config.keep_best and self.completed > 0
        if not wanted or not math.isfinite(loss) or (best is not None and loss >= best[1]):
            return False
        self.save()
        self.saves.wait()
        if self.saves.last_saved != self.completed:
            return False
        self.saves.best = self.completed, loss
        return True

    def due(self, every: int, completed: int | None = None) -> bool:
        """True if an action that repeats `every` steps (0: only at the end) is due after the completed step."""
        completed = self.completed if completed is None else completed
        return completed == self.config.steps or bool(every and completed % every == 0)

    def sync_with_ranks(self) -> None:
        """Checks that all ranks are at the same step; exchanges stop signals, compute times and the progress of saves."""
        stepper = self.training.stepper
        seconds = stepper.compute_seconds if isinstance(stepper, ParallelStep) else 0.0
        own = self.signals.received or 0, seconds, self.saves.progress()
        received, computing, writing = zip(*self.ranks.all_gather_checked(own, "the end of the step"), strict=True)
        self.stop_signal = int(max(received)) or None
        if self.ranks.size > 1:
            self.stragglers.add(computing)
        self.saves.advance_if_all_ready(writing)

    def read_result(self, step: int) -> None:
        """Waits for the result of `step`, repeats the step if it looks wrong, records the result, calls `on_step`."""
        result, fault = checked_result(self.training, self.ranks, step, self.training.stepper.result(step))
        self.completed, self.step_seconds = step + 1, result.elapsed_seconds
        self.record_result(result)
        if fault:
            self.event(fault)
        self.judge_update(result)
        if self.on_step is not None and self.callback_error is None:
            try:
                self.on_step(self.completed, result)
            except BaseException as error:
                self.callback_error = error

    def record_result(self, result: StepResult) -> None:
        """Writes the records and lines of the completed step."""
        tokens, tokens_seen = self.batch.tokens(self.completed - 1), self.batch.tokens_before(self.completed)
        counted = "trained_tokens" if self.design.preference is None else "pairs"
        self.log.step(self.completed, result, tokens, tokens_seen, counted)
        digests = {} if self.rollouts is None else self.rollouts.record(self.log, self.completed, result)
        self.audit.add(self.training, self.completed, result, digests)
        if self.config.gpu_every and self.completed % self.config.gpu_every == 0:
            self.log.gpu(self.completed, self.design.device)
        answers = None if self.rollouts is None else self.rollouts.block(self.completed - 1)
        self.step_lines.show(self.completed, result, None if answers is None else answers.figures["reward"])
        if self.completed % self.config.log_every == 0 and (slowest := self.stragglers.report()):
            figures, line = slowest
            self.log.record("ranks", step=self.completed, **figures)
            if line:
                self.event(f"step {self.completed}: {line}")
        if self.training.scaling is not None:
            self.record_fp8(self.training.scaling, result)

    def record_fp8(self, scaling: Scaling, result: StepResult) -> None:
        """Records the quantised tensors of a step that counted clipped numbers, and names saturated ones."""
        fp8, batch = scaling.fp8, self.design.batch
        counted = fp8.counts(self.completed - 1)
        micro_steps = batch.micro_steps(self.completed - 1) * batch.lanes
        tensors = findings(scaling, result.reports[REPORT], micro_steps, counted=counted)
        if counted:
            self.log.record("fp8", step=self.completed, tensors=summary(tensors))
        for finding in tensors:
            if finding.saturated_steps == fp8.saturation_steps:
                self.event(saturation_line(finding, self.completed, self.config.fp8_on_saturation))

    def judge_update(self, result: StepResult) -> None:
        """If the completed step made no update, logs the reason, and ends the run after too many skips. Blocks saves after
        non-finite numbers, unless fp16's loss scaling is searching its limit."""
        regular = is_overflow(result)
        self.saves.poisoned = not regular and not (math.isfinite(result.loss) and math.isfinite(result.norm))
        if result.skipped == NOTHING_TRAINED:
            self.event(f"step {self.completed} made no update: {result.skipped}")
        elif regular:
            self.event(f"step {self.completed} made no update: a gradient overflowed at loss scale {result.loss_scale:g}")
        elif result.skipped:
            self.on_skip(result)
        else:
            self.skips_in_a_row = 0

    def on_skip(self, result: StepResult) -> None:
        self.skips_in_a_row += 1
        self.training.stepper.raise_norm_limit(result.norm)
        named = ", ".join(self.training.state.non_finite_parameters()[:4])
        where = f"; non-finite gradients at {named}" if named else ""
        self.event(f"step {self.completed} made no update: {result.skipped}{where}")
        if self.skips_in_a_row >= self.config.max_skips:
            clean = "the last checkpoint is clean: lower --learning-rate and start from it"
            if self.saves.last_saved < 0:
                clean = "there is no checkpoint yet: lower --learning-rate and start anew"
            raise NumericsError(
                f"{self.skips_in_a_row} updates in a row were skipped, the last at step {self.completed}"
                f" ({result.skipped}){where}; {clean}"
            )

    def save(self) -> None:
        """Saves the completed step, in the background of later steps."""
        self.saves.save(self.training, self.completed, self.step_seconds, self.manifest())

    def manifest(self) -> dict[str, Any]:
        """The manifest for a checkpoint of the completed step, without its files."""
        return {**self.facts, **run_numbers(self.training), "skips_in_a_row": self.skips_in_a_row, **self.audit.named()}

    def event(self, line: str) -> None:
        self.log.event(self.completed, line)

    def close(self) -> None:
        """Ends the processes that compute rewards."""
        if self.rollouts is not None:
            self.rollouts.rewards.close()


class StopSignals:
    """Within a `with` block, stores SIGINT and the signals of `STOPPING` in `received`, so that the step finishes first.

    A second signal ends the process at once (saves are atomic) or, with `keeps_process`, acts as before the block. A repeat
    within a second does not count: a launcher and its ranks may both receive the signal, and the launcher forwards it.
    SIGXCPU never ends the process, because the kernel repeats it every second. Installs no handler outside the main
    thread, where Python forbids it, nor for a signal of `STOPPING` that is ignored (`nohup`) or that the program
    handles itself."""

    def __init__(self, *, keeps_process: bool):
        self.keeps_process = keeps_process
        self.received: int | None = None
        self.noted: set[int] = set()
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        forget_signals()
        if threading.current_thread() is threading.main_thread():
            free = [number for number in STOPPING if signal.getsignal(number) in (signal.SIG_DFL, end_stopped)]
            self.previous = {number: signal.signal(number, self.note) for number in {signal.SIGTERM, signal.SIGINT, *free}}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def note(self, number: int, frame: FrameType | None) -> None:
        if is_repeat(number):
            return
        self.received = number
        if number in self.noted and number != signal.SIGXCPU:
            self.act(number)
        self.noted.add(number)

    def act(self, number: int) -> None:
        """Ends the process or, with `keeps_process`, does what the signal did before the block."""
        if number == signal.SIGINT and not self.keeps_process:
            end_interrupted("interrupted before the step was saved; the same command resumes from the last checkpoint")
        signal.signal(number, self.previous[number] if self.keeps_process else signal.SIG_DFL)
        signal.raise_signal(number)


def preempted(received: int, completed: int, last_saved: int) -> Preempted:
    """The error for a run that signal `received` stopped. `last_saved`: step of the newest checkpoint, or -1."""
    saved = f"saved step {last_saved}" if last_saved >= 0 else "nothing saved yet"
    name = signal.Signals(received).name
    return Preempted(f"stopped by {name} after step {completed}, {saved}; run the same command to resume")
