"""A resolved training run: every decision about it, made once.

`run.resolve` builds it from the user's configuration. The modules below read it and never go back to the configuration.
"""

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from handgrad.memory.arena import Buffer, Plan
from handgrad.memory.layout import Buckets, Layout, Sharding
from handgrad.memory.rows import Table
from handgrad.networks import ModelShape
from handgrad.settings.batch_schedule import BatchSchedule


@dataclass(frozen=True)
class Batch:
    """The batch of each step: lanes * micro_steps * micro_batch samples of `sequence_length` tokens, trained or not."""

    micro_batch: int
    lanes: int
    sequence_length: int
    schedule: BatchSchedule
    repeats: bool = False  # every step begins with the first step's samples

    def tokens(self, step: int) -> int:
        """The tokens of 0-based `step`."""
        return self.schedule.tokens(step)

    def micro_steps(self, step: int) -> int:
        """Gradient accumulation steps: micro-batches per lane in `step`."""
        return self.tokens(step) // (self.lanes * self.micro_batch * self.sequence_length)

    def samples(self, step: int) -> int:
        """The samples of 0-based `step`, over all lanes."""
        return self.tokens(step) // self.sequence_length

    def first_sample(self, step: int) -> int:
        """The index of the first sample of `step`. Steps consume the samples in order."""
        return 0 if self.repeats else self.schedule.tokens_before(step) // self.sequence_length

    @property
    def gradient_tokens(self) -> int:
        """The divisor of every token's gradient: always the first step's token count, so that gradients keep their range as
        the batch grows. The verdict divides their sum by the rest."""
        return self.tokens(0)


@dataclass(frozen=True)
class Schedule:
    """The learning rate schedule: linear warm-up, then one of five shapes. low = final_fraction * peak; r runs from 0 to 1
    over the steps after the warm-up, r' over the cooldown at the end of the run, which cuts no warm-up short:

    warm-up   peak (s + 1) / warmup_steps
    cosine    low + (peak - low) (1 + cos(pi r)) / 2      (Loshchilov & Hutter 2017)
    linear    peak + (low - peak) r
    wsd       peak, and in the cooldown low + (1 - sqrt r') (peak - low)      (Haegele et al. 2024)
    trapezoid peak, and in the cooldown low + (1 - r') (peak - low)           (Zhai et al. 2022)
    constant  peak"""

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
            cooldown_steps = max(1, min(round(self.steps * self.cooldown_fraction), self.steps - self.warmup_steps))
            ratio = min(1.0, max(0.0, (step - (self.steps - cooldown_steps)) / cooldown_steps))
            return low + (1 - (math.sqrt(ratio) if self.shape == "wsd" else ratio)) * (peak - low)
        ratio = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        if self.shape == "linear":
            return peak + (low - peak) * ratio
        return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * ratio))


@dataclass(frozen=True)
class Guards:
    """Gradient clipping, and when a run skips an update, compares weights across ranks and digests its state."""

    clip_norm: float  # 0: none
    loss_z: float  # skip a step whose loss is this many deviations above the last 128 (0: never)
    norm_z: float  # the same for the gradient's norm
    loss_scaling: bool  # fp16's dynamic loss scale
    replicas_every: int = 0  # steps between comparisons of the ranks' weights (0: never)
    audit_every: int = 0  # steps between digests of the state (0: never)


@dataclass(frozen=True)
class Design:
    """A resolved run. The packages `fp8`, `dropout` and `lora` read the fields of their name; None: the run has none."""

    device: torch.device
    precision: str  # never "auto"
    dtype: torch.dtype  # of weights and activations
    ops: ModuleType
    plain_ops: ModuleType  # `ops` without fp8, for readers of the 16-bit weights: sampling, tasks
    model: ModuleType
    shape: ModelShape
    parameters: Table
    buckets: Buckets
    sharding: Sharding
    batch: Batch
    optimizer: Any
    optimizer_state: dict[str, Layout]
    schedule: Schedule
    guards: Guards
    seed: int
    recompute: int
    fp8: Any
    dropout: float
    plan: Plan
    host_plan: Plan  # of optimizer state offloaded to the host
    sample_tokens: int = 0  # length of the run's sample texts
    lora: Any = None
    preference: Any = None  # the loss is of pairs
    policy: Any = None  # the loss is of rewarded answers
    teacher: Any = None  # of `joins.distill`
    frozen: Table = ()  # with `lora`: the model's weights, in their own flat buffer
    fp8_only: frozenset[str] = frozenset()  # names of frozen weights that exist only in fp8

    @property
    def all_parameters(self) -> Table:
        """Frozen weights first, then trained ones."""
        return (*self.frozen, *self.parameters)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The buffers of the device and of the host."""
        return (*self.plan.buffers, *self.host_plan.buffers)

    @property
    def flops_per_token(self) -> float:
        """FLOPs of forward and backward, and of a teacher's forward."""
        flops = self.shape.flops_per_token
        flops = flops if self.lora is None else self.lora.flops_per_token(flops, self.frozen, self.shape)
        return flops + (0.0 if self.teacher is None else self.teacher.flops_per_token)
