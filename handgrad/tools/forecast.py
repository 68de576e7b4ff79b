"""Forecasts a run on GPUs that need not be in this machine: memory, speed, time, cost, energy."""

import re
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch

from handgrad.errors import UsageError
from handgrad.format import human_bytes
from handgrad.joins.fp8.sizes import statistics_parts
from handgrad.machine import gpus
from handgrad.machine.gpus import GPUS, HOPPER, Gpu
from handgrad.names import check_choice
from handgrad.ops import sizes
from handgrad.run.checks import can_offload, check_offload, check_shared_gradients
from handgrad.run.folder import resolve_lanes
from handgrad.run.resolve import largest_micro_batch, memory_bytes, micro_batches, resolve
from handgrad.settings.config import AUTO, RunConfig, check
from handgrad.tools.speeds import measured_speed, step_time
from handgrad.training.design import Design

DRIVER_BYTES = 0.7 * 2**30  # the CUDA context and the libraries, on top of the plan
UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True)
class Forecast:
    """A run on `gpus` GPUs of one type. Counts only the steps: validations, samples and checkpoints take extra time."""

    gpu: str  # its name in `handgrad.machine.gpus.GPUS`
    gpus: int
    precision: str
    memory_bytes: int  # allocated by the run, per GPU
    available_bytes: int  # per GPU
    micro_batch: int  # the run's own if it fits, else the largest that fits
    tokens_per_second: float  # of all GPUs together
    seconds: float
    dollars: float | None  # None: no price was given
    kilowatt_hours: float  # of the boards at their power limits, without the rest of the machine
    measured: bool  # True: the speed of exactly this run was measured; False: predicted from the data sheet
    source: str  # the record, or ""


def forecast(
    config: RunConfig, vocab_size: int, gpu: str, *, ranks: int = 1, price: float | None = None, fit: int = 0
) -> Forecast:
    """Forecasts the run that `config` describes. `price`: dollars per GPU-hour; `fit`: memory limit per GPU in bytes,
    instead of all of it. Raises `UsageError` for an unknown GPU, a precision that it lacks, or a run that does not fit."""
    name, spec = named_gpu(gpu)
    config = resolved_on(config, spec, ranks)
    available = fit or int(spec.memory_bytes - DRIVER_BYTES)
    there = partial(resolve_for, spec)
    fitting = largest_micro_batch(config, vocab_size, available, ranks, most=config.micro_batch, resolved=there)
    if not fitting:
        least = sum(memory_bytes(resolve_for(spec, replace(config, micro_batch=1), vocab_size, ranks)).values())
        raise UsageError(
            f"not even one sample at a time fits {spec.title}: {human_bytes(least)} needed,"
            f" {human_bytes(available)} there; try {remedy(config, ranks)}"
        )
    config = replace(config, micro_batch=fitting)
    check_shared_gradients(config, ranks)
    design = resolve_for(spec, config, vocab_size, ranks)
    measured = measured_speed(name, config, vocab_size, ranks)
    tokens = config.batch.tokens_before(config.steps)
    speed = measured.tokens_per_second if measured else tokens / estimated_seconds(spec, config, design, ranks)
    seconds = tokens / speed
    hours = ranks * seconds / 3600
    return Forecast(
        gpu=name,
        gpus=ranks,
        precision=config.precision,
        memory_bytes=sum(memory_bytes(design).values()),
        available_bytes=available,
        micro_batch=fitting,
        tokens_per_second=speed,
        seconds=seconds,
        dollars=None if price is None else price * hours,
        kilowatt_hours=spec.watts * hours / 1e3,
        measured=measured is not None,
        source=measured.source if measured else "",
    )


def estimated_seconds(gpu: Gpu, config: RunConfig, design: Design, ranks: int) -> float:
    """Seconds of all steps, by the roofline model; a teacher's forward in proportion to its FLOPs."""
    stages = [(replace(config, tokens_per_step=stage.tokens_per_step), n) for stage, n in config.batch.spans(config.steps)]
    taught = design.teacher.flops_per_token / design.flops_per_token if design.teacher else 0.0
    return sum(steps * step_time(gpu, stage, design, ranks).total for stage, steps in stages) / (1 - taught)


def named_gpu(name: str) -> tuple[str, Gpu]:
    """(short name, GPU) for a name as people write it, like "RTX 4090". Raises `UsageError` with the closest name."""
    key = gpus.short_name(name)
    check_choice("gpu", key, GPUS)
    return key, GPUS[key]


def resolved_on(config: RunConfig, gpu: Gpu, ranks: int) -> RunConfig:
    """`config` with the precision and the lanes that it would start with on `ranks` such GPUs."""
    precision = gpus.auto_precision(gpu.capability) if config.precision == AUTO else config.precision
    gpus.check_precision(gpu.title, gpu.capability, precision)
    gpus.check_optimizer(gpu.title, gpu.capability, config.optimizer)
    check_offload(config, torch.device("meta"), ranks)
    config = replace(config, precision=precision, lanes=resolve_lanes(config, ranks))
    try:
        return config if micro_batches(config) else check(config)
    except UsageError as error:  # the lanes cannot share the step equally
        raise UsageError(f"{error}, or fewer GPUs") from None


def remedy(config: RunConfig, ranks: int) -> str:
    level = "" if config.recompute == 3 else "--recompute 3, "
    offload = "--offload true, " if not config.offload and can_offload(config, torch.device("meta"), ranks) else ""
    return f"{level}{offload}a smaller model or more GPUs"


def bytes_of(text: str) -> int:
    """`24GB` -> 24,000,000,000, `24GiB` -> 25,769,803,776. Raises `UsageError` for text that is not a size, and
    for less than a megabyte, which is a number without its unit."""
    match = re.fullmatch(r"([0-9.]+)\s*([kmgt]?i?)b?", text.strip().lower())
    try:
        size = int(float(match[1]) * UNITS[match[2]]) if match else 0
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < 10**6:
        raise UsageError(f"fit must be a size of memory like 24GB or 22.5GiB, found {text!r}")
    return size


# The design of a run on a GPU that is not in this machine: its operations only give their sizes.


@dataclass(frozen=True)
class Sizes:
    """The sizes that a design gets from its operations."""

    cudnn: bool  # use cuDNN for the head widths that it supports: on Hopper, without dropout

    scratch_bytes = staticmethod(sizes.scratch_bytes)
    muon_scratch_bytes = staticmethod(sizes.muon_scratch_bytes)
    statistics_parts = staticmethod(statistics_parts)
    decode = sizes

    def attention_scratch_bytes(
        self,
        *,
        head_width: int,
        dtype: torch.dtype,
        kv_heads: int = 0,
        documents: bool = False,
        window: int = 0,
        **heads: int,
    ) -> int:
        """Scratch of Triton's kernels, or of cuDNN's, which cannot separate documents."""
        if (
            self.cudnn
            and not documents
            and not 0 < window < heads["length"]
            and dtype.itemsize == 2
            and head_width in sizes.CUDNN_HEADS
        ):
            return sizes.cudnn_scratch_bytes(**heads, head_width=head_width)
        return sizes.attention_scratch_bytes(**heads)


def sizes_on(gpu: Gpu, config: RunConfig) -> Sizes:
    return Sizes(cudnn=gpu.capability == HOPPER and not config.dropout)


def resolve_for(gpu: Gpu, config: RunConfig, vocab_size: int, ranks: int = 1) -> Design:
    """The design of a run on such a GPU, which need not be in this machine. The precision must not be auto. TF32 takes the
    memory of float32, because it only changes how GEMMs multiply float32 numbers."""
    precision = "fp32" if config.precision == "tf32" else config.precision
    return sized(replace(config, precision=precision), vocab_size, ranks, sizes_on(gpu, config))


@lru_cache(maxsize=32)  # most GPUs share a design; one of 48 layers takes half a second
def sized(config: RunConfig, vocab_size: int, ranks: int, operations: Sizes) -> Design:
    return resolve(config, vocab_size, ranks=ranks, device=torch.device("meta"), sizes=operations)
