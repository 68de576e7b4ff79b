"""Tasks during a run: the questions are made ready once and asked again at every validation."""

import dataclasses
from typing import Any

from torch import Tensor

from handgrad.data.tokenizer import Tokenizer
from handgrad.evaluation.likelihoods import KIND as OWN_KIND, Request, Workload
from handgrad.evaluation.scoring import IN_TRAINING, TaskResult, make_requests, results_of, task_record
from handgrad.evaluation.tasks import LLMC, TaskData, load_tasks, parse_tasks
from handgrad.joins.parallel.ranks import Ranks
from handgrad.memory.arena import allocation_of, make_plan
from handgrad.memory.rows import KIND
from handgrad.run.log import EVALUATION_OF, RunLog
from handgrad.settings.config import RunConfig
from handgrad.training.design import Design
from handgrad.training.state import TrainingState


class TaskEvaluation:
    """The tasks of one run. Their activations lie in the memory of the training's, which are idle meanwhile; only where
    those are too small do they have memory of their own."""

    def __init__(self, config: RunConfig, design: Design, ranks: Ranks, tasks: list[TaskData], requests: list[Request]):
        """As many positions go through the model at once as a micro-batch has, whatever the number of ranks."""
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
        """`ops`: operations that read the run's plain weights."""
        self.work.ops = ops
        self.views = self.plan.allocate(self.device)

    def evaluate(self, state: TrainingState) -> list[TaskResult]:
        """The results of the run's weights; of an fp8 run, of those in bf16."""
        views = self.views
        if self.shares:
            views = views | self.activations.lay_over({KIND: allocation_of(state.activations.tokens)})
        return results_of(self.tasks, self.requests, self.work.score(state.plain_weights, views))

    def run_missing(self, step: int, state: TrainingState, log: RunLog) -> None:
        """Evaluates after `step`, unless the record has all the results already."""
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
    """The tasks of `config.eval_tasks`, read by rank 0 for all; None if there are none.

    Raises the errors of `load_tasks` and `make_requests`.
    """
    if not parse_tasks(config.eval_tasks):
        return None

    def questions() -> tuple[list[TaskData], list[Request]]:
        tasks = load_tasks(config.eval_tasks, config.eval_task_examples)
        return tasks, make_requests(tasks, tokenizer, config.sequence_length)

    return TaskEvaluation(config, design, ranks, *ranks.from_rank_0(questions, "the tasks"))
