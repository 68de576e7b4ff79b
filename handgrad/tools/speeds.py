"""Speeds: this machine's under load, measured training speeds, and a training step's time predicted from a data sheet."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from handgrad.machine import devices
from handgrad.machine.gpus import Gpu
from handgrad.memory.arena import WHOLE_BLOCKS
from handgrad.memory.rows import count_parameters
from handgrad.networks.fp8 import HEAD_GEMMS, gradient_format
from handgrad.ops import reference
from handgrad.settings.config import GPT2_VOCABULARY, RunConfig
from handgrad.settings.presets import MODELS
from handgrad.training.design import Design

# This machine: launches, memory, GEMMs.


def seconds_of(device: torch.device, launch: Callable[[], object], seconds: float, burst: int) -> float:
    """Mean seconds per launch under load. Launches for `seconds`, and measures the second half."""
    count, started, first = 0, time.perf_counter(), 0.0
    while (now := time.perf_counter() - started) < seconds or count == 0:
        if now >= seconds / 2 and not first:
            first, count = now, 0
        for _ in range(burst):
            launch()
        devices.synchronize(device)
        count += burst
    return (time.perf_counter() - started - first) / count


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy of 2 GB on the device (64 MB on a CPU), or less if memory is short."""
    size, seconds, burst = (2_000_000_000, 0.5, 10) if device.type == "cuda" else (64_000_000, 0.1, 1)
    size = min(size, (devices.available_bytes(device) or 4 * size) // 4)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds_of(device, lambda: target.copy_(source), seconds, burst)


def gemm_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """FLOP/s of a square `linear_forward` under load for `seconds`, with 1024 rows on a CPU, 8192 elsewhere."""
    size, burst = 1024 if device.type == "cpu" else 8192, 20 if device.type == "cuda" else 1
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / seconds_of(device, lambda: reference.linear_forward(out, a, b, None), seconds, burst)


# Measured training speeds, which plans quote; tests/test_planning.py compares them with the records.

MEASURED_LENGTH = 1024  # tokens per sample, in all of these runs
MANY = 8  # from this many micro-batches on, their number no longer matters: the optimizer takes a percent or less


# Settings that change the speed; the measured runs had their defaults.
COSTLY = (
    *("recompute", "dropout", "zero", "reduce_precision", "master_weights", "moments", "offload", "head_chunk_tokens"),
    *("architecture", "freeze", "lora", "optimizer", "audit_every", "teacher"),
    *("fp8_keep_bf16", "fp8_scaling"),
)


class Measured(NamedTuple):
    """A measured speed: `model` of `presets.MODELS` on `gpus` GPUs, with `micro_steps` micro-batches per GPU and update."""

    gpu: str
    gpus: int
    model: str
    precision: str
    micro_batch: int
    micro_steps: int
    tokens_per_second: float
    source: str  # a record in benchmarks/results
    fp8_head: str = ""  # GEMMs of the loss head in fp8


WHOLE_HEAD = ",".join(HEAD_GEMMS)
ROWS = (
    Measured("h200", 1, "d12", "bf16", 64, 8, 619480, "h200-step-124m"),
    Measured("h200", 1, "d24", "bf16", 32, 8, 228050, "h200-step-350m"),
    Measured("h200", 1, "d36", "bf16", 32, 8, 107770, "h200-step-774m"),
    Measured("h200", 1, "d48", "bf16", 16, 8, 55810, "h200-step-1558m"),
    Measured("h200", 1, "d12", "fp8", 64, 8, 733030, "h200-step-124m"),
    Measured("h200", 1, "d24", "fp8", 32, 8, 291660, "h200-step-350m"),
    Measured("h200", 1, "d36", "fp8", 32, 8, 149730, "h200-fp8-step-774m"),
    Measured("h200", 1, "d48", "fp8", 16, 8, 78712, "h200-fp8-step-1558m"),
    Measured("h200", 1, "d12", "fp8", 64, 8, 809850, "h200-fp8-head-step-124m", WHOLE_HEAD),
    Measured("h200", 1, "d24", "fp8", 32, 8, 309400, "h200-fp8-head-step-350m", WHOLE_HEAD),
    Measured("h200", 1, "d36", "fp8", 32, 8, 155450, "h200-fp8-head-step-774m", WHOLE_HEAD),
    Measured("h200", 1, "d48", "fp8", 16, 8, 80944, "h200-fp8-head-step-1558m", WHOLE_HEAD),
    Measured("h200", 1, "d12", "bf16", 64, 1, 615860, "h200-step-124m-one-micro-step"),
    Measured("h200", 4, "d12", "bf16", 64, 2, 2424063, "h200-x4-scaling-124m"),
    Measured("h200", 4, "d48", "bf16", 16, 8, 222165, "h200-x4-scaling-1558m"),
    Measured("h100", 1, "d12", "bf16", 64, 8, 593020, "h100-step-124m"),
    Measured("h100", 1, "d12", "fp8", 64, 8, 693290, "h100-step-124m"),
    Measured("h100", 1, "d48", "fp8", 16, 8, 74622, "h100-fp8-step-1558m"),
    Measured("h100", 1, "d24", "bf16", 32, 8, 212100, "h100-step-350m"),
    Measured("h100", 1, "d24", "fp8", 32, 8, 272600, "h100-step-350m"),
    Measured("h100", 1, "d12", "fp8", 64, 8, 747830, "h100-fp8-head-step-124m", WHOLE_HEAD),
    Measured("h100", 1, "d48", "fp8", 16, 8, 76300, "h100-fp8-head-step-1558m", WHOLE_HEAD),
)


def measured_speed(gpu: str, config: RunConfig, vocab_size: int, ranks: int) -> Measured | None:
    """The measured speed of exactly this run, down to every setting that costs time, or None."""
    usual = RunConfig()
    if (config.sequence_length, vocab_size) != (MEASURED_LENGTH, GPT2_VOCABULARY) or config.packed:
        return None
    if gradient_format(config) != "e4m3" or any(getattr(config, name) != getattr(usual, name) for name in COSTLY):
        return None
    sizes = config.num_layers, config.num_heads, config.channels
    samples = [stage.tokens_per_step // config.sequence_length for stage in config.batch.stages]
    micro_steps = {count // (config.micro_batch * ranks) for count in samples}
    for row in ROWS:
        alike = min(row.micro_steps, *micro_steps) >= MANY or {row.micro_steps} == micro_steps
        head = config.fp8_head_gemms if config.precision == "fp8" else ""
        this = gpu, ranks, sizes, config.precision, head, config.micro_batch
        if alike and this == (row.gpu, row.gpus, MODELS[row.model], row.precision, row.fp8_head, row.micro_batch):
            return row
    return None


# A step predicted from the data sheet: a roofline with a few measured shares. GEMMs run at a share of the tensor cores'
# peak, or at memory bandwidth if their operands take longer; attention runs at its own share; all other kernels and the
# optimizer run at memory bandwidth. docs/planning.md compares the predictions with measurements.

# Fitted to steps of 124M and 1558M on an H200 at its power limit; the other sizes and GPUs are predictions.
GEMM_SHARE = {"fp8": 0.57}  # of the peak, in a whole step
USUAL_GEMM_SHARE = 0.62
# Measured: memory-bound kernels' share of the bandwidth, attention's of the bf16 peak, its time's factor if it quantises.
MEMORY_SHARE = 0.80
ATTENTION_SHARE = 0.30
QUANTISING = 1.17
# For several GPUs: a share fitted to four H200s at 124M, and the share of the link that the exchange reached there.
TOGETHER_SHARE = 0.985
LINK_SHARE = 0.55

# Bytes per token and channel of a block's kernels, except GEMMs and attention: two layer norms forward (2 elements
# each) and backward (4 each), the bias sums of qkv and fc (3 and 4); in fp8 the list of benchmarks/fp8_bytes.py.
ELEMENTS, FP8_BYTES = 19, 79
AGAIN_ELEMENTS, FP8_AGAIN_BYTES = (0, 0, 4, 4), (0, 12, 18, 18)  # by recompute level
DROPOUT_PASSES = 10


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step, by bottleneck."""

    gemms: float
    attention: float
    memory: float
    optimizer: float
    exchange: float  # between GPUs, with the wait for the slowest

    @property
    def total(self) -> float:
        return self.gemms + self.attention + self.memory + self.optimizer + self.exchange


def step_time(gpu: Gpu, config: RunConfig, design: Design, ranks: int = 1) -> StepTime:
    """Predicts the time of a step on `ranks` such GPUs, which share the lanes. The precision must not be auto."""
    shape, precision = design.shape, config.precision
    layers, channels, length = shape.num_layers, shape.channels, shape.sequence_length
    tokens = config.tokens_per_step / ranks
    micro_batches = tokens / (config.micro_batch * length)
    size = design.dtype.itemsize
    rate = MEMORY_SHARE * gpu.terabytes_per_second * 1e12
    parameters = count_parameters(design.parameters)
    blocks = design.fp8.gemms.blocks if design.fp8 else ()
    in_fp8 = len(blocks) / (layers * len(shape.fp8_parts)) if blocks else 0.0  # the share of the blocks' GEMMs
    gemms = tokens * gemm_seconds_per_token(gpu, design, precision, rate)
    kind = "bf16" if precision == "fp8" else "fp32" if precision == "tf32" else precision
    attention_gemms = 7 + 2 * (config.recompute >= WHOLE_BLOCKS)  # two forward, five backward
    attended = shape.num_heads * shape.head_width
    attention = attention_gemms * layers * attended * (length + 1) / (ATTENTION_SHARE * gpu.flops(kind))
    attention *= tokens * (1 + (QUANTISING - 1) * in_fp8)
    level = config.recompute
    per_channel = (1 - in_fp8) * size * (ELEMENTS + AGAIN_ELEMENTS[level])
    per_channel += in_fp8 * (FP8_BYTES + FP8_AGAIN_BYTES[level])
    if config.dropout:
        per_channel += DROPOUT_PASSES * size
    # Outside the blocks: embedding, last layer norm, loss.
    ends = (10 * size + 8) * channels + 2 * size * shape.padded_vocab_size
    # Per micro-batch: weights read forward and backward, gradients read and written in float32.
    moved = tokens * (layers * channels * per_channel + ends) + micro_batches * parameters * (2 * size + 8)
    moved += micro_batches * count_parameters(design.frozen) * 2 * size
    # The host's state to the device and back, in both directions at once.
    offload = design.host_plan.total_bytes / (LINK_SHARE * gpu.host_gigabytes_per_second * 1e9)
    return StepTime(
        gemms=gemms,
        attention=attention,
        memory=moved / rate,
        optimizer=optimizer_bytes(config, parameters, size, ranks) / rate + offload,
        exchange=exchange_seconds(gpu, config, parameters, size, ranks)
        + (ranks > 1) * (1 / TOGETHER_SHARE - 1) * (gemms + attention + moved / rate),
    )


def gemm_seconds_per_token(gpu: Gpu, design: Design, precision: str, rate: float) -> float:
    """Seconds per token of all GEMMs of blocks and head: forward, input gradient, weight gradient. Frozen weights have no
    weight gradient; adapters are not counted."""
    shape, size = design.shape, design.dtype.itemsize
    C, plain = shape.channels, "bf16" if precision == "fp8" else precision
    gemms = design.fp8.gemms if design.fp8 else None

    def seconds(inputs: int, outputs: int, kind: str) -> float:
        """One GEMM: 2 I O operations per token, or moving its operands once if that takes longer."""
        operations = 2 * inputs * outputs / (GEMM_SHARE.get(kind, USUAL_GEMM_SHARE) * gpu.flops(kind))
        return max(operations, (inputs + outputs) * (1 if kind == "fp8" else size) / rate)

    total, passes = 0.0, 2 if design.frozen else 3
    *others, hidden, last = shape.gemms
    for gemm in (*others, hidden, last):
        again = gemm is not last and (design.recompute >= WHOLE_BLOCKS or (design.recompute >= 1 and gemm is hidden))
        fp8_layers = sum(name == gemm.part for _, name in gemms.blocks) if gemms else 0
        for kind, layers in (("fp8", fp8_layers), (plain, shape.num_layers - fp8_layers)):
            if layers:
                total += layers * (passes + again) * seconds(gemm.inputs, sum(gemm.outputs.values()), kind)
    kinds = ["fp8" if gemms and name in gemms.head else plain for name in HEAD_GEMMS[:passes]]
    return total + sum(seconds(C, shape.padded_vocab_size, kind) for kind in kinds)


def optimizer_bytes(config: RunConfig, parameters: int, size: int, ranks: int) -> float:
    """Bytes per step: the norm and the zeroing of the gradients, and AdamW, which the ranks share from ZeRO 1 on: gradient,
    master weights, two moments, and the weights that the model reads; in fp8 also their quantised forms."""
    share = ranks if config.zero else 1
    adamw = 28 - 8 * (config.moments == "bf16") + (size if size < 4 else 0)
    return parameters * (8 + adamw / share + (4 if config.precision == "fp8" else 0))


def exchange_seconds(gpu: Gpu, config: RunConfig, parameters: int, size: int, ranks: int) -> float:
    """Seconds to send gradients to their ranks and weights back, without overlap."""
    wire = 2 if config.reduce_precision == "bf16" else 4
    return parameters * (wire + size) * (ranks - 1) / ranks / (LINK_SHARE * gpu.link_gigabytes_per_second * 1e9)
