"""handgrad evaluate: the loss of a checkpoint on held-out text, its results on tasks, the rewards of its answers."""

import math
import os
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from handgrad.data.mixture import apart
from handgrad.data.preferences import has_pairs, pair_batches
from handgrad.data.shards import Dataset
from handgrad.errors import NumericsError, StorageError, UsageError
from handgrad.evaluation.answers import Answers
from handgrad.evaluation.likelihoods import Request, Workload
from handgrad.evaluation.load import (
    LoadedModel,
    Machine,
    Weights,
    check_window,
    data_of,
    is_taught_to_talk,
    load_model,
    machine,
    usual_window,
)
from handgrad.evaluation.loss import HeldOut, floor_of, held_out_loss, open_held_out
from handgrad.evaluation.pictures import CodesHeldOut, PicturesHeldOut, held_out
from handgrad.evaluation.preferences import held_out_pairs
from handgrad.evaluation.rewards import trusted
from handgrad.evaluation.scoring import (
    AFTERWARDS,
    TaskResult,
    append_to_run,
    make_requests,
    results_of,
    task_record,
    write_rows,
)
from handgrad.evaluation.tasks import TaskData, load_tasks, parse_tasks
from handgrad.files import check_writable
from handgrad.format import table
from handgrad.interop.sources import open_weights
from handgrad.joins.fp8.scaling import Fp8Forward
from handgrad.joins.parallel.launchers import find_rank_info
from handgrad.joins.parallel.ranks import Ranks
from handgrad.joins.parallel.rendezvous import Timeouts, joined
from handgrad.joins.preference import Preference
from handgrad.machine import devices
from handgrad.memory.arena import Buffer, make_plan
from handgrad.memory.rows import KIND, named
from handgrad.models import (
    architecture,
    document_buffers,
    forward_buffers,
    forward_rows,
    named_activations,
    parameter_table,
)
from handgrad.networks.vqvae import psnr
from handgrad.run.checkpointing import with_parts_left
from handgrad.run.open import open_rank_0_first
from handgrad.run.packing import evaluation_packing
from handgrad.run.resolve import resolve
from handgrad.settings.config import STREAM, ModelShape, check_stride

MEMORY = "evaluation.memory"  # used by the loss, then by the tasks
PROGRESS_SECONDS = 2.0
DIVERGED = "its weights have diverged; use an earlier checkpoint, or another --precision"


def run(parsed: Namespace) -> int:
    tasks = parse_tasks(parsed.tasks)
    if not tasks and (parsed.out or parsed.limit):
        raise UsageError("--out and --limit belong to --tasks; name some, like --tasks hellaswag=FILE")
    if tasks and parsed.precision == "fp8":
        raise UsageError("tasks are scored in 16 bits, found --precision fp8; use bf16, or leave out --tasks")
    info = find_rank_info(os.environ)
    device = devices.resolve_device(parsed.device, info.local_rank)
    with joined(info, device, Timeouts(parsed.join_seconds, parsed.silence_seconds, parsed.stall_seconds)) as ranks:
        lines = evaluate(parsed, device, ranks)
    if ranks.is_rank_0:
        print("\n".join(lines))
    return 0


def evaluate(parsed: Namespace, device: torch.device, ranks: Ranks) -> list[str]:
    """The lines to print, computed by all `ranks` together."""
    tasks = ranks.from_rank_0(lambda: read_tasks(parsed), "the tasks")  # fails before it downloads a model
    source = open_rank_0_first(lambda: open_weights(parsed.checkpoint, strict=parsed.strict), ranks)
    on = machine(device, source.shape.network.precision(parsed.precision), parsed.backend)
    check_window(parsed.context, source.shape)
    context = parsed.context or usual_window(source)
    requests = ranks.from_rank_0(lambda: make_requests(tasks, source.tokenizer, context), "the requests") if tasks else []
    rewarded = parsed.reward or (trusted(source.config.reward) if not tasks and not parsed.data else "")
    dataset = None if rewarded or (tasks and not parsed.data) else validation_data(parsed, source)
    if dataset is not None:
        check_stride(stride_of(parsed, source), context, "context")

    shape = replace(source.shape, sequence_length=context)  # sizes the memory; the weights keep the model's shape
    parts: list[LossPart | TasksPart | Answers] = []
    if dataset is not None:
        parts.append(LossPart(parsed, source, dataset, shape, on, ranks))
    if tasks:
        parts.append(TasksPart(parsed, source, tasks, requests, shape, on, ranks))
    if rewarded:
        parts.append(Answers(source, parsed.data, rewarded, parsed.answer_tokens, parsed.answer_stop, shape, on, ranks))
    memory_bytes = max(part.plan.size_bytes[KIND] for part in parts)
    buffers = [*(buffer for part in parts for buffer in part.beside), Buffer(MEMORY, (memory_bytes,), torch.uint8, KIND)]
    model = load_model(source, device, on.dtype, on.ops, buffers)

    step = "" if source.checkpoint is None else f" (step {source.checkpoint.step})"
    lines = [f"checkpoint        {parsed.checkpoint}{step}"]
    for part in parts:
        lines += part.lines(model, part.plan.lay_over({KIND: model.views[MEMORY]}))
    return lines


def read_tasks(parsed: Namespace) -> list[TaskData]:
    """Reads the tasks. Raises the errors of their files, and an error for an `--out` that cannot be written."""
    if parsed.out:
        check_writable(Path(parsed.out))
    return load_tasks(parsed.tasks, parsed.limit) if parsed.tasks else []


def stride_of(parsed: Namespace, source: Weights) -> int:
    """The tokens from one validation window to the next: the number asked for, or the run's."""
    return source.config.eval_stride if parsed.eval_stride is None else parsed.eval_stride


def validation_data(parsed: Namespace, source: Weights) -> Dataset:
    """The data to evaluate on. Raises `UsageError` if none are known, `DataError` if they do not suit the model."""
    folder = parsed.data or source.config.data
    if not folder:
        raise UsageError(f"{parsed.checkpoint} belongs to no run; give --data DIR, prepared with its tokenizer")
    if not parsed.data and source.checkpoint is not None:
        data_of(source.checkpoint, needed=True)
    talks = is_taught_to_talk(source.tokenizer, source.checkpoint)
    return open_held_out(folder, source.tokenizer, parsed.checkpoint, chat=talks)


class LossPart:
    """The loss on the validation split: plans its memory, then computes its lines. `plan`: the memory that the parts share;
    `beside`: the buffers that only this part uses."""

    def __init__(self, parsed: Namespace, source: Weights, dataset: Dataset, shape: ModelShape, on: Machine, ranks: Ranks):
        """`shape`: the model's, with the length of a window."""
        self.parsed, self.source, self.dataset, self.ranks = parsed, source, dataset, ranks
        self.packing = evaluation_packing(source.config.packing, dataset, other_data=bool(parsed.data))
        packed = self.packing != STREAM
        self.fp8: CheckpointForward | None = None
        if on.precision == "fp8":
            self.fp8 = CheckpointForward(source, shape, parsed.micro_batch, on.device, parsed.backend, packed=packed)
            self.plan, self.beside = make_plan(self.fp8.activations), list(self.fp8.forward.beside)
        else:
            sizes, chunk = (parsed.micro_batch, shape.sequence_length), source.config.head_chunk_tokens
            rows = forward_buffers(shape, *sizes, on.dtype, on.ops, chunk=chunk, packed=packed)
            self.plan, self.beside = make_plan(rows), []

    def lines(self, model: LoadedModel, views: dict[str, Any]) -> list[str]:
        """The loss in nats, as perplexity and in bits per byte. Raises `NumericsError` for one that is not finite."""
        parsed, config, dataset = self.parsed, self.source.config, self.dataset
        if self.fp8 is not None:
            model, views = self.fp8.quantized(model, views)
        stride = stride_of(parsed, self.source)
        act = named_activations(model.shape, views)
        context = act.tokens.shape[1]
        progress = Progress(self.ranks, "loss: {:.0%}") if self.ranks.is_rank_0 else None
        forward = model.shape, model.ops, model.weights, act
        told: dict[str, Any] = {"ranks": self.ranks, "progress": progress}
        if has_pairs(dataset):
            about = Preference(config.dpo_beta, config.dpo_smoothing)
            batches = pair_batches(dataset, "validation", context, 0, shuffle=False)
            pairs = held_out_pairs(*forward, batches, about, most_tokens=parsed.eval_tokens, **told)
            return [
                f"validation pairs  {pairs.pairs} in {parsed.data or config.data}",
                f"loss              {pairs.loss:.4f} nats per pair",
                f"accuracy          {pairs.accuracy:.1%}",
                f"margin            {pairs.margin:+.4f}",
            ]
        told |= {"packing": self.packing, "eval_tokens": parsed.eval_tokens}
        if dataset.codes and len(apart(dataset)) == 1:
            result = held_out(*forward, dataset, **told)
        else:
            result = held_out_loss(*forward, dataset, eval_stride=stride, **told)
        if not math.isfinite(result.loss):
            raise NumericsError(f"the model's loss is not finite: {DIVERGED}")
        if not isinstance(result, HeldOut):
            return self.lines_of_pictures(result)
        windows = f", windows of {context}" if stride or context < model.shape.sequence_length else ""
        spacing = windows + (f" every {stride}" if stride else "")
        lines = [
            f"validation tokens {result.tokens} of {dataset.tokens('validation')} in {parsed.data or config.data}{spacing}",
            f"loss              {result.loss:.4f} nats per token",
            f"perplexity        {result.perplexity:.2f}",
        ]
        if result.bits_per_byte is not None:
            lines.append(f"bits per byte     {result.bits_per_byte:.4f}")
        for name, one in result.sets.items():
            bits = "" if one.bits_per_byte is None else f", {one.bits_per_byte:.4f} bits per byte"
            lines.append(f"loss of {name:<9} {one.loss:.4f} nats per token{bits}, {one.tokens} tokens")
        return lines + self.floor_lines(result.loss)

    def floor_lines(self, loss: float) -> list[str]:
        floor = floor_of(self.dataset, self.packing)
        return [f"source's entropy  {floor:.4f} nats per token; the loss is {loss / floor - 1:+.1%}"] if floor else []

    def lines_of_pictures(self, result: CodesHeldOut | PicturesHeldOut) -> list[str]:
        codes, data = self.dataset.codes, self.parsed.data or self.source.config.data
        assert codes is not None
        if isinstance(result, CodesHeldOut):
            used = (result.uses > 0).sum()
            return [
                f"pictures          {result.pictures} in {data}",
                f"squared error     {result.loss:.6f} of a byte, on a scale from -1 to 1; PSNR {psnr(result.loss):.2f} dB",
                f"codes             {used} of {len(result.uses)} in use; perplexity of codes {result.perplexity:.1f}",
            ]
        loss, bits = result.code_loss, result.code_loss / math.log(2) / 3  # of a channel: a pixel has three
        of_pixels = f"pixels            {loss:.4f} nats per pixel, {bits:.4f} bits per dimension"
        of_codes = f"codes             {loss:.4f} nats per code, {loss * codes.count:.2f} per picture"
        lines = [
            f"validation tokens {result.tokens} of {self.dataset.tokens('validation')} in {data}",
            f"loss              {result.loss:.4f} nats per token",
            of_codes if codes.decoder else of_pixels,
        ]
        if result.other_loss is not None:
            lines.append(f"{'captions' if codes.captions else 'classes':<17} {result.other_loss:.4f} nats per token")
        return lines + self.floor_lines(result.loss)


class TasksPart:
    """The results on tasks: plans their memory, then computes their lines. `plan` and `beside`: as in `LossPart`."""

    def __init__(
        self,
        parsed: Namespace,
        source: Weights,
        tasks: list[TaskData],
        requests: list[Request],
        shape: ModelShape,
        on: Machine,
        ranks: Ranks,
    ):
        """`shape`: the model's, with the length of a window."""
        self.parsed, self.source, self.tasks, self.requests, self.ranks = parsed, source, tasks, requests, ranks
        self.precision = on.precision
        positions = parsed.micro_batch * shape.sequence_length
        self.work = Workload(requests, shape, on.dtype, on.ops, on.device, positions_per_batch=positions, ranks=ranks)
        self.plan, self.beside = make_plan(self.work.activation_buffers()), list(self.work.buffers())

    def lines(self, model: LoadedModel, views: dict[str, Any]) -> list[str]:
        """The table of results and notes about it, on all ranks. `views`: the views of `plan`."""
        progress = Progress(self.ranks, "tasks: {:.0%} launched") if self.ranks.is_rank_0 else None
        results = results_of(self.tasks, self.requests, self.work.score(model.weights, model.views | views, progress))
        return self.ranks.from_rank_0(lambda: self.written(results), "the results")

    def written(self, results: list[TaskResult]) -> list[str]:
        """The table of results; writes `--out` and the record of the run."""
        if any(figure.value != figure.value for result in results for figure in result.figures):
            raise NumericsError(f"the model's likelihoods are not finite: {DIVERGED}")
        rows = [row for result in results for row in result.lines()]
        lines = table([("task", "metric", "value", "stderr", "n"), *rows], left=2)
        lines += [note for task in self.tasks for note in task.notes]
        if self.parsed.out:
            write_rows(Path(self.parsed.out), results)
            lines.append(f"every example in {self.parsed.out}")
        records = [task_record(*pair, self.precision, AFTERWARDS) for pair in zip(self.tasks, results, strict=True)]
        if self.source.checkpoint is not None:
            try:
                lines += filter(None, [append_to_run(self.source.checkpoint, records)])
            except StorageError as error:  # as in a folder of models that others keep
                lines.append(f"not recorded: {error}")
        return lines


class Progress:
    """Progress on stderr: a line that a terminal updates, one every 20 s elsewhere. `share`: the share's format."""

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


class CheckpointForward:
    """Runs the GEMMs of a run's checkpoint as the run did: the same ones in fp8, with the same scales."""

    def __init__(self, source: Weights, shape: ModelShape, batch: int, device: torch.device, backend: str, *, packed: bool):
        """For `batch` samples of `shape.sequence_length` tokens at once. Raises `UsageError` for weights without scales."""
        manifest = {} if source.checkpoint is None else source.checkpoint.manifest
        if not manifest.get("fp8"):
            name = source.origin["source"]
            raise UsageError(f"{name} has no fp8 scales: expected a checkpoint of a run in fp8; use --precision bf16")
        if source.config.lora:
            name = source.origin["source"]
            raise UsageError(f"{name} has adapters, which are merged here, beside weights in fp8; use --precision bf16")
        self.saved, self.model = manifest["fp8"], architecture(shape)
        config = replace(source.config, micro_batch=batch, sequence_length=shape.sequence_length, backend=backend)
        design = resolve(with_parts_left(config, manifest), shape.vocab_size, device=device)
        length, chunk = shape.sequence_length, config.head_chunk_tokens
        rows = tuple(forward_rows(shape, batch, length, design.dtype, design.ops, chunk=chunk))
        self.forward = Fp8Forward(design.fp8, parameter_table(shape), rows, shape.forms)
        documents = document_buffers(self.model, batch, length) if packed else []
        self.activations: list[Buffer] = [*self.forward.activations, *documents]

    def quantized(self, loaded: LoadedModel, activations: dict[str, Tensor]) -> tuple[LoadedModel, dict[str, Any]]:
        """(the loaded model with its weights in fp8, the views of its activations and of its fp8 tensors)."""
        table, flat, layers = parameter_table(loaded.shape), loaded.views["parameters"], loaded.shape.num_layers
        weights = {row.name: row.view(flat) for row in table}
        tensors = self.forward.tensors(loaded.ops, loaded.views | activations, weights, self.saved)
        return replace(loaded, weights=named(self.model.Weights, weights | tensors, layers)), activations | tensors
