"""Evaluates a run between steps: validation loss, tasks, sample texts. Prepares the tasks' questions once and asks them at
every validation."""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from handgrad.data.codes import drawn, parts_of
from handgrad.data.preferences import pair_batches
from handgrad.data.shards import Dataset
from handgrad.data.tokenizer import Tokenizer
from handgrad.evaluation.codec import view_of
from handgrad.evaluation.likelihoods import KIND as OWN_KIND, Request, Workload
from handgrad.evaluation.loss import floor_note, held_out_loss
from handgrad.evaluation.pictures import reconstructions
from handgrad.evaluation.preferences import held_out_pairs
from handgrad.evaluation.scoring import IN_TRAINING, TaskResult, make_requests, results_of, task_record
from handgrad.evaluation.tasks import LLMC, TaskData, load_tasks, parse_tasks
from handgrad.generation.decode import decode_tensors
from handgrad.generation.pictures import write_document
from handgrad.joins.parallel.ranks import Ranks
from handgrad.memory.arena import allocation_of, make_plan
from handgrad.memory.rows import KIND
from handgrad.run.assemble import Assembly
from handgrad.run.log import EVALUATION_OF, RunLog
from handgrad.run.resolve import generation_plan
from handgrad.run.rollouts import Rollouts
from handgrad.settings.config import RunConfig
from handgrad.training.design import Design
from handgrad.training.state import TrainingState


class TaskEvaluation:
    """The tasks of one run. Their activations reuse the training's idle memory, or have their own if it is too small."""

    def __init__(self, config: RunConfig, design: Design, ranks: Ranks, tasks: list[TaskData], requests: list[Request]):
        """A forward pass takes as many positions as a micro-batch has, for any number of ranks."""
        self.tasks, self.requests, self.precision, self.device = tasks, requests, config.precision, design.device
        positions = config.micro_batch * config.sequence_length
        sizes = {"positions_per_batch": positions, "head_chunk": config.head_chunk_tokens}
        self.work = Workload(requests, design.shape, design.dtype, design.plain_ops, design.device, ranks=ranks, **sizes)
        self.activations = make_plan(self.work.activation_buffers())
        self.shares = self.activations.size_bytes[KIND] <= design.plan.size_bytes[KIND]
        own = [] if self.shares else [dataclasses.replace(b, kind=OWN_KIND) for b in self.work.activation_buffers()]
        self.plan = make_plan([*self.work.buffers(), *own])
        self.notes = [note for task in tasks for note in task.notes]
        self.views: dict[str, Tensor] = {}

    def allocate(self, ops: Any) -> None:
        """Allocates the tasks' memory. `ops`: operations that read the run's plain weights."""
        self.work.ops = ops
        self.views = self.plan.allocate(self.device)

    def evaluate(self, state: TrainingState) -> list[TaskResult]:
        """The results of the run's weights; an fp8 run uses its bf16 weights."""
        views = self.views
        if self.shares:
            views = views | self.activations.lay_over({KIND: allocation_of(state.activations.tokens)})
        return results_of(self.tasks, self.requests, self.work.score(state.plain_weights, views))

    def run_missing(self, step: int, state: TrainingState, log: RunLog) -> None:
        """Evaluates after `step`, unless the record already has all results."""
        missing = [task.name for task in self.tasks if (f"{EVALUATION_OF} {task.name}", step) not in log.recorded]
        if not missing:
            return
        for task, result in zip(self.tasks, self.evaluate(state), strict=True):
            if result.name not in missing:
                continue
            log.record("evaluation", step=step, **task_record(task, result, self.precision, IN_TRAINING))
            for figure in result.figures:
                if (result.name, figure.metric) == ("hellaswag", LLMC):
                    log.main_log(f"s:{step} eval:{figure.value:.4f}")
            figures = ", ".join(f"{f.metric} {f.value:.4f} ± {f.stderr:.4f}" for f in result.figures)
            log.line(f"step {step}: {result.name} {figures} (n {result.examples})")


def make_task_evaluation(config: RunConfig, design: Design, tokenizer: Tokenizer, ranks: Ranks) -> TaskEvaluation | None:
    """The tasks of `config.eval_tasks`, or None; rank 0 reads them. Raises as `load_tasks` and `make_requests` do."""
    if not parse_tasks(config.eval_tasks):
        return None

    def questions() -> tuple[list[TaskData], list[Request]]:
        tasks = load_tasks(config.eval_tasks, config.eval_task_examples)
        return tasks, make_requests(tasks, tokenizer, config.sequence_length)

    return TaskEvaluation(config, design, ranks, *ranks.from_rank_0(questions, "the tasks"))


class Evaluations:
    """The validations, tasks and sample texts of one run, on all ranks."""

    def __init__(
        self,
        config: RunConfig,
        training: Assembly,
        dataset: Dataset,
        ranks: Ranks,
        log: RunLog,
        tasks: TaskEvaluation | None,
    ):
        self.config, self.training, self.dataset, self.ranks, self.log = config, training, dataset, ranks, log
        self.tasks, design = tasks, training.design
        self.decode = None
        if not design.shape.network.pictures:
            self.decode = decode_tensors(design.shape, generation_plan(design).allocate(design.device))
        if tasks is not None:
            tasks.allocate(training.plain_ops)
        self.loss: float | None = None  # of the last validation, in nats; of rewards, the mean's negative
        self.rollouts: Rollouts | None = None  # of a run on own answers

    def validate(self, step: int, is_best: Callable[[float], bool]) -> bool:
        """Validates after `step`, unless recorded. Returns `is_best(loss)`, which saves a state of the lowest loss."""
        if not self.dataset.splits["validation"] or ("validation", step) in self.log.recorded:
            return False
        self.training.await_weights()
        state, config = self.training.state, self.config
        model = state.design.shape, self.training.validation_ops, state.weights, state.activations
        if self.rollouts is not None:
            answered = self.rollouts.held_out(config.eval_tokens)
            if answered is None:
                return False
            self.loss, best = answered.loss, is_best(answered.loss)
            divergence = self.rollouts.divergence(step)
            self.log.validation_of_answers(step, answered, divergence, ", the best so far" if best else "")
            if self.ranks.is_rank_0 and ("sample", step) not in self.log.recorded:
                shown = (f"{asked} -> {answer} (reward {reward:g})" for asked, answer, reward in answered.shown)
                self.log.sample(step, "\n".join(shown))
            return best
        if state.design.preference is not None:
            batches = pair_batches(self.dataset, "validation", config.sequence_length, 0, shuffle=False)
            about = {"about": state.design.preference, "most_tokens": config.eval_tokens, "ranks": self.ranks}
            pairs = held_out_pairs(*model, batches, **about)
            self.loss, best = pairs.loss, is_best(pairs.loss)
            self.log.validation_of_pairs(step, pairs, ", the best so far" if best else "")
            return best
        settings = {"eval_tokens": config.eval_tokens, "eval_stride": config.eval_stride, "packing": config.packing}
        result = held_out_loss(*model, self.dataset, ranks=self.ranks, **settings)
        self.loss, best = result.loss, is_best(result.loss)
        sets = f" ({', '.join(f'{name} {one.loss:.4f}' for name, one in result.sets.items())})" if result.sets else ""
        note = f"{sets}{floor_note(result.loss, self.dataset, config.packing)}{', the best so far' if best else ''}"
        self.log.validation(step, result, f"step {step}: validation loss {result.loss:.4f}{note}")
        return best

    def run_tasks(self, step: int) -> None:
        """Evaluates the tasks after `step`, unless the record has the results."""
        if self.tasks is not None:
            self.training.await_weights()
            self.tasks.run_missing(step, self.training.state, self.log)

    def sample(self, step: int) -> None:
        """Samples a text after `step` on rank 0, unless the record has it."""
        if not self.config.sample_tokens or ("sample", step) in self.log.recorded:
            return
        if self.ranks.is_rank_0 and self.decode is None:
            self.training.await_weights()
            state = self.training.state
            model = state.design.shape, self.training.validation_ops, state.weights, state.activations
            pairs = reconstructions(*model, self.dataset, packing=self.config.packing)
            self.log.sample(step, "each picture above what its codes draw" if pairs else "", pairs)
        elif self.ranks.is_rank_0:
            self.training.await_weights()
            state, tokenizer = self.training.state, self.dataset.tokenizer
            model = state.design.shape, self.training.plain_ops, state.plain_weights, self.decode, tokenizer
            text = write_document(*model, max_tokens=self.config.sample_tokens, seed=self.config.seed + step)
            codes = self.dataset.codes
            text, pictures = drawn([*parts_of(text, codes)], view_of(codes).paint) if codes else (text, [])
            self.log.sample(step, text, pictures)
        self.ranks.barrier("a sample of text")
