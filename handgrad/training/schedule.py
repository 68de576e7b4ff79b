"""The learning rate of a step: linear warm-up, then one of four shapes."""

import math

from handgrad.config import RunConfig

WSD_DECAY_FRACTION = 0.2  # of the steps: the last fifth decays


def learning_rate(config: RunConfig, step: int) -> float:
    """The rate of 0-based `step`.

    Warm-up: peak (s + 1) / w. Then, with r from 0 to 1 over the remaining steps and `low` = fraction * peak:
    cosine  low + (peak - low) (1 + cos(pi r)) / 2      (Loshchilov & Hutter 2017)
    linear  peak + (low - peak) r
    wsd     peak, and in the last fifth of all steps low + (1 - sqrt r') (peak - low)   (Haegele et al. 2024)
    constant  peak
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    low = config.final_learning_rate_fraction * peak
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.schedule == "constant":
        return peak
    if config.schedule == "wsd":
        decay_steps = max(1, round(config.steps * WSD_DECAY_FRACTION))
        ratio = min(1.0, max(0.0, (step - (config.steps - decay_steps)) / decay_steps))
        return low + (1 - math.sqrt(ratio)) * (peak - low)
    ratio = min(1.0, (step - warmup) / max(1, config.steps - warmup))
    if config.schedule == "linear":
        return peak + (low - peak) * ratio
    return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * ratio))
