"""The learning rate of a step: linear warm-up, then one of five shapes."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """With low = final_fraction * peak, r from 0 to 1 over the steps after the warm-up, and r' over the cooldown, the last
    part of all steps:

    warm-up   peak (s + 1) / warmup_steps
    cosine    low + (peak - low) (1 + cos(pi r)) / 2      (Loshchilov & Hutter 2017)
    linear    peak + (low - peak) r
    wsd       peak, and in the cooldown low + (1 - sqrt r') (peak - low)      (Haegele et al. 2024)
    trapezoid peak, and in the cooldown low + (1 - r') (peak - low)           (Zhai et al. 2022)
    constant  peak
    """

    shape: str
    peak: float
    final_fraction: float
    warmup_steps: int
    steps: int
    cooldown_fraction: float = 0.2  # of the steps

    def rate(self, step: int) -> float:
        """The learning rate of 0-based `step`."""
        peak, low = self.peak, self.final_fraction * self.peak
        if step < self.warmup_steps:
            return peak * (step + 1) / self.warmup_steps
        if self.shape == "constant":
            return peak
        if self.shape in ("wsd", "trapezoid"):
            cooldown_steps = max(1, round(self.steps * self.cooldown_fraction))
            ratio = min(1.0, max(0.0, (step - (self.steps - cooldown_steps)) / cooldown_steps))
            return low + (1 - (math.sqrt(ratio) if self.shape == "wsd" else ratio)) * (peak - low)
        ratio = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        if self.shape == "linear":
            return peak + (low - peak) * ratio
        return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * ratio))
