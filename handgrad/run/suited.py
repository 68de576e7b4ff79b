"""The run that suits data and machine, for `handgrad train --data DIR` without a preset or sizes.

A model as large as its tokens can teach, about twenty for each parameter (Hoffmann et al. 2022,
https://arxiv.org/abs/2203.15556), each seen at most four times, which is nearly as good as new ones (Muennighoff et al.
2023, https://arxiv.org/abs/2305.16264). Small corpora train small models for more epochs; a CPU trains for minutes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from handgrad import checkpoint, devices, presets
from handgrad.config import RunConfig
from handgrad.data.shards import SPLITS, Dataset, open_dataset
from handgrad.run.resolve import resolve

CPU_FLOPS = 2.5e13  # of the whole run: three minutes on two cores
MEMORY_SHARE = 0.85  # of a GPU's memory that the plan may take
LEAST_STEPS, MOST_STEPS = 20, 20_000
MOST_WARM_UP_STEPS = 700


@dataclass(frozen=True)
class Size:
    """A model for corpora of at least `tokens` training tokens, and how it trains."""

    tokens: float
    num_layers: int
    num_heads: int
    channels: int
    sequence_length: int
    tokens_per_step: int
    micro_batch: int
    learning_rate: float
    epochs: float  # at most
    warmup_share: float = 0.05  # of the steps
    schedule: str = RunConfig.schedule
    final_learning_rate_fraction: float = RunConfig.final_learning_rate_fraction


def gpt2(tokens: float, name: str, micro_batch: int, learning_rate: float) -> Size:
    return Size(tokens, *presets.MODELS[name], 1024, 524288, micro_batch, learning_rate, 4)


CPU_SIZES = (Size(0, 4, 4, 128, 256, 2048, 8, 4e-3, 40, 0.1, "linear", 0.0),)  # benchmarks/results/cpu-small-text.json
GPU_SIZES = (
    Size(0, 6, 6, 384, 256, 16384, 64, 1e-3, 10),
    Size(20e6, 8, 8, 512, 512, 65536, 64, 1e-3, 6),
    gpt2(200e6, "d12", 64, 6e-4),
    gpt2(7e9, "d24", 32, 3e-4),
    gpt2(15e9, "d36", 32, 2.5e-4),
    gpt2(31e9, "d48", 16, 2e-4),
)


def suited_settings(dataset: Dataset, device: torch.device) -> dict[str, Any]:
    """The settings of a run on `dataset`: the largest model that its tokens can teach and the device can hold."""
    training = dataset.tokens("train")
    sizes = CPU_SIZES if device.type == "cpu" else GPU_SIZES
    for size in reversed([size for size in sizes if training >= size.tokens]):
        for config in smaller_batches(fitted(size, dataset)):
            if fits(config, dataset.tokenizer.vocab_size, device):
                return settings_of(config, size, dataset, device)
    smallest = replace(fitted(sizes[0], dataset), micro_batch=1)
    return settings_of(smallest, sizes[0], dataset, device)  # does not fit: the run refuses it with advice


def fitted(size: Size, dataset: Dataset) -> RunConfig:
    """The size, with a shorter context where no shard has such windows, and steps of at most a quarter of the corpus."""
    length = min(size.sequence_length, power_of_two(longest_window(dataset)))
    windows = sum((shard.token_count - 1) // length for shard in dataset.splits["train"])
    samples = min(size.tokens_per_step // length, power_of_two(max(1, windows // 4)))
    sizes: dict[str, Any] = {name: getattr(size, name) for name in CHOSEN_SIZES}
    sizes |= {"sequence_length": length, "tokens_per_step": samples * length}
    sizes["micro_batch"] = min(size.micro_batch, samples)
    return RunConfig(**sizes)


def longest_window(dataset: Dataset) -> int:
    """The longest context for which every split has a window, which is a token longer."""
    return min(max(shard.token_count - 1 for shard in dataset.splits[split]) for split in SPLITS)


def power_of_two(number: int) -> int:
    """The largest power of two up to `number`."""
    return 1 << number.bit_length() - 1


def smaller_batches(config: RunConfig) -> Iterator[RunConfig]:
    """The same steps in smaller and smaller micro-batches."""
    while config.micro_batch >= 1:
        yield config
        config = replace(config, micro_batch=config.micro_batch // 2)


def fits(config: RunConfig, vocab_size: int, device: torch.device) -> bool:
    """Compares with a GPU's whole memory, which is equal on equal ranks, unlike its free memory; a CPU's run is small."""
    if device.type != "cuda":
        return True
    most = MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory
    return resolve(config, vocab_size, device=device).plan.total_bytes <= most


def settings_of(config: RunConfig, size: Size, dataset: Dataset, device: torch.device) -> dict[str, Any]:
    pace = paced(config, dataset, device, size.epochs, size.warmup_share)
    return {**{name: getattr(config, name) for name in CHOSEN_SIZES}, **pace}


def paced(
    config: RunConfig, dataset: Dataset, device: torch.device, epochs: float, warmup_share: float, steps: float = 0
) -> dict[str, Any]:
    """The number of steps, unless it is given, and the intervals of validations, samples, saves and log lines."""
    training, validation = dataset.tokens("train"), dataset.tokens("validation")
    if not steps:
        steps = epochs * training / config.tokens_per_step
        shape = config.shape(dataset.tokenizer.vocab_size)
        if device.type == "cpu":
            steps = min(steps, CPU_FLOPS / (shape.flops_per_token * config.tokens_per_step))
        steps = min(max(steps, LEAST_STEPS), MOST_STEPS)
    steps = round(steps)
    return {
        "steps": steps,
        "warmup_steps": max(1, min(int(steps * warmup_share), MOST_WARM_UP_STEPS)),
        "eval_every": min(max(1, steps // 10), 250),
        "eval_tokens": min(max(config.sequence_length, validation), 10 << 20),
        "sample_every": max(1, steps // 4),
        "save_every": min(max(1, steps // 5), 1000),
        "log_every": min(max(1, steps // 50), 10 if device.type == "cuda" else 50),
    }


CHOSEN_SIZES = (
    *("num_layers", "num_heads", "channels", "sequence_length"),
    *("tokens_per_step", "micro_batch", "learning_rate", "schedule", "final_learning_rate_fraction"),
)
CHOSEN = (*CHOSEN_SIZES, "steps", "warmup_steps", "eval_every", "eval_tokens", "sample_every", "save_every", "log_every")


def chosen_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """`suited_settings` for the data and the device of these settings. A run that has begun in `out` keeps its own.

    Raises the errors of `open_dataset` and `resolve_device`.
    """
    begun = checkpoint.peek_config(Path(settings.get("out", RunConfig.out)))
    if begun is not None:
        return {name: begun[name] for name in CHOSEN}
    return suited_settings(open_dataset(settings["data"]), devices.resolve_device(settings.get("device", RunConfig.device)))
