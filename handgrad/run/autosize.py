"""Chooses the settings of a run that no preset sets: by data and machine, for `handgrad train --data DIR`, or by the
weights, with `--init-from WEIGHTS`.

Takes the largest model that the tokens can teach, at about twenty per parameter (Hoffmann et al. 2022,
https://arxiv.org/abs/2203.15556), and repeats each at most four times, nearly as good as new tokens (Muennighoff et al.
2023, https://arxiv.org/abs/2305.16264). Small corpora train small models for more epochs; a CPU trains for minutes.

Finetuning uses short rows, however long the weights' context, small steps and three epochs. docs/finetuning.md has the
learning rates: weights from elsewhere have seen much more text; a handgrad run continues at half of its rate.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from handgrad.data.codes import RGB
from handgrad.data.mixture import apart, open_data
from handgrad.data.preferences import has_pairs
from handgrad.data.prompts import has_prompts, longest_prompt, open_prompts
from handgrad.data.shards import SPLITS, Dataset
from handgrad.format import round_number
from handgrad.joins.parallel.launchers import find_rank_info
from handgrad.machine import devices
from handgrad.networks import NETWORKS
from handgrad.run.checks import check_bytes
from handgrad.run.packing import document_lengths, resolve_packing, row_that_holds
from handgrad.run.resolve import resolve
from handgrad.settings import presets
from handgrad.settings.config import AUTO, WHOLE, RunConfig
from handgrad.storage import checkpoint

CPU_FLOPS = 2.5e13  # of the whole run: three minutes on two cores
MEMORY_SHARE = 0.85  # most of a GPU's memory that the plan may take
LEAST_STEPS, MOST_STEPS = 20, 20_000
MOST_WARM_UP_STEPS = 700

# By kind of device: most tokens per row, tokens per step, most rows per micro-batch.
CPU_LIMITS, GPU_LIMITS = (512, 2048, 4), (2048, 16384, 16)
PAIRS_RATE = 0.1  # of the rate for tokens: a pair's gradient is a difference
REWARD_RATE, REWARD_STEPS = 0.1, 100
ROLLOUTS, USUAL_ANSWER = 64, 64  # answers a step; tokens of the longest, which rows have room for
LEARNING_RATE, ADAPTERS_LEARNING_RATE = 3e-5, 2e-4
EPOCHS, WARMUP_SHARE = 3, 0.05
ENOUGH_STEPS = 100  # with fewer, a few conversations would barely move the weights
FEWEST_PICTURES, PICTURES_PER_STEP = 4, 32  # a step: the fewest of a network of codes, the usual of an autoencoder
FEW_ROWS = 16  # least rows per epoch: rows need only hold the longest conversation, and short rows make more steps
Settings = dict[str, Any]  # by name
ENDING: Settings = {"schedule": "linear", "final_learning_rate_fraction": 0.0}


@dataclass(frozen=True)
class Size:
    """A model for corpora of at least `tokens` training tokens, and its training settings."""

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


def suited_settings(dataset: Dataset, device: torch.device, settings: Settings) -> Settings:
    """The model, the batch and the pace of a run on `dataset`, where `settings` leave them open: the largest model that its
    tokens teach and the device holds. Pictures in bytes train an autoencoder, unless `settings` name another network."""
    if dataset.codes and dataset.codes.decoder == RGB and NETWORKS[settings.get("architecture", "vqvae")].pictures:
        return codec_settings(dataset, dataset.codes.size, device, settings)
    sizes = CPU_SIZES if device.type == "cpu" else GPU_SIZES
    taught = reversed([size for size in sizes if dataset.tokens("train") >= size.tokens])
    runs = [(size, config) for size in taught for config in smaller_batches(fitted(size, dataset, settings))]
    fitting = (run for run in runs if fits(run[1], dataset.tokenizer.vocab_size, device))
    size, config = next(fitting, runs[-1])  # if none fits, the run refuses the smallest with advice
    pace = paced(config, dataset, device, size.epochs, size.warmup_share, settings.get("steps", 0))
    return {name: getattr(config, name) for name in CHOSEN_SIZES} | pace


def codec_settings(dataset: Dataset, size: tuple[int, int], device: torch.device, settings: Settings) -> Settings:
    """The autoencoder's preset, for pictures of the data's `size`: rows and columns."""
    preset, length = presets.preset("vqvae"), 3 * size[0] * size[1]
    batch = batch_of(settings, [length], PICTURES_PER_STEP * length, 4 * dataset.tokens("train"), preset.micro_batch)
    config = replace(preset, **batch, vqvae=f"size={size[0]}x{size[1]}")
    chosen = {name: getattr(config, name) for name in (*CODEC, *CHOSEN_SIZES)}
    return chosen | paced(config, dataset, device, EPOCHS, WARMUP_SHARE, settings.get("steps", 0))


def fitted(size: Size, dataset: Dataset, settings: Settings) -> RunConfig:
    """The run that `settings` leave to `size`. Shortens the context to the longest window that the shards hold; a row of
    pictures, or of conversations, holds the longest document. Another width has another rate."""
    length, tokens = min(size.sequence_length, power_of_two(longest_window(dataset))), size.tokens_per_step
    if dataset.codes:
        length = max(int(document_lengths(dataset, split).max()) for split in SPLITS) - 1
        tokens = power_of_two(max(FEWEST_PICTURES, tokens // length)) * length
    elif resolve_packing(settings.get("packing", AUTO), dataset) == WHOLE:
        whole = row_that_holds(max(document_lengths(dataset, split).max(initial=1) for split in SPLITS))
        length = min(max(length, whole), RunConfig.sequence_length)
    sizes = {name: getattr(size, name) for name in CHOSEN_SIZES}
    sizes["channels"] = size.channels // size.num_heads * settings.get("num_heads", size.num_heads)
    batch = batch_of(settings, [length], tokens, dataset.tokens("train"), size.micro_batch)
    config = RunConfig(**{**sizes, **settings, **batch})
    return config if config.channels == size.channels else replace(config, learning_rate=usual_rate(config))


def batch_of(settings: Settings, lengths: list[int], tokens: int, corpus: int, most: int) -> Settings:
    """Context, tokens a step and micro-batch, where `settings` leave them open: the first of `lengths` by which lanes and
    micro-batches divide a step; about `tokens`, at most a quarter of the `corpus`; as many rows as divide it, to `most`."""
    micro = settings.get("micro_batch", 0)
    together = (micro or 1) * (settings.get("lanes", 0) or find_rank_info(os.environ).size)  # rows over all lanes
    tokens = settings.get("tokens_per_step", tokens)
    dividing = (length for length in lengths if tokens % (length * together) == 0)
    length = settings.get("sequence_length", 0) or next(dividing, lengths[0])
    rows = max(1, tokens // length)
    if "tokens_per_step" not in settings:
        rows = min(rows, power_of_two(max(1, corpus // length // 4)))
        rows = max(1, rows // together) * together
        tokens = rows * length
    per_lane = max(1, rows // together)  # which a power of two divides
    return {"sequence_length": length, "tokens_per_step": tokens, "micro_batch": micro or min(per_lane & -per_lane, most)}


def longest_window(dataset: Dataset) -> int:
    """The longest context for which every split of every set has a window (one token longer)."""
    sets = [one.dataset.splits for one in apart(dataset)]
    return min(max(shard.token_count - 1 for shard in splits[name]) for splits in sets for name in SPLITS)


def power_of_two(number: int) -> int:
    """The largest power of two not above `number`."""
    return 1 << number.bit_length() - 1


def smaller_batches(config: RunConfig) -> Iterator[RunConfig]:
    """Yields the same steps with ever smaller micro-batches."""
    while config.micro_batch >= 1:
        yield config
        config = replace(config, micro_batch=config.micro_batch // 2)


def fits(config: RunConfig, vocab_size: int, device: torch.device) -> bool:
    """Compares with a GPU's total memory: unlike its free memory, equal ranks agree on it. A CPU's run is always small."""
    if device.type != "cuda":
        return True
    most = MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory
    return resolve(config, vocab_size, device=device).plan.total_bytes <= most


def paced(
    config: RunConfig, dataset: Dataset, device: torch.device, epochs: float, warmup_share: float, steps: float = 0
) -> Settings:
    """Chooses the steps, unless given, the warm-up, and the intervals of validations, samples, saves and log lines."""
    if not steps:
        steps = epochs * dataset.tokens("train") / config.tokens_per_step
        shape = config.shape(dataset.tokenizer.vocab_size)
        if device.type == "cpu":
            steps = min(steps, CPU_FLOPS / (shape.flops_per_token * config.tokens_per_step))
        steps = min(max(steps, LEAST_STEPS), MOST_STEPS)
    steps = round(steps)
    every = min(round_number(steps // 10), 250)
    most = every * config.tokens_per_step if device.type == "cpu" else 10 << 20  # on a CPU no more than were trained since
    return {
        "steps": steps,
        "warmup_steps": max(1, min(int(steps * warmup_share), MOST_WARM_UP_STEPS)),
        "eval_every": every,
        "eval_tokens": max(config.sequence_length, min(dataset.tokens("validation"), most)),
        "sample_every": round_number(steps // 4),
        "save_every": min(round_number(steps // 5), 1000),
        "log_every": min(round_number(steps // 50), 10 if device.type == "cuda" else 50),
    }


CHOSEN_SIZES = (
    *("num_layers", "num_heads", "channels", "sequence_length"),
    *("tokens_per_step", "micro_batch", "learning_rate", "schedule", "final_learning_rate_fraction"),
)
CODEC = ("architecture", "vqvae")  # chosen for pictures in bytes
CHOSEN = (
    *(*CODEC, *CHOSEN_SIZES, "steps", "warmup_steps", "eval_every", "eval_tokens"),
    *("sample_every", "save_every", "log_every"),
)


def chosen_settings(settings: Settings) -> Settings:
    """`suited_settings` for the data and device in `settings`. A run that has already begun in `out` keeps its own.
    Raises the errors of `open_data` and `resolve_device`."""
    if (begun := checkpoint.peek_config(Path(settings.get("out", RunConfig.out)))) is not None:
        return {name: begun[name] for name in CHOSEN if name in begun}
    device = devices.resolve_device(settings.get("device", RunConfig.device))
    dataset = open_prompts(settings["data"], "") if settings.get("reward") else open_data(settings["data"])
    if (network := NETWORKS.get(settings.get("architecture", ""))) and network.pictures:  # no size but a picture's suits it
        check_bytes(settings["architecture"], settings["data"], dataset.codes)
    return suited_settings(dataset, device, settings)


def chosen_finetuning(settings: Settings, sizes: Settings, begun: Settings | None) -> Settings:
    """Chooses the settings not given, for weights of these `sizes`. A run that has `begun` in `out` from the same
    weights keeps its own. Without data, for `plan`, the weights alone decide. Raises the errors of `open_data` and
    `resolve_device`."""
    source, device = settings["init_from"], devices.resolve_device(settings.get("device", RunConfig.device))
    if begun is not None:
        return {name: begun[name] for name in (*CHOSEN, "sample_tokens") if name in begun}
    rewarded = bool(settings.get("reward"))
    dataset = (open_prompts if rewarded else open_data)(settings["data"], source) if "data" in settings else None
    config = fitted_to_weights(settings, sizes, dataset, device)
    chosen = {name: getattr(config, name) for name in ("sequence_length", "tokens_per_step", "micro_batch", *ENDING)}
    rate = suited_rate(source, adapters=bool(config.lora))
    rate *= REWARD_RATE if rewarded else PAIRS_RATE if dataset and has_pairs(dataset) else 1
    chosen["learning_rate"] = settings.get("learning_rate", rate)
    if dataset is not None:
        epochs = max(EPOCHS, ENOUGH_STEPS * config.tokens_per_step / dataset.tokens("train"))
        steps = settings.get("steps", REWARD_STEPS if rewarded else 0)
        chosen |= paced(config, dataset, device, epochs, WARMUP_SHARE, steps)
        if dataset.is_chat:
            chosen["sample_tokens"] = 0  # a text without a prompt is no conversation
    return chosen


def fitted_to_weights(settings: Settings, sizes: Settings, dataset: Dataset | None, device: torch.device) -> RunConfig:
    """Chooses what `settings` leave open. Rows hold the longest conversation, or fill the smallest of the weights' context,
    the shards' longest window and the device's limit. Steps take at most a quarter of the corpus. The micro-batch is the
    largest that fits."""
    longest, tokens, most = CPU_LIMITS if device.type == "cpu" else GPU_LIMITS
    length = min(sizes.get("sequence_length", longest), longest)
    corpus, usual = tokens * 4, length
    if dataset is not None:
        corpus = dataset.tokens("train")
        if has_pairs(dataset):  # an answer a row
            lengths = [document_lengths(dataset, split) for split in SPLITS]
            length = min(row_that_holds(max(each.max(initial=1) for each in lengths)), sizes.get("sequence_length", tokens))
            corpus = len(lengths[0]) * length
        elif has_prompts(dataset):
            needed = longest_prompt(dataset) + settings.get("answer_tokens", USUAL_ANSWER)
            length = min(row_that_holds(needed), sizes.get("sequence_length", needed))
            group = settings.get("rollouts", RunConfig.rollouts)
            tokens = corpus = max(1, ROLLOUTS // group) * group * length
            corpus *= 4
        elif dataset.codes:  # a picture a row
            length = max(int(document_lengths(dataset, split).max()) for split in SPLITS) - 1
        elif resolve_packing(settings.get("packing", AUTO), dataset) == WHOLE:
            whole = row_that_holds(max(document_lengths(dataset, split).max(initial=1) for split in SPLITS))
            few = max(whole, power_of_two(max(1, corpus // FEW_ROWS)))
            length = min(max(length, whole), few, tokens, sizes.get("sequence_length", tokens))
        else:
            length = min(length, power_of_two(max(1, longest_window(dataset))))
    named = settings.get("tokens_per_step", 0)
    lengths = [max(1, min(length, named) >> halvings) for halvings in range(4)] if named else [length]
    config = RunConfig(**{**sizes, **ENDING, **settings} | batch_of(settings, lengths, tokens, corpus, most))
    if dataset is not None and "micro_batch" not in settings:
        smaller = [one for one in smaller_batches(config) if fits(one, dataset.tokenizer.vocab_size, device)]
        if not smaller and usual < length and "sequence_length" not in settings:
            return fitted_to_weights(settings | {"sequence_length": usual}, sizes, dataset, device)
        config = smaller[0] if smaller else config  # if none fits, the run refuses it with advice
    return config


def usual_rate(config: RunConfig) -> float:
    """A peak learning rate that suits the run's model, in place of its own. GPT-2's falls with the width, as GPT-3's."""
    if config.init_from:
        return suited_rate(config.init_from, adapters=bool(config.lora))
    if config.optimizer == "muon":
        return presets.MODERN_RATE * (768 / config.channels) ** 0.5
    return min(0.4 / config.channels, 3e-3)


def suited_rate(source: str, *, adapters: bool) -> float:
    """The peak learning rate for finetuning: half of a handgrad run's own, all of it for adapters, or the usual one."""
    run = Path(source).parent if checkpoint.is_best_alias(Path(source)) else Path(source)
    if not (config := checkpoint.peek_config(run) or {}).get("data"):  # weights from elsewhere, imported or not
        return ADAPTERS_LEARNING_RATE if adapters else LEARNING_RATE
    rate = float(config["learning_rate"])
    if adapters:
        return max(rate, ADAPTERS_LEARNING_RATE)
    return LEARNING_RATE if config.get("lora") else rate / 2  # an adapter's rate is too high to train all weights
