"""Plans a run before it starts: memory by component, settings that fit, a bound on its speed, here or on other GPUs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch

from handgrad.data.mixture import named_sets
from handgrad.errors import DataError, HandgradError
from handgrad.format import human_bytes, human_count, human_flops, human_seconds, memory_table
from handgrad.machine import devices
from handgrad.machine.gpus import GPUS, Gpu
from handgrad.memory.rows import count_parameters
from handgrad.networks import NETWORKS
from handgrad.run.checkpointing import copy_plans
from handgrad.run.checks import can_offload, check_offload, check_shared_gradients, checkpoint_bytes, most_checkpoints
from handgrad.run.folder import as_begun, model_of, resolve_lanes
from handgrad.run.header import batch_lines, dropout_lines, freezing_lines
from handgrad.run.packing import data_of, resolve_objective, resolve_packing, with_answers
from handgrad.run.resolve import largest_micro_batch, memory_bytes, resolve, with_precision, with_tuned_gemms
from handgrad.settings.config import GPT2_VOCABULARY, RunConfig, check
from handgrad.tools.forecast import Forecast, forecast, named_gpu, resolve_for, resolved_on
from handgrad.tools.speeds import gemm_flops, step_time
from handgrad.training.design import Design

RECOMPUTE_LEVELS = (0, 1, 2, 3)
SAMPLED = "rollouts   each step samples its answers first, which is not in the speeds below"
NOTE = (
    "measured: this run's speed is on record; estimated: from the data sheet, by the model of docs/planning.md.\n"
    "Steps alone: validations and checkpoints come on top. kWh: the boards alone, at their power limits."
)


@dataclass(frozen=True)
class Candidate:
    """The run at one recompute level, with or without offload."""

    config: RunConfig
    memory_bytes: int  # of the device
    host_bytes: int
    moments_bytes: int  # on the device or the host
    seconds: float | None  # per step; None: unknown

    @property
    def flags(self) -> str:
        return f"--recompute {self.config.recompute}" + " --offload true" * self.config.offload


def levels_of(config: RunConfig) -> tuple[int, ...]:
    """The levels of recomputation that the network has."""
    return (0,) if NETWORKS[config.architecture].pictures else RECOMPUTE_LEVELS


def candidates(
    config: RunConfig,
    device: torch.device,
    ranks: int,
    design_of: Callable[[RunConfig], Design],
    seconds_of: Callable[[RunConfig, Design], float] | None,
) -> list[Candidate]:
    """The run at each recompute level, without and, if it can, with offload; the fastest first, if times are known."""
    choices = []
    for offload in (False, True) if can_offload(config, device, ranks) else (False,):
        for level in levels_of(config):
            changed = replace(config, recompute=level, offload=offload)
            design = design_of(changed)
            moments = sum(buffer.size_bytes for buffer in design.buffers if buffer.kind == "moments")
            memory = sum(memory_bytes(design).values()), design.host_plan.total_bytes, moments
            choices.append(Candidate(changed, *memory, seconds_of(changed, design) if seconds_of else None))
    return sorted(choices, key=lambda candidate: candidate.seconds or 0.0)


def first_fitting(choices: list[Candidate], available: int) -> Candidate | None:
    return next((candidate for candidate in choices if candidate.memory_bytes <= available), None)


def fitting_lines(choices: list[Candidate], available: int) -> Iterator[str]:
    """A line for each candidate, the flags of the first that fits, and other ways to save memory."""
    config = choices[0].config
    order = "fastest first" if choices[0].seconds else "the cheapest first"
    yield f"same bits  within {human_bytes(available)} at micro-batch {config.micro_batch}, {order}"
    for candidate in choices:
        fits = "fits" if candidate.memory_bytes <= available else "-"
        time = f"{candidate.seconds / choices[0].seconds - 1:+8.1%}" if candidate.seconds and choices[0].seconds else ""
        host = f", {human_bytes(candidate.host_bytes)} of the host" if candidate.host_bytes else ""
        yield f"  {candidate.flags:<30}{human_bytes(candidate.memory_bytes):>11}  {fits:<4} {time}{host}".rstrip()
    chosen = first_fitting(choices, available)
    yield f"take       {chosen.flags if chosen else 'none of these; a smaller --micro-batch (other bits) or model'}"
    if config.moments == "fp32" and config.optimizer == "adamw":
        half = choices[0].moments_bytes // 2
        yield f"or         --moments bf16 takes {human_bytes(half)} less, where the moments lie, with other bits"


def as_it_runs(config: RunConfig, vocab_size: int, *, named: bool) -> tuple[RunConfig, int, list[str]]:
    """(`config` as `train` would use it, vocabulary size, lines about both).

    A run that has begun in `config.out` keeps the settings of its start, and the data choose the packing. `vocab_size` 0
    means the data's vocabulary, or GPT-2's if there are no data yet. `named`: the user named the data, so a folder
    without shards raises `DataError`, unless `vocab_size` is given as well."""
    (config, begun), dataset, lines = as_begun(config), None, list[str]()
    if config.reward or any(Path(folder).exists() for folder in named_sets(config.data)):
        try:
            dataset = data_of(config, model_of(config))
            config = replace(config, packing=resolve_packing(config.packing, dataset))
            config = check(with_answers(replace(config, objective=resolve_objective(config, dataset)), dataset))
        except DataError:
            if named and not vocab_size:
                raise
    if not vocab_size:
        vocab_size = dataset.tokenizer.vocab_size if dataset else GPT2_VOCABULARY
        whose = f"from {config.data}" if dataset else f"GPT-2's: there is no data in {config.data}"
        lines.append(f"vocabulary {vocab_size} words, {whose}")
    return config, vocab_size, [*lines, *begun]


def describe_plan(config: RunConfig, vocab_size: int, ranks: int = 1, fit: int = 0) -> list[str]:
    """The plan for this machine, as lines; memory is per rank, for `ranks` equal ranks. `fit`: memory limit in bytes,
    instead of all free memory. Raises `ConfigError` for lanes that the ranks cannot share equally."""
    device = devices.resolve_device(config.device)
    config = with_tuned_gemms(with_precision(config, device), device)
    config = check(replace(config, lanes=resolve_lanes(config, ranks)))
    check_shared_gradients(config, ranks)
    check_offload(config, device, ranks)
    resolved = cache(resolve)  # the search for a micro-batch and `fit` ask for some of these designs again
    designs = [resolved(replace(config, recompute=level), vocab_size, ranks=ranks) for level in levels_of(config)]
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
        choices = candidates(config, device, ranks, lambda other: resolved(other, vocab_size, ranks=ranks), None)
        lines += fitting_lines(choices, fit)
    return lines


def fits_lines(
    config: RunConfig, vocab_size: int, ranks: int, available: int, there: str, resolved: Callable[..., Design]
) -> Iterator[str]:
    """A line for each recompute level about the largest micro-batch that fits. `resolved`: as in `largest_micro_batch`."""
    for level in levels_of(config):
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
        *([SAMPLED] if config.reward else []),
        *settings_lines(config, design),
    ]


def settings_lines(config: RunConfig, design: Design) -> list[str]:
    """Lines about the sizes, the optimizer and its rates, which a preset sets."""
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
    """Lines about disk space, and about memory by component. `designs`: one for each of `levels_of(config)`."""
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
        f"{memory:<18}" + "".join(f"{f'recompute {level}':>16}" for level in levels_of(config)),
        *memory_table([memory_bytes(design) for design in designs]),
        "",
    ]


# GPUs that need not be in this machine.


def describe_gpu(
    config: RunConfig, vocab_size: int, gpu: str, ranks: int = 1, price: float | None = None, fit: int = 0
) -> list[str]:
    """The plan for `ranks` GPUs of this name. Raises the errors of `forecast`."""
    _, spec = named_gpu(gpu)
    fitted = fitted_to(config, spec, vocab_size, ranks) if fit else []
    asked = (c for c in fitted if (c.config.recompute, c.config.offload) == (config.recompute, config.offload))
    if chosen := first_fitting([*asked, *fitted], fit):
        config = chosen.config
    expected = forecast(config, vocab_size, gpu, ranks=ranks, price=price, fit=fit)
    config = replace(resolved_on(config, spec, ranks), micro_batch=expected.micro_batch)
    resolved = partial(resolve_for, spec)
    designs = [resolved(replace(config, recompute=level), vocab_size, ranks=ranks) for level in levels_of(config)]
    peak = f"{spec.flops(config.precision) / 1e12:g} TFLOP/s in {config.precision}"
    source = f" (benchmarks/results/{expected.source}.json)" if expected.source else ""
    return [
        *run_lines(config, designs[0]),
        f"gpu        {f'{ranks} x ' if ranks > 1 else ''}{spec.title}: {spec.memory_gib:g} GiB,"
        f" {peak}, {spec.terabytes_per_second:g} TB/s, {spec.watts} W",
        *memory_lines(config, designs, ranks),
        *fits_lines(config, vocab_size, ranks, expected.available_bytes, "allowed" if fit else "usable", resolved),
        *(fitting_lines(fitted, fit) if fit else []),
        "",
        HEADING,
        row(expected),
        f"{'measured' + source if expected.measured else 'estimated, by the model of docs/planning.md'}; steps alone",
    ]


def fitted_to(config: RunConfig, gpu: Gpu, vocab_size: int, ranks: int) -> list[Candidate]:
    """The run's candidates on `ranks` of these GPUs, fastest first by the model of docs/planning.md."""
    return candidates(
        resolved_on(config, gpu, ranks),
        torch.device("meta"),
        ranks,
        lambda other: resolve_for(gpu, other, vocab_size, ranks),
        lambda other, design: step_time(gpu, other, design, ranks).total,
    )


def describe_gpus(
    config: RunConfig, vocab_size: int, ranks: int = 1, price: float | None = None, fit: int = 0
) -> list[str]:
    """A row for every GPU; if a GPU cannot run it, its row has the reason. None for an autoencoder: the model of speeds
    knows no convolutions."""
    if NETWORKS[config.architecture].pictures:
        return []
    lines = [HEADING]
    for name in GPUS:
        try:
            lines.append(row(forecast(config, vocab_size, name, ranks=ranks, price=price, fit=fit)))
        except HandgradError as error:
            lines.append(f"{name:<{COLUMNS[0][-1]}}{error}")
    return [*lines, *([f"{ranks} GPUs each; memory and micro-batch per GPU"] if ranks > 1 else []), NOTE]


def row(run: Forecast) -> str:
    return cells([text(run) for _, text, _ in COLUMNS]) + ("  measured" if run.measured else "  estimated")


def cells(texts: Sequence[str]) -> str:
    """A line of the table, with the first column left-aligned and the others right-aligned."""
    aligned = [f"{text:>{width}}" for text, (_, _, width) in zip(texts, COLUMNS, strict=True)]
    return f"{texts[0]:<{COLUMNS[0][-1]}}" + " ".join(aligned[1:])


def energy(kilowatt_hours: float) -> str:
    """12345 -> '12,345', 7e-7 -> '<0.01'."""
    if kilowatt_hours < 0.01:
        return "<0.01"
    return f"{kilowatt_hours:.3g}" if kilowatt_hours < 1000 else f"{kilowatt_hours:,.0f}"


def duration(seconds: float) -> str:
    """90 -> '1.5 min', 9e4 -> '25 hours', 1e6 -> '11.6 days', 3e-3 -> '<1 s'."""
    if seconds < 1:
        return "<1 s"
    for size, unit, least in ((86400, "days", 2), (3600, "hours", 1), (60, "min", 1)):
        if seconds >= least * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


COLUMNS: list[tuple[str, Callable[[Forecast], str], int]] = [  # heading, text, width
    ("GPU", lambda run: run.gpu, 11),
    ("precision", lambda run: run.precision, 9),
    ("micro-batch", lambda run: str(run.micro_batch), 11),
    ("memory", lambda run: human_bytes(run.memory_bytes), 11),
    ("tokens/s", lambda run: human_count(run.tokens_per_second), 10),
    ("time", lambda run: duration(run.seconds), 10),
    ("kWh", lambda run: energy(run.kilowatt_hours), 9),
    ("dollars", lambda run: "-" if run.dollars is None else f"{run.dollars:,.2f}", 11),
]
HEADING = cells([heading for heading, _, _ in COLUMNS])
