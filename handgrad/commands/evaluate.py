"""handgrad evaluate: the loss of a checkpoint on held-out text, and its results on tasks."""

import math
import os
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from handgrad import devices
from handgrad.arena import Buffer, Plan, make_plan
from handgrad.config import STREAM
from handgrad.data.shards import Dataset
from handgrad.errors import NumericsError, UsageError
from handgrad.evaluation.likelihoods import Request, Workload
from handgrad.evaluation.load import (
    LoadedModel,
    Weights,
    check_window,
    is_taught_to_talk,
    load_model,
    machine,
    rounded_to_fp8,
    usual_window,
)
from handgrad.evaluation.loss import floor_of, held_out_loss, open_held_out
from handgrad.evaluation.records import AFTERWARDS, append_to_run, check_writable, task_record, write_rows
from handgrad.evaluation.scoring import TaskResult, make_requests, results_of
from handgrad.evaluation.tasks import TaskData, load_tasks, parse_tasks
from handgrad.format import table
from handgrad.interop.sources import open_weights
from handgrad.models import forward_buffers, named_activations
from handgrad.models.rows import KIND
from handgrad.parallel.launchers import find_rank_info
from handgrad.parallel.ranks import Ranks
from handgrad.parallel.rendezvous import Timeouts, joined
from handgrad.run.fp8_forward import CheckpointForward
from handgrad.run.packing import evaluation_packing
from handgrad.run.start import open_rank_0_first

MEMORY = "evaluation.memory"  # of the loss, then of the tasks
PROGRESS_SECONDS = 2.0
DIVERGED = "its weights have diverged; use an earlier checkpoint, or another --precision"


def run(parsed: Namespace) -> int:
    if not parse_tasks(parsed.tasks) and (parsed.out or parsed.limit):
        raise UsageError("--out and --limit belong to --tasks; name some, like --tasks hellaswag=FILE")
    info = find_rank_info(os.environ)
    device = devices.resolve_device(parsed.device, info.local_rank)
    with joined(info, device, Timeouts(parsed.join_seconds, parsed.silence_seconds, parsed.stall_seconds)) as ranks:
        lines = evaluate(parsed, device, ranks)
    if ranks.is_rank_0:
        print("\n".join(lines))
    return 0


def evaluate(parsed: Namespace, device: torch.device, ranks: Ranks) -> list[str]:
    """The lines to print, computed by all `ranks` together."""
    _, parsed.precision, dtype, ops = machine(device, parsed.precision, parsed.backend)
    source = open_rank_0_first(lambda: open_weights(parsed.checkpoint, strict=parsed.strict), ranks)
    if parsed.fp8_weights:
        source = rounded_to_fp8(source)
    check_window(parsed.context, source.shape.sequence_length)
    context = parsed.context or usual_window(source)
    tasks, requests = ranks.from_rank_0(lambda: read_tasks(parsed, source, context), "the tasks")
    dataset = None if tasks and not parsed.data else validation_data(parsed, source)

    shape = replace(source.shape, sequence_length=context)  # of the memory; the weights are the model's own
    plans: dict[str, Plan] = {}  # by the evaluation that uses the memory
    buffers: list[Buffer] = []
    work, in_fp8 = None, None
    if tasks and parsed.precision == "fp8":
        raise UsageError("tasks are scored in 16 bits, found --precision fp8; use bf16, or leave out --tasks")
    if dataset is not None:
        chunk = source.config.head_chunk_tokens
        packed = packing_of(parsed, source, dataset) != STREAM
        if parsed.precision == "fp8":
            in_fp8 = CheckpointForward(source, shape, parsed.micro_batch, device, parsed.backend, packed=packed)
            plans["loss"] = make_plan(in_fp8.activations)
            buffers += in_fp8.forward.beside
        else:
            rows = forward_buffers(shape, parsed.micro_batch, context, dtype, ops, chunk=chunk, packed=packed)
            plans["loss"] = make_plan(rows)
    if tasks:
        positions = parsed.micro_batch * context
        work = Workload(requests, shape, dtype, ops, device, positions_per_batch=positions, ranks=ranks)
        plans["tasks"] = make_plan(work.activation_buffers())
        buffers += work.buffers()
    memory_bytes = max(plan.size_bytes[KIND] for plan in plans.values())
    buffers.append(Buffer(MEMORY, (memory_bytes,), torch.uint8, KIND))
    model = load_model(source, device, dtype, ops, buffers)
    views: dict[str, dict[str, Any]] = {n: plan.lay_over({KIND: model.views[MEMORY]}) for n, plan in plans.items()}
    if in_fp8 is not None:
        model, views["loss"] = in_fp8.quantized(model, views["loss"])

    step = "" if source.checkpoint is None else f" (step {source.checkpoint.step})"
    lines = [f"checkpoint        {parsed.checkpoint}{step}{', weights rounded to fp8' if parsed.fp8_weights else ''}"]
    if dataset is not None:
        lines += loss_lines(parsed, source, model, dataset, views["loss"], ranks)
    if work is not None:
        found = work.score(
            model.weights,
            model.views | views["tasks"],
            Progress(ranks, "tasks: {:.0%} launched") if ranks.is_rank_0 else None,
        )
        results = results_of(tasks, requests, found)
        lines += ranks.from_rank_0(lambda: task_lines(parsed, source, tasks, results), "the results")
    return lines


def read_tasks(parsed: Namespace, source: Weights, context: int) -> tuple[list[TaskData], list[Request]]:
    """The tasks and their requests, read by rank 0 for all."""
    if not parsed.tasks:
        return [], []
    if parsed.out:
        check_writable(Path(parsed.out))
    tasks = load_tasks(parsed.tasks, parsed.limit)
    return tasks, make_requests(tasks, source.tokenizer, context)


def validation_data(parsed: Namespace, source: Weights) -> Dataset:
    """The data whose validation split is evaluated; raises `DataError` if it is not the model's."""
    folder = parsed.data or source.config.data
    if not folder:
        raise UsageError(f"{parsed.checkpoint} belongs to no run; give --data DIR, prepared with its tokenizer")
    talks = is_taught_to_talk(source.tokenizer, source.checkpoint)
    return open_held_out(folder, source.tokenizer, parsed.checkpoint, chat=talks)


def packing_of(parsed: Namespace, source: Weights, dataset: Dataset) -> str:
    """The packing of the documents in a window."""
    return evaluation_packing(source.config.packing, dataset, other_data=bool(parsed.data))


def loss_lines(
    parsed: Namespace, source: Weights, model: LoadedModel, dataset: Dataset, views: dict[str, Any], ranks: Ranks
) -> list[str]:
    """The validation loss in nats, as perplexity and in bits per byte."""
    stride = source.config.eval_stride if parsed.eval_stride is None else parsed.eval_stride
    act = named_activations(model.shape, views)
    context, packing = act.tokens.shape[1], packing_of(parsed, source, dataset)
    found = held_out_loss(
        model.shape,
        model.ops,
        model.weights,
        act,
        dataset,
        eval_tokens=parsed.eval_tokens,
        eval_stride=stride,
        packing=packing,
        ranks=ranks,
        progress=Progress(ranks, "loss: {:.0%}") if ranks.is_rank_0 else None,
    )
    if not math.isfinite(found.loss):
        raise NumericsError(f"the model's loss is not finite: {DIVERGED}")
    windows = f", windows of {context}" if stride or context < model.shape.sequence_length else ""
    apart = windows + (f" every {stride}" if stride else "")
    lines = [
        f"validation tokens {found.tokens} of {dataset.tokens('validation')} in {parsed.data or source.config.data}{apart}",
        f"loss              {found.loss:.4f} nats per token",
        f"perplexity        {found.perplexity:.2f}",
    ]
    if found.bits_per_byte is not None:
        lines.append(f"bits per byte     {found.bits_per_byte:.4f}")
    if floor := floor_of(dataset, packing):
        lines.append(f"source's entropy  {floor:.4f} nats per token; the loss is {found.loss / floor - 1:+.1%}")
    return lines


def task_lines(parsed: Namespace, source: Weights, tasks: list[TaskData], results: list[TaskResult]) -> list[str]:
    """The table of results; writes `--out` and the record of the run."""
    if any(figure.value != figure.value for result in results for figure in result.figures):
        raise NumericsError(f"the model's likelihoods are not finite: {DIVERGED}")
    rows = [row for result in results for row in result.lines()]
    lines = table([("task", "metric", "value", "stderr", "n"), *rows], left=2)
    lines += [note for task in tasks for note in task.notes]
    if parsed.out:
        write_rows(Path(parsed.out), results)
        lines.append(f"every example in {parsed.out}")
    if parsed.fp8_weights:  # others than the run's own
        return lines
    records = [task_record(*pair, parsed.precision, AFTERWARDS) for pair in zip(tasks, results, strict=True)]
    if source.checkpoint is not None and (message := append_to_run(source.checkpoint, records)):
        lines.append(message)
    return lines


class Progress:
    """Progress on stderr: a line that changes on a terminal, one every 20 s elsewhere. `share` is the text of the part that
    is done."""

    def __init__(self, ranks: Ranks, share: str):
        self.ranks, self.share, self.begun = ranks, share, time.monotonic()
        self.shown, self.terminal = self.begun, sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        every = PROGRESS_SECONDS if self.terminal else 10 * PROGRESS_SECONDS
        if now - self.shown < every and (done < total or self.shown == self.begun):
            return
        self.shown = now
        rate = done * self.ranks.size / max(now - self.begun, 1e-9)
        line = f"{self.share.format(done / total)}, {rate:,.0f} positions/s"
        ending = "\n" if done == total or not self.terminal else ""
        print(f"\r\x1b[K{line}" if self.terminal else line, end=ending, file=sys.stderr, flush=True)
