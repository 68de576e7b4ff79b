"""The run that suits weights: `handgrad train --init-from WEIGHTS --data DIR` without a preset or a recipe.

Short rows, however long the weights' context is, small steps and three epochs. The learning rates come from
docs/finetuning.md: weights from elsewhere have seen much more text; a run of ours continues at half of its rate.
"""

import os
from pathlib import Path
from typing import Any

import torch

from handgrad import checkpoint, devices
from handgrad.checkpoint import is_best_alias
from handgrad.config import AUTO, WHOLE, RunConfig
from handgrad.data.shards import SPLITS, Dataset, open_dataset
from handgrad.parallel.launchers import find_rank_info
from handgrad.run.packing import document_lengths, resolve_packing, row_that_holds
from handgrad.run.suited import CHOSEN, fits, longest_window, paced, power_of_two, smaller_batches

# By the kind of device: tokens of a row at most, tokens of a step, rows of a micro-batch at most.
CPU_LIMITS, GPU_LIMITS = (512, 2048, 4), (2048, 16384, 16)
LEARNING_RATE, ADAPTERS_LEARNING_RATE = 3e-5, 2e-4
EPOCHS, WARMUP_SHARE = 3, 0.05
ENOUGH_STEPS = 100  # with fewer, a few conversations would move the weights by next to nothing
FEW_ROWS = 16  # of an epoch, at least: conversations need no longer rows than the longest, and short rows make more steps
ENDING: dict[str, Any] = {"schedule": "linear", "final_learning_rate_fraction": 0.0}


def chosen_finetuning(settings: dict[str, Any], sizes: dict[str, Any], begun: dict[str, Any] | None) -> dict[str, Any]:
    """The settings beside those given, for weights of these `sizes`. A run that has `begun` in `out` from the same weights
    keeps its own. Without data, for `plan`, the weights alone decide.

    Raises the errors of `open_dataset` and `resolve_device`.
    """
    source, device = settings["init_from"], devices.resolve_device(settings.get("device", RunConfig.device))
    if begun is not None:
        return {name: begun[name] for name in (*CHOSEN, "sample_tokens") if name in begun}
    dataset = open_dataset(settings["data"], source) if "data" in settings else None
    config = fitted(settings, sizes, dataset, device)
    chosen = {name: getattr(config, name) for name in ("sequence_length", "tokens_per_step", "micro_batch", *ENDING)}
    chosen["learning_rate"] = settings.get("learning_rate", suited_rate(source, adapters=bool(config.lora)))
    if dataset is not None:
        epochs = max(EPOCHS, ENOUGH_STEPS * config.tokens_per_step / dataset.tokens("train"))
        chosen |= paced(config, dataset, device, epochs, WARMUP_SHARE, settings.get("steps", 0))
        if dataset.is_chat:
            chosen["sample_tokens"] = 0  # a document from nothing is no conversation
    return chosen


def fitted(settings: dict[str, Any], sizes: dict[str, Any], dataset: Dataset | None, device: torch.device) -> RunConfig:
    """Rows of at most the weights' context, the longest window of the shards and the device's limit, or that hold the
    longest conversation; steps of at most a quarter of the corpus; the largest micro-batch that fits, by the `settings`
    that are given."""
    longest, tokens, most = CPU_LIMITS if device.type == "cpu" else GPU_LIMITS
    length = min(sizes.get("sequence_length", longest), longest)
    corpus, usual = tokens * 4, length
    if dataset is not None:
        corpus = dataset.tokens("train")
        if resolve_packing(settings.get("packing", AUTO), dataset) == WHOLE:
            whole = row_that_holds(max(document_lengths(dataset, split).max(initial=1) for split in SPLITS))
            few = max(whole, power_of_two(max(1, corpus // FEW_ROWS)))
            length = min(max(length, whole), few, tokens, sizes.get("sequence_length", tokens))
        else:
            length = min(length, power_of_two(max(1, longest_window(dataset))))
    micro = settings.get("micro_batch", 0)
    together = (micro or 1) * (settings.get("lanes", 0) or find_rank_info(os.environ).size)  # rows, in all lanes
    if "tokens_per_step" in settings:
        tokens = settings["tokens_per_step"]
        shorter = [max(1, min(length, tokens) >> halvings) for halvings in range(4)]
        length = next((one for one in shorter if tokens % (one * together) == 0), length)
    length = settings.get("sequence_length", 0) or length
    rows = max(1, tokens // length)
    if "tokens_per_step" not in settings:
        rows = min(rows, power_of_two(max(1, corpus // length // 4)))
        rows = max(1, rows // together) * together
        tokens = rows * length
    per_lane = max(1, rows // together)
    micro = micro or min(per_lane & -per_lane, most)  # the largest power of two that divides it
    batch: dict[str, Any] = {"sequence_length": length, "tokens_per_step": tokens, "micro_batch": micro}
    config = RunConfig(**{**sizes, **ENDING, **settings} | batch)
    if dataset is not None and "micro_batch" not in settings:
        smaller = [found for found in smaller_batches(config) if fits(found, dataset.tokenizer.vocab_size, device)]
        if not smaller and usual < length and "sequence_length" not in settings:
            return fitted(settings | {"sequence_length": usual}, sizes, dataset, device)
        config = smaller[0] if smaller else config  # does not fit: the run refuses it with advice
    return config


def suited_rate(source: str, *, adapters: bool) -> float:
    """The peak learning rate for weights: of a run of ours half of its own; for adapters all of it, if it is no less than
    that for other weights."""
    run = Path(source).parent if is_best_alias(Path(source)) else Path(source)
    config = checkpoint.peek_config(run) or {}
    if not config.get("data"):  # of weights from elsewhere, imported or not
        return ADAPTERS_LEARNING_RATE if adapters else LEARNING_RATE
    rate = float(config["learning_rate"])
    if adapters:
        return max(rate, ADAPTERS_LEARNING_RATE)
    return LEARNING_RATE if config.get("lora") else rate / 2  # the rate of adapters is too high for all weights
