"""A card: what training steps reach on this machine, in one file to send in (docs/cards.md)."""

import gc
import math
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from statistics import median
from typing import Any

import torch

from handgrad.format import human_bytes
from handgrad.joins.audit.chain import sha256
from handgrad.machine import devices, power
from handgrad.machine.backend import choose_backend
from handgrad.run.assemble import assemble
from handgrad.run.checkpointing import versions_of
from handgrad.run.header import commit
from handgrad.run.resolve import largest_micro_batch, memory_bytes, resolve
from handgrad.settings.config import GPT2_VOCABULARY, RunConfig
from handgrad.settings.presets import preset
from handgrad.tools.doctor import dotted, driver_version
from handgrad.tools.forecast import DRIVER_BYTES
from handgrad.tools.profile import WARMUP_STEPS, MadeUpTokens, make_steps, rate_text, set_up
from handgrad.tools.speeds import copy_bandwidth, gemm_flops

FORMAT = 1
SECONDS = 115.0  # the start of Python and the last shape come on top
HOT_SECONDS, TIMED_SECONDS, FEWEST_STEPS = 1.0, 2.0, 3
SMOLLM2: dict[str, Any] = {"architecture": "llama", "num_layers": 30, "num_heads": 9, "channels": 576}
SMOLLM2 |= {"llama": "kv_heads=3,feed_forward=1536,tied,rotary_base=100000.0"}
# Title: (run with the largest micro-batch to try, vocabulary).
SHAPES: dict[str, tuple[RunConfig, int]] = {
    "GPT-2 124M": (preset("d12"), GPT2_VOCABULARY),
    "GPT-2 350M": (preset("d24"), GPT2_VOCABULARY),
    "modern m12": (preset("m12"), GPT2_VOCABULARY),
    "SmolLM2-135M": (replace(preset("d12"), micro_batch=32, **SMOLLM2), 49152),
}
# By the precision that "auto" takes: what to measure, in this order.
PRECISIONS = {"bf16": ("bf16", "fp8", "tf32"), "fp16": ("fp16", "fp32"), "fp32": ("fp32", "bf16")}
NO_FIT, NO_TIME, REFUSED = "does not fit", "not measured", "cannot run"
Figures = dict[str, Any]


def measure_card(device: torch.device, seconds: float) -> Iterator[str | Figures]:
    """Yields lines to print, and at last the card. Does not begin a shape that would end after `seconds`."""
    started, last_seconds = time.perf_counter(), 0.0
    precisions = PRECISIONS[devices.auto_precision(device)[0]]
    versions = versions_of(device, choose_backend("auto", device))  # raises if a library is missing
    copying, flops, steps = copy_bandwidth(device), dict[str, float](), {title: dict[str, Figures]() for title in SHAPES}
    for precision in (name for name in precisions if name != "fp8"):
        devices.set_arithmetic(device, precision)
        flops[precision] = gemm_flops(device, devices.DTYPES[precision])
    yield f"{versions.pop('device')}; handgrad {versions['handgrad']}, torch {torch.__version__}"
    rates = ", ".join(f"{rate_text(rate, rate, 'FLOP')} in {name}" for name, rate in flops.items())
    yield f"a copy runs at {rate_text(copying, copying, 'B')}, a large GEMM at {rates}\n"
    yield f"{'micro-batch':>32}{'tokens/s':>12}{'spread':>9}{'memory':>11}"
    for precision in precisions:
        for title, (config, vocab_size) in SHAPES.items():
            begun, cell = time.perf_counter(), {"missing": NO_TIME}
            if begun - started + last_seconds < seconds:
                if device.type == "cpu":
                    config = replace(config, micro_batch=4, sequence_length=64)
                cell = measure_steps(replace(config, precision=precision, device=device.type), vocab_size, device)
                last_seconds = time.perf_counter() - begun
            steps[title][precision] = cell
            yield f"{title:<14}{precision:<6}{line_of(cell)}"
    content = {
        "format": FORMAT,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": facts_of(device),
        "versions": {**versions, "python": platform.python_version(), "cuda": torch.version.cuda},
        "commit": commit(),
        "seconds": round(time.perf_counter() - started, 1),
        "copy_bytes_per_second": round(copying),
        "gemm_flops": {precision: round(rate) for precision, rate in flops.items()},
        "steps": steps,
    }
    yield {**content, "sha256": sha256(content)}


def measure_steps(config: RunConfig, vocab_size: int, device: torch.device) -> Figures:
    """The figures of a run at the largest micro-batch whose plan fits, one per step; or why there are none."""
    try:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # else what was freed does not count as free
        free = devices.available_bytes(device) or 1 << 60
        config = replace(config, tokens_per_step=config.micro_batch * config.sequence_length)
        if not (fitting := largest_micro_batch(config, vocab_size, free - int(DRIVER_BYTES))):
            planned = sum(memory_bytes(resolve(replace(config, micro_batch=1), vocab_size)).values())
            return {"missing": NO_FIT, "planned_bytes": planned, "free_bytes": free}
        config = replace(config, micro_batch=fitting, tokens_per_step=fitting * config.sequence_length)
        return timed_steps(config, vocab_size, device)
    except Exception as error:  # a precision that the GPU lacks, a kernel that does not compile: others may run
        return {"missing": REFUSED, "error": f"{' '.join(str(error).split()):.300}"}


def timed_steps(config: RunConfig, vocab_size: int, device: torch.device) -> Figures:
    if cuda := device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    training = assemble(set_up(config, vocab_size), MadeUpTokens(vocab_size, config.seed))
    first = make_steps(training.stepper, 0, WARMUP_STEPS)
    seconds = first[-1].elapsed_seconds
    hot, count = math.ceil(HOT_SECONDS / seconds) if cuda else 1, max(FEWEST_STEPS, math.ceil(TIMED_SECONDS / seconds))
    make_steps(training.stepper, WARMUP_STEPS, hot)
    with power.Sampler(device) as sampler:
        results = make_steps(training.stepper, WARMUP_STEPS + hot, count)
    rates = sorted(config.tokens_per_step / result.elapsed_seconds for result in results)
    return {
        "micro_batch": config.micro_batch,
        "sequence_length": config.sequence_length,
        "tokens_per_second": round(median(rates), 1),
        "tokens_per_second_range": [round(rates[0], 1), round(rates[-1], 1)],
        "steps": count,
        "steps_without_update": sum(result.skipped is not None for result in results),
        "planned_bytes": sum(memory_bytes(training.design).values()),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if cuda else None,
        "losses": [round(result.loss, 4) for result in first],
        "power": sampler.summary,
    }


def line_of(cell: Figures) -> str:
    if "missing" in cell:
        return f"{cell['missing']:>12}  {cell.get('error', '')}".rstrip()
    (least, most), speed = cell["tokens_per_second_range"], cell["tokens_per_second"]
    batch = f"{cell['micro_batch']} x {cell['sequence_length']}"
    memory = human_bytes(cell["peak_bytes"] or cell["planned_bytes"])
    return f"{batch:>12}{speed:>12,.0f}{(most - least) / speed:>9.1%}{memory:>11}"


def facts_of(device: torch.device) -> Figures:
    """The machine; of a GPU also its limits, as far as the driver tells them."""
    _, _, described = devices.describe(device).partition(": ")
    facts: Figures = dict(zip(("device", "size"), described.split(", "), strict=False))
    facts["host"] = f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}"
    if device.type == "cuda":
        facts |= {"capability": dotted(torch.cuda.get_device_capability(device)), "driver": driver_version()}
    if (sensors := power.sensors(device)) is not None:
        clock = "nvmlDeviceGetMaxClockInfo"
        facts["driver"] = str(sensors.nvml.nvmlSystemGetDriverVersion())
        facts["power_limit_watts"] = sensors.ask("nvmlDeviceGetEnforcedPowerLimit", unit=1e3)
        facts["most_sm_megahertz"] = sensors.ask(clock, sensors.nvml.NVML_CLOCK_SM)
        facts["most_memory_megahertz"] = sensors.ask(clock, sensors.nvml.NVML_CLOCK_MEM)
    return facts
