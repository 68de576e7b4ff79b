"""Training speeds that were measured, for plans to quote; tests/test_planning.py holds them to the records."""

from typing import NamedTuple

from handgrad.networks.fp8 import HEAD_GEMMS
from handgrad.settings.config import GPT2_VOCABULARY, RunConfig
from handgrad.settings.presets import MODELS

LENGTH = 1024  # tokens per sample of all of them
MANY = 8  # micro-batches from which on their number no longer matters: the optimizer's part is a percent or less


# Settings that change the speed; the measured runs had their defaults.
COSTLY = (
    *("recompute", "dropout", "zero", "reduce_precision", "master_weights", "moments", "offload", "head_chunk_tokens"),
    *("architecture", "freeze", "lora", "optimizer", "audit_every"),
    *("fp8_keep_bf16", "fp8_gradients", "fp8_scaling"),
)


class Measured(NamedTuple):
    """A speed: `model` of `presets.MODELS` on `gpus` GPUs, `micro_steps` micro-batches of each to an update."""

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


class WithoutTable(NamedTuple):
    """The share of a step's speed that a GPU loses where the heuristic's first algorithms stand in for its table's."""

    gpu: str  # in the name that torch has for it
    model: str
    precision: str
    lost: float
    source: str  # a record of `benchmarks.tuned_tables`


WITHOUT_TABLE = (
    WithoutTable("H200", "d12", "bf16", 0.0049432, "h200-tuned-tables"),
    WithoutTable("H200", "d12", "fp8", 0.012641, "h200-tuned-tables"),
    WithoutTable("H200", "d48", "bf16", 0.01573, "h200-tuned-tables"),
)


def lost_without_table(name: str) -> str:
    """The speed that a GPU of this name loses without a table, for `doctor`; of other GPUs where it is not measured."""
    rows: dict[str, list[str]] = {}
    for row in WITHOUT_TABLE:
        rows.setdefault(row.gpu, []).append(f"{row.lost:.1%} ({row.model} {row.precision})")
    here = next((found for gpu, found in rows.items() if gpu in name), None)
    if here:
        return f"a step loses {', '.join(here)} of its speed without one"
    elsewhere = [f"on {gpu} a step loses {', '.join(found)} of its speed without one" for gpu, found in rows.items()]
    return "; ".join(["the speed lost on this GPU is not measured", *elsewhere])


def find(gpu: str, config: RunConfig, vocab_size: int, ranks: int) -> Measured | None:
    """The measured speed of this very run: model, vocabulary, context, precision, micro-batch, and the settings that cost
    time."""
    usual = RunConfig()
    if (config.sequence_length, vocab_size) != (LENGTH, GPT2_VOCABULARY) or config.packed:
        return None
    if any(getattr(config, name) != getattr(usual, name) for name in COSTLY):
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
