"""`handgrad plan` for GPUs that this machine need not have: one in detail, or a table with a row for each."""

from dataclasses import replace
from functools import partial

import torch

from handgrad.errors import HandgradError
from handgrad.format import human_bytes, human_count
from handgrad.machine.gpus import GPUS, Gpu
from handgrad.settings.config import RunConfig
from handgrad.tools.absent import resolve_for
from handgrad.tools.fitting import RECOMPUTE_LEVELS, Candidate, candidates, chosen_of, fitting_lines
from handgrad.tools.forecast import Forecast, forecast, named_gpu, resolved_on
from handgrad.tools.plan import fits_lines, memory_lines, run_lines
from handgrad.tools.roofline import step_time

WIDTHS = (11, 9, 11, 11, 10, 10, 9, 11)
NOTE = (
    "measured: this run's speed is on record; estimated: from the data sheet, by the model of docs/planning.md.\n"
    "Steps alone: validations and checkpoints come on top. kWh: the boards alone, at their power limits."
)


def describe_gpu(
    config: RunConfig, vocab_size: int, gpu: str, ranks: int = 1, price: float | None = None, fit: int = 0
) -> list[str]:
    """The plan for `ranks` GPUs of this name. Raises the errors of `forecast`."""
    _, spec = named_gpu(gpu)
    fitted = fitted_to(config, spec, vocab_size, ranks) if fit else []
    if chosen := chosen_of(fitted, config, fit):
        config = chosen.config
    found = forecast(config, vocab_size, gpu, ranks=ranks, price=price, fit=fit)
    config = replace(resolved_on(config, spec, ranks), micro_batch=found.micro_batch)
    resolved = partial(resolve_for, spec)
    designs = [resolved(replace(config, recompute=level), vocab_size, ranks=ranks) for level in RECOMPUTE_LEVELS]
    peak = f"{spec.flops(config.precision) / 1e12:g} TFLOP/s in {config.precision}"
    source = f" (benchmarks/results/{found.source}.json)" if found.source else ""
    return [
        *run_lines(config, designs[0]),
        f"gpu        {f'{ranks} x ' if ranks > 1 else ''}{spec.title}: {spec.memory_gib:g} GiB,"
        f" {peak}, {spec.terabytes_per_second:g} TB/s, {spec.watts} W",
        *memory_lines(config, designs, ranks),
        *fits_lines(config, vocab_size, ranks, found.available_bytes, "allowed" if fit else "usable", resolved),
        *(fitting_lines(fitted, fit) if fit else []),
        "",
        heading(),
        row(found),
        f"{'measured' + source if found.measured else 'estimated, by the model of docs/planning.md'}; steps alone",
    ]


def fitted_to(config: RunConfig, gpu: Gpu, vocab_size: int, ranks: int) -> list[Candidate]:
    """The run's settings on `ranks` of these GPUs, fastest first by the model of docs/planning.md."""
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
    """A row for every GPU; one that cannot run it says why."""
    lines = [heading()]
    for name in GPUS:
        try:
            lines.append(row(forecast(config, vocab_size, name, ranks=ranks, price=price, fit=fit)))
        except HandgradError as error:
            lines.append(f"{name:<{WIDTHS[0]}}{error}")
    return [*lines, *([f"{ranks} GPUs each; memory and micro-batch per GPU"] if ranks > 1 else []), NOTE]


def heading() -> str:
    return cells("GPU", "precision", "micro-batch", "memory", "tokens/s", "time", "kWh", "dollars")


def row(found: Forecast) -> str:
    dollars = "-" if found.dollars is None else f"{found.dollars:,.2f}"
    return cells(
        found.gpu,
        found.precision,
        str(found.micro_batch),
        human_bytes(found.memory_bytes),
        human_count(found.tokens_per_second),
        duration(found.seconds),
        energy(found.kilowatt_hours),
        dollars,
    ) + ("  measured" if found.measured else "  estimated")


def cells(first: str, *others: str) -> str:
    return f"{first:<{WIDTHS[0]}}" + " ".join(f"{text:>{width}}" for text, width in zip(others, WIDTHS[1:], strict=True))


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
