"""The cost of a run before it starts: memory by component, the largest micro-batch that fits, a bound on its speed."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from handgrad.data.shards import open_dataset
from handgrad.errors import DataError
from handgrad.format import human_bytes, human_count, human_flops, human_seconds, memory_table
from handgrad.machine import devices
from handgrad.memory.rows import count_parameters
from handgrad.run.checks import check_offload, check_shared_gradients, checkpoint_bytes, most_checkpoints
from handgrad.run.folder import as_begun, model_of, resolve_lanes
from handgrad.run.header import batch_lines, dropout_lines, freezing_lines
from handgrad.run.host_copy import copy_plans
from handgrad.run.packing import resolve_packing
from handgrad.run.resolve import largest_micro_batch, memory_bytes, resolve, with_precision, with_tuned_gemms
from handgrad.settings.config import GPT2_VOCABULARY, RunConfig, check
from handgrad.tools.fitting import RECOMPUTE_LEVELS, candidates, fitting_lines
from handgrad.tools.rates import gemm_flops
from handgrad.training.design import Design


def as_it_runs(config: RunConfig, vocab_size: int, *, given: bool) -> tuple[RunConfig, int, list[str]]:
    """(`config` as `train` would go on with it, the size of its vocabulary, lines about both).

    The run in `config.out`, if one has begun, keeps what it chose at its start, and the data choose the packing. 0 words
    stand for the data's, or GPT-2's where there are no data yet. `given`: the user named the data, so that a folder
    without shards raises `DataError`, unless `vocab_size` is given as well.
    """
    (config, begun), dataset, lines = as_begun(config), None, list[str]()
    if Path(config.data).exists():
        try:
            dataset = open_dataset(config.data, model_of(config))
            config = check(replace(config, packing=resolve_packing(config.packing, dataset)))
        except DataError:
            if given and not vocab_size:
                raise
    if not vocab_size:
        vocab_size = dataset.tokenizer.vocab_size if dataset else GPT2_VOCABULARY
        whose = f"from {config.data}" if dataset else f"GPT-2's: there is no data in {config.data}"
        lines.append(f"vocabulary {vocab_size} words, {whose}")
    return config, vocab_size, [*lines, *begun]


def describe_plan(config: RunConfig, vocab_size: int, ranks: int = 1, fit: int = 0) -> list[str]:
    """The plan for this machine, as lines; memory is for one of `ranks` equal ranks. `fit`: bytes that the run may
    take, instead of all that are free. Raises `ConfigError` for lanes that the ranks cannot share."""
    device = devices.resolve_device(config.device)
    config = with_tuned_gemms(with_precision(config, device), device)
    config = check(replace(config, lanes=resolve_lanes(config, ranks)))
    check_shared_gradients(config, ranks)
    check_offload(config, device, ranks)
    resolved = cache(resolve)  # the search for a micro-batch and `fit` ask for some of these designs again
    designs = [resolved(replace(config, recompute=level), vocab_size, ranks=ranks) for level in RECOMPUTE_LEVELS]
    design = designs[0]
    flops_per_token = design.flops_per_token
    tokens = config.batch.tokens_before(config.steps)
    rate, kind = gemm_flops(device, design.dtype), "bf16" if config.precision == "fp8" else config.precision
    lines = [
        *run_lines(config, design),
        f"device     {devices.describe(device)}; a large {kind} product runs at {human_flops(rate)}/s here",
        *dropout_lines(config, design),
        f"at best    {human_count(ranks * rate / flops_per_token)} tokens/s,"
        f" {human_seconds(tokens * flops_per_token / rate / ranks)} in all{f' on {ranks} such' if ranks > 1 else ''};"
        " expect half to three quarters of it",
        *memory_lines(config, designs, ranks),
    ]
    available, there = (fit, "allowed") if fit else (devices.available_bytes(device), "free")
    if available is not None:
        lines += fits_lines(config, vocab_size, ranks, available, there, resolved)
    if fit:
        found = candidates(config, device, ranks, lambda other: resolved(other, vocab_size, ranks=ranks), None)
        lines += fitting_lines(found, fit)
    return lines


def fits_lines(
    config: RunConfig, vocab_size: int, ranks: int, available: int, there: str, resolved: Callable[..., Design]
) -> Iterator[str]:
    """A line for each recompute level about the largest micro-batch that fits. `resolved`: as in `largest_micro_batch`."""
    for level in RECOMPUTE_LEVELS:
        fitting = largest_micro_batch(replace(config, recompute=level), vocab_size, available, ranks, resolved=resolved)
        whole = " (a whole step at once)" if fitting * config.lanes * config.sequence_length == config.batch.largest else ""
        advice = f"--micro-batch {fitting}{whole}" if fitting else "not even one sample at a time"
        yield f"fits       {human_bytes(available)} {there} at recompute {level}: {advice}"


def run_lines(config: RunConfig, design: Design) -> list[str]:
    """Lines about the model and the run, with their FLOPs."""
    flops_per_token = design.flops_per_token
    tokens = config.batch.tokens_before(config.steps)
    lanes = f"{config.lanes} lanes x " if config.lanes > 1 else ""
    return [
        f"model      {design.shape.variant}{human_count(count_parameters(design.all_parameters))} parameters,"
        f" {human_flops(flops_per_token)} per token, forward and backward",
        f"run        {config.steps} steps of {config.tokens_per_step} tokens = {lanes}{config.micro_steps} x"
        f" {config.micro_batch} x {config.sequence_length}: {human_count(tokens)} tokens,"
        f" {human_flops(tokens * flops_per_token)}",
        *(freezing_lines(config, design) if config.lora else []),
        *batch_lines(design.batch),
        *settings_lines(config, design),
    ]


def settings_lines(config: RunConfig, design: Design) -> list[str]:
    """The sizes, the optimizer and its rates, which a preset chooses."""
    shape = design.shape
    matrices = f", of matrices {config.matrix_learning_rate:g}" if config.matrix_learning_rate else ""
    others = {row.name.rpartition(".")[2]: row.rate for row in design.parameters if row.rate != 1}
    more = "".join(f", of {name} x {rate:g}" for name, rate in others.items())
    over = f" over the last {config.cooldown_fraction:.0%}" if config.schedule in ("wsd", "trapezoid") else ""
    final = "" if config.schedule == "constant" else f" to {config.final_learning_rate_fraction:g} of the peak"
    return [
        f"sizes      {shape.num_layers} layers of {shape.channels} channels, {shape.num_heads} heads of {shape.head_width},"
        f" context {shape.sequence_length}",
        f"optimizer  {config.optimizer}, learning rate {config.learning_rate:.3g}{matrices}{more},"
        f" weight decay {config.weight_decay:g}",
        f"schedule   {config.schedule}{final}{over}, after {config.warmup_steps} steps of warm-up",
    ]


def memory_lines(config: RunConfig, designs: list[Design], ranks: int) -> list[str]:
    """The disk, and the memory by component; `designs`: one for each of `RECOMPUTE_LEVELS`."""
    checkpoints = most_checkpoints(config)
    memory = "memory per rank" if ranks > 1 else "memory"
    copy = max(plan.total_bytes for plan in copy_plans(designs[0], ranks))
    each = " per rank" if ranks > 1 else ""
    host = f"host       {human_bytes(copy)}{each}: the copy from which saves are written behind training"
    state = designs[0].host_plan.total_bytes
    return [
        f"disk       {human_bytes(checkpoints * checkpoint_bytes(designs[0]))}: at most {checkpoints} checkpoints",
        *([host] if config.async_save else []),
        *([f"host       {human_bytes(state)}: {' and '.join(designs[0].host_plan.size_bytes)}"] if state else []),
        "",
        f"{memory:<18}" + "".join(f"{f'recompute {level}':>16}" for level in RECOMPUTE_LEVELS),
        *memory_table([memory_bytes(design) for design in designs]),
        "",
    ]
