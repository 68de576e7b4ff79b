"""Evaluation on tasks during a run: the questions made ready once, asked again at every validation."""

import dataclasses
from types import ModuleType

import torch
from torch import Tensor

from handgrad.arena import allocation_of, make_plan
from handgrad.config import ModelShape, RunConfig
from handgrad.data.tokenizer import Tokenizer
from handgrad.evaluation.likelihoods import KIND as OWN_KIND
from handgrad.evaluation.likelihoods import Request, Workload
from handgrad.evaluation.records import IN_TRAINING, task_record
from handgrad.evaluation.scoring import TaskResult, make_requests, results_of
from handgrad.evaluation.tasks import LLMC, TaskData, load_tasks, parse_tasks
from handgrad.models.activations import KIND
from handgrad.parallel.ranks import Ranks
from handgrad.run.log import Voice
from handgrad.training.state import TrainingState, training_plan

WHAT = "evaluation of"  # in front of a task's name: what `Voice.recorded` calls its records


class TaskWatch:
    """The tasks of one run. Their activations lie where the training's do, which are idle meanwhile; only where those are
    too small do they have memory of their own."""

    def __init__(
        self,
        config: RunConfig,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        ops: ModuleType,
        ranks: Ranks,
        questions: tuple[list[TaskData], list[Request]],
    ):
        """As many positions go through the model at once as a micro-batch has, on however many ranks."""
        self.tasks, self.requests = questions
        self.config, self.device = config, device
        positions = config.micro_batch * config.sequence_length
        sizes = {"positions_per_batch": positions, "head_chunk": config.head_chunk_tokens}
        self.work = Workload(self.requests, shape, dtype, ops, device, ranks=ranks, **sizes)
        self.activations = make_plan(self.work.activation_buffers())
        there = training_plan(config, shape, dtype, device, ops, ranks.size).size_bytes[KIND]
        self.shares = self.activations.size_bytes[KIND] <= there
        own = [] if self.shares else [dataclasses.replace(b, kind=OWN_KIND) for b in self.work.activation_buffers()]
        self.plan = make_plan([*self.work.buffers(), *own])
        self.notes = [note for task in self.tasks for note in task.notes]
        self.views: dict[str, Tensor] = {}

    def allocate(self) -> None:
        self.views = self.plan.allocate(self.device)

    def evaluate(self, state: TrainingState) -> list[TaskResult]:
        """The results of the run's weights; of an fp8 run, of those in bf16."""
        views = self.views
        if self.shares:
            views = views | self.activations.lay_over({KIND: allocation_of(state.activations.tokens)})
        return results_of(self.tasks, self.requests, self.work.score(state.plain_weights, views))

    def watch(self, step: int, state: TrainingState, voice: Voice) -> None:
        """Evaluates after `step`, unless the record has all the results already."""
        missing = [task.name for task in self.tasks if (f"{WHAT} {task.name}", step) not in voice.recorded]
        if not missing:
            return
        for task, result in zip(self.tasks, self.evaluate(state), strict=True):
            if result.name not in missing:
                continue
            voice.record("evaluation", step=step, **task_record(task, result, self.config.precision, IN_TRAINING))
            for figure in result.figures:
                if (result.name, figure.metric) == ("hellaswag", LLMC):
                    voice.main_log(f"s:{step} eval:{figure.value:.4f}")
            told = ", ".join(f"{figure.metric} {figure.value:.4f} ± {figure.stderr:.4f}" for figure in result.figures)
            voice.say(f"step {step}: {result.name} {told} (n {result.examples})")


def task_watch(
    config: RunConfig,
    tokenizer: Tokenizer,
    dtype: torch.dtype,
    device: torch.device,
    ops: ModuleType,
    ranks: Ranks,
) -> TaskWatch | None:
    """The tasks of `config.eval_tasks`, read by the first rank for all; None if there are none.

    Raises what `load_tasks` and `make_requests` do.
    """
    if not parse_tasks(config.eval_tasks):
        return None

    def questions() -> tuple[list[TaskData], list[Request]]:
        tasks = load_tasks(config.eval_tasks, config.eval_task_examples)
        return tasks, make_requests(tasks, tokenizer, config.sequence_length)

    made = ranks.from_rank_0(questions, "the tasks")
    return TaskWatch(config, config.shape(tokenizer.vocab_size), dtype, device, ops, ranks, made)
