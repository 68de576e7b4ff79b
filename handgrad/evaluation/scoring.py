"""Turns questions into requests, and likelihoods into the figures of a task and their records: lines of kind "evaluation"
in the run's metrics.jsonl, and the file of --out.

With s_i the sum of the log-likelihoods of the tokens of choice i, and y the right one:

    acc            argmax s_i = y
    acc_norm       argmax s_i / characters of choice i = y
    acc_bytes      argmax s_i / UTF-8 bytes of choice i = y
    acc_norm_llmc  argmin -s_i / tokens of choice i = y, for llm.c's texts
    perplexity     exp(-mean s), for a task with one choice; its acc: each token is the likeliest

The first of equal maxima counts. The standard error of a mean is the sample's standard deviation / sqrt(n); the delta
method gives the perplexity's from it.
"""

import fcntl
import functools
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from handgrad.data.tokenizer import Tokenizer
from handgrad.errors import DataError, storage_errors
from handgrad.evaluation.likelihoods import Likelihoods, Request
from handgrad.evaluation.loss import perplexity
from handgrad.evaluation.tasks import LLMC, Example, TaskData
from handgrad.files import write_durably
from handgrad.storage.checkpoint import Checkpoint
from handgrad.storage.run_files import LOCK_FILE, METRICS_FILE


@dataclass(frozen=True)
class Figure:
    """A measured value and its standard error; NaN where unknown."""

    metric: str
    value: float
    stderr: float


@dataclass(frozen=True)
class TaskResult:
    """The results on a task; `rows` are the lines of --out, one per example."""

    name: str
    examples: int
    figures: tuple[Figure, ...]
    rows: list[dict[str, Any]]

    def lines(self) -> list[tuple[str, ...]]:
        """Rows of a table: task, metric, value, standard error, n."""
        return [(self.name, f.metric, f"{f.value:.4f}", f"{f.stderr:.4f}", str(self.examples)) for f in self.figures]


class Encoder:
    """Encodes contexts with their continuations; encodes each text only once."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.ids = functools.cache(tokenizer.encode)

    def together(self, context: str, continuation: str) -> tuple[np.ndarray, int]:
        """(ids, number of the last ones that belong to the continuation), as lm-eval splits them.

        Blanks at the context's end belong to the continuation. Encodes both as one text; the continuation begins after as
        many tokens as the context alone has. An empty context becomes the start of a prompt."""
        if not context:
            ids = self.ids(continuation)
            return np.concatenate([np.array(self.tokenizer.prompt_start, ids.dtype), ids]), len(ids)
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        head = self.ids(stripped)
        # GPT-2's splitter cuts wherever a blank follows a non-blank, so both texts have the tokens of the whole.
        if stripped and continuation.startswith(" "):
            tail = self.ids(continuation)
            return np.concatenate([head, tail]), len(tail)
        whole = self.ids(stripped + continuation)
        return whole, len(whole) - len(head)

    def apart(self, context: str, continuation: str) -> tuple[np.ndarray, int]:
        """The same as llm.c splits them: two texts, encoded separately."""
        tail = self.ids(continuation)
        return np.concatenate([self.ids(context), tail]), len(tail)


def make_requests(tasks: Sequence[TaskData], tokenizer: Tokenizer, longest: int) -> list[Request]:
    """The requests of all tasks in order: for each example its continuations, then its continuations for llm.c. Raises
    `DataError` with file and line if there is nothing to score, nothing before it, or more than the model's context of
    `longest` tokens."""
    encoder, requests = Encoder(tokenizer), []
    for task in tasks:
        for example in task.examples:
            for encode, context, rest in pairs_of(encoder, task, example):
                ids, scored = encode(context, rest)
                if not 1 <= scored < len(ids):
                    raise DataError(
                        f"expected tokens in the context and in its continuation, found {len(ids) - scored} and {scored} in"
                        f" {example.where}; repair or remove it"
                    )
                if scored > longest:
                    raise DataError(
                        f"expected at most {longest} tokens to score, the context, found {scored} in"
                        f" {example.where}; shorten or remove it, or take a longer context"
                    )
                requests.append(Request(ids, scored))
    return requests


def pairs_of(encoder: Encoder, task: TaskData, example: Example) -> list[tuple[Callable[..., Any], str, str]]:
    """(encoding, context, continuation) of each request of an example."""
    pairs = []
    if task.metrics != (LLMC,):
        pairs += [(encoder.together, example.context, text) for text in example.continuations]
    if LLMC in task.metrics:
        pairs += [(encoder.apart, example.apart[0], text) for text in example.apart[1]]
    return pairs


def results_of(tasks: Sequence[TaskData], requests: Sequence[Request], likelihoods: Likelihoods) -> list[TaskResult]:
    """The figures of all tasks from the likelihoods of `make_requests`."""
    results, start = [], 0
    for task in tasks:
        rows = []
        for number, example in enumerate(task.examples):
            row: dict[str, Any] = {"task": task.name, "example": number, "where": example.where, "answer": example.answer}
            if task.metrics != (LLMC,):
                stop = start + len(example.continuations)
                sums = likelihoods.sums[start:stop]
                row |= {"loglikelihoods": sums.tolist(), "greedy": likelihoods.greedy[start:stop].tolist()}
                row |= hits_of(task, example, sums, bool(likelihoods.greedy[start]))
                start = stop
            if LLMC in task.metrics:
                stop = start + len(example.apart[1])
                losses = -likelihoods.sums[start:stop] / [request.scored for request in requests[start:stop]]
                hit = float(int(np.argmin(losses)) == example.answer) if np.isfinite(losses).all() else math.nan
                row |= {"mean_losses": losses.tolist(), LLMC: hit}
                start = stop
            rows.append(row)
        figures = tuple(figure(metric, np.array([row[metric] for row in rows])) for metric in task.metrics)
        results.append(TaskResult(task.name, len(rows), figures, rows))
    assert start == len(requests)
    return results


def hits_of(task: TaskData, example: Example, sums: np.ndarray, greedy: bool) -> dict[str, float]:
    """The example's contribution to each metric's mean."""
    if "perplexity" in task.metrics:
        return {"acc": float(greedy), "perplexity": float(sums[0])}
    characters = [len(choice) for choice in example.choices]
    sizes = {"acc": 1.0, "acc_norm": characters, "acc_bytes": [len(choice.encode()) for choice in example.choices]}
    wanted = {metric: size for metric, size in sizes.items() if metric in task.metrics}
    if not np.isfinite(sums).all():
        return dict.fromkeys(wanted, math.nan)
    with np.errstate(divide="ignore", invalid="ignore"):  # a cleaned ending may be empty
        return {metric: float(int(np.argmax(sums / size)) == example.answer) for metric, size in wanted.items()}


def figure(metric: str, values: np.ndarray) -> Figure:
    mean = float(values.mean())
    stderr = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    if metric == "perplexity":
        return Figure(metric, perplexity(-mean), perplexity(-mean) * stderr)
    return Figure(metric, mean, stderr)


IN_TRAINING, AFTERWARDS = "train", "evaluate"  # the origin of a record


def task_record(task: TaskData, result: TaskResult, precision: str, by: str) -> dict[str, Any]:
    """A line's content except `kind` and `step`; a metric is (value, standard error)."""
    return {
        "task": result.name,
        "examples": result.examples,
        "metrics": {f.metric: [f.value, f.stderr] for f in result.figures},
        "sources": task.sources,
        "precision": precision,
        "by": by,
    }


def append_to_run(checkpoint: Checkpoint, records: Sequence[dict[str, Any]]) -> str:
    """Appends the records to the metrics of the run around a checkpoint. Returns a line about it, "" without such a
    run. Writes nothing while a trainer holds the run: its lines and ours could mix. Raises `StorageError` if the disk
    refuses; the file is then unchanged, or has only whole lines added."""
    run = checkpoint.folder.resolve().parent.parent
    path, lock = run / METRICS_FILE, run / LOCK_FILE
    if not path.is_file() or not lock.is_file():
        return ""
    lines = [json.dumps({"kind": "evaluation", "step": checkpoint.step, **record}) for record in records]
    with storage_errors(f"writing {path}"), lock.open("a") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return f"not recorded: a trainer is at work in {run}; evaluate again when it has ended, or keep --out"
        with path.open("r+b") as file:
            # Drops a last line that a kill cut in half, as a resumed run does: it would spoil our first line.
            whole = file.read().rfind(b"\n") + 1
            file.truncate(whole)
            file.seek(whole)
            file.write("".join(line + "\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())
    return f"recorded in {path}"


def write_rows(path: Path, results: Sequence[TaskResult]) -> None:
    """Writes one JSON object per example. Raises `StorageError`."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for result in results for row in result.rows]
    with storage_errors(f"writing {path}"):
        write_durably(path, "".join(lines))
