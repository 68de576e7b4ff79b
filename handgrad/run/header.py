"""The header of a run, as console lines and as a record for programs."""

import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import handgrad
from handgrad.data.shards import Dataset
from handgrad.evaluation.loss import floor_of, scores_all
from handgrad.format import human_bytes, human_count, memory_table
from handgrad.joins.parallel.ranks import Ranks
from handgrad.machine import devices
from handgrad.memory.rows import count_parameters
from handgrad.run.packing import mixture_lines, packing_lines, training_batches
from handgrad.settings.config import FIELDS, RunConfig
from handgrad.settings.objective import DPO
from handgrad.training.design import Batch, Design


def header_lines(
    config: RunConfig,
    design: Design,
    dataset: Dataset,
    memory_bytes: dict[str, int],
    started: str,
    ranks: Ranks,
    origin: dict[str, Any] | None = None,
    teacher: dict[str, Any] | None = None,
) -> list[str]:
    """Versions, model, data, batch, numbers, memory. `started`: how the weights start, in a word or two; `origin`: their
    source, if the run did not draw them; `teacher`: the source of a teacher's weights."""
    shape, ops, host = design.shape, design.plain_ops, design.host_plan
    lines = [
        f"handgrad {handgrad.__version__}, torch {torch.__version__}, {devices.describe(design.device)}",
        f"model      {shape.variant}{shape.num_layers} layers, {shape.num_heads} heads, {shape.channels} channels,"
        f" context {shape.sequence_length}: {human_count(count_parameters(design.all_parameters))} parameters",
    ]
    if origin:
        lines.append(f"weights    {origin_text(origin)}")
    if teacher:
        loss = "KL(student || teacher)" if design.teacher.reverse else "KL(teacher || student)"
        size = human_count(count_parameters(design.teacher.parameters))
        lines.append(f"teacher    {origin_text(teacher)}: {size} parameters; the training loss is {loss}")
    lines += freezing_lines(config, design)
    lines.append(
        f"data       {config.data}: {human_count(dataset.tokens('train'))} training and"
        f" {human_count(dataset.tokens('validation'))} validation tokens, {dataset.tokenizer.kind} vocabulary of"
        f" {shape.vocab_size} (padded to {shape.padded_vocab_size})"
    )
    lines += mixture_lines(config, dataset)
    if ranks.size > 1:
        shared = ("nothing", "master weights and moments", "master weights, moments and gradients")[config.zero]
        nodes = f" on {ranks.nodes} nodes" if ranks.nodes > 1 else ""
        lines.append(
            f"ranks      {ranks.size}{nodes}, {config.lanes // ranks.size} of {config.lanes} lanes each; shared (zero"
            f" {config.zero}): {shared}; gradients travel in {config.reduce_precision}"
        )
    if host.buffers:
        lines.append(f"offload    {' and '.join(host.size_bytes)} in host memory: {human_bytes(host.total_bytes)}")
    tokens = config.batch.tokens_before(config.steps)
    note = "(auto, for pictures)" if shape.network.pictures else devices.precision_note(design.device, config.precision)
    epochs = tokens // config.sequence_length / training_batches(config, dataset).samples_per_epoch
    lines += [
        f"batch      {step_text(design.batch, 0)}; {config.steps} steps = {human_count(tokens)} tokens,"
        f" {epochs:{'.1f' if epochs >= 0.1 else '.1g'}} epochs",
        *batch_lines(design.batch),
        *warmup_lines(config),
        *unread_lines(config),
        *packing_lines(config, dataset, origin),
        f"numbers    {config.precision} {note}, recompute {config.recompute}, {started}",
    ]
    if design.fp8 is not None:
        window = f" over {config.fp8_window} steps, margin {config.fp8_margin}" if design.fp8.delayed else ""
        gemms = design.fp8.gemms.describe(shape.num_layers, design.shape.fp8_parts)
        lines.append(f"fp8        {gemms}; gradients {config.fp8_gradients}, {config.fp8_scaling} scaling{window}")
    backend = ops.__name__.removeprefix("handgrad.ops.").split(".")[0]
    return [
        *lines,
        *dropout_lines(config, design),
        f"operations {', '.join([backend, *(f'{k}: {v}' for k, v in ops.versions().items())])}",
        "memory",
        *memory_table([memory_bytes]),
    ]


def step_text(batch: Batch, step: int) -> str:
    """The tokens of 0-based `step`, written as a product."""
    lanes = f"{batch.lanes} lanes x " if batch.lanes > 1 else ""
    micro_batch = f"{batch.micro_steps(step)} x {batch.micro_batch} x {batch.sequence_length}"
    return f"{batch.tokens(step)} tokens a step = {lanes}{micro_batch}"


def batch_lines(batch: Batch) -> list[str]:
    """Lines about the later stages of the batch; none without a batch schedule."""
    later = [stage.first_step for stage in batch.schedule.stages[1:]]
    return [f"           after step {step}: {step_text(batch, step)}" for step in later]


def warmup_lines(config: RunConfig) -> list[str]:
    """A line about a warm-up as long as the run (a preset with few steps), so that its schedule never begins."""
    if config.warmup_steps < config.steps:
        return []
    last = config.learning_rate * config.steps / config.warmup_steps
    return [
        f"warm-up    {config.warmup_steps} steps in a run of {config.steps}: the learning rate ends at {last:.2e} on its"
        f" way to {config.learning_rate:.2e}; --warmup-steps shortens it"
    ]


def unread_lines(config: RunConfig) -> list[str]:
    """Lines about settings that differ from their defaults and that this run does not read."""
    readers = (
        (f"objective {DPO}", config.objective == DPO, ("dpo_",)),
        ("a reward", bool(config.reward), ("rollouts", "answer_", "updates", "reward_seconds")),
        ("updates above 1", config.updates > 1, ("clip_ratio",)),
        ("schedule wsd or trapezoid", config.schedule in ("wsd", "trapezoid"), ("cooldown_fraction",)),
        ("precision fp8", config.precision == "fp8", ("fp8_",)),
        ("eval_tasks", bool(config.eval_tasks), ("eval_task_",)),
    )
    # Runs of version 0.1 name e4m3, their default.
    changed = [name for name, field in FIELDS.items() if getattr(config, name) not in (field.default, "e4m3")]
    unread = {reader: [name for name in changed if name.startswith(names)] for reader, reads, names in readers if not reads}
    return [f"no effect  {', '.join(names)}: read only with {reader}" for reader, names in unread.items() if names]


def origin_text(origin: dict[str, Any]) -> str:
    """The source of a run's first weights: "runs/a (checkpoint of step 500), model.safetensors SHA-256 0123456789ab"."""
    step = f" of step {origin['step']}" if "step" in origin else ""
    files = [f"{name} SHA-256 {digest[:12]}" for name, digest in origin.get("sha256", {}).items()]
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{origin.get('source')} ({origin.get('from')}{step}), {', '.join(files[:1])}{more}"


def trained_parameters(design: Design) -> int:
    return count_parameters(row for row in design.parameters if not row.frozen)


def freezing_lines(config: RunConfig, design: Design) -> list[str]:
    if not config.freeze and not config.lora:
        return []
    trained, everything = trained_parameters(design), count_parameters(design.all_parameters)
    which = f"adapters of {config.lora}" if config.lora else f"frozen: {config.freeze}"
    return [f"trained    {human_count(trained)} of {human_count(everything)} parameters; {which}"]


def dropout_lines(config: RunConfig, design: Design) -> list[str]:
    """A line about dropout's rate and its cost: the masks' arithmetic, and further passes over (N, C)."""
    if not config.dropout:
        return []
    # The forward writes and rereads a branch; the backward writes and rereads its gradient, and reads it again for the bias
    # (5 a half). Forward and backward each change the embedding in place.
    passes = 10 * config.num_layers + 4
    moved = passes * config.micro_batch * config.sequence_length * config.channels * design.dtype.itemsize
    return [
        f"dropout    {config.dropout:g} after the embedding, in attention and on both branches of a block;"
        f" masks take no memory, and a micro-batch moves {human_bytes(moved)} more"
    ]


def run_record(
    config: RunConfig,
    design: Design,
    dataset: Dataset,
    memory_bytes: dict[str, int],
    origin: dict[str, Any] | None = None,
    teacher: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The "run" line of metrics.jsonl."""
    manifest, all_scored = dataset.manifest, scores_all(dataset, config.packing)
    return {
        "time": round(time.time(), 3),
        "host": platform.node(),
        "command": command_line(sys.argv),
        "commit": commit(),
        "handgrad": handgrad.__version__,
        "torch": torch.__version__,
        "device": devices.describe(design.device),
        "precision": config.precision,
        "parameters": count_parameters(design.all_parameters),
        "trained_parameters": trained_parameters(design),
        "tokens_per_step": config.tokens_per_step,
        **({"batch_schedule": config.batch_schedule} if config.batch_schedule else {}),
        **({"packing": config.packing} if config.packed else {}),
        "steps": config.steps,
        "vocab_size": design.shape.vocab_size,
        "memory_bytes": memory_bytes,
        "data": {
            "folder": config.data,
            "source": source_of(manifest),
            "identity": dataset.identity,
            "tokenizer": dataset.tokenizer.kind,
            "train_tokens": dataset.tokens("train"),
            "validation_tokens": dataset.tokens("validation"),
            "validation_text_bytes": manifest["splits"]["validation"]["text_bytes"] if manifest and all_scored else None,
        },
        "floor_nats_per_token": floor_of(dataset, config.packing),
        "flops_per_token": design.flops_per_token,
        **({"init": origin} if origin else {}),
        **({"teacher": origin_text(teacher)} if teacher else {}),
    }


def source_of(manifest: dict[str, Any] | None) -> str:
    """The source that the user gave `handgrad prepare` for the shards; "" if unknown."""
    recipe = (manifest or {}).get("recipe")
    return str(recipe.get("source", "")) if isinstance(recipe, dict) else ""


def command_line(arguments: list[str]) -> str:
    """The command that started this process, quoted for a shell."""
    program = Path(arguments[0]).name if arguments else ""
    return shlex.join(["handgrad" if program == "__main__.py" else program, *arguments[1:]])


def commit() -> str:
    """The commit of handgrad's own checkout, with "+" appended if files differ; "" if handgrad is not a checkout.

    For a copy without history, HANDGRAD_COMMIT sets the commit."""
    root = Path(handgrad.__file__).parents[1]
    if not (root / ".git").exists():
        return os.environ.get("HANDGRAD_COMMIT", "")
    try:
        head, changes = (
            subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
            for words in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):  # no git, or another user's repository
        return ""
    return head + "+" * bool(changes)
