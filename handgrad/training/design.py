"""A training run, resolved: everything that the run is, decided once.

`run.resolve` makes it from the user's configuration. What is below here takes what it needs from it and never asks the
configuration again.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from handgrad.arena import Plan
from handgrad.config import ModelShape
from handgrad.layout import Buckets, Sharding
from handgrad.models.rows import Table
from handgrad.training.schedule import Schedule


@dataclass(frozen=True)
class Batch:
    """An optimizer step's samples: lanes * micro_steps * micro_batch of them, `sequence_length` tokens each."""

    micro_batch: int
    micro_steps: int  # micro-batches of a lane whose gradients are added up
    lanes: int
    sequence_length: int
    repeats: bool = False  # every step takes the first step's samples

    @property
    def samples(self) -> int:
        return self.lanes * self.micro_steps * self.micro_batch

    @property
    def tokens(self) -> int:
        return self.samples * self.sequence_length

    def first_sample(self, step: int) -> int:
        return 0 if self.repeats else step * self.samples


@dataclass(frozen=True)
class Guards:
    """The gradient's limit, the updates that are skipped, the weights that are compared."""

    clip_norm: float  # 0: none
    loss_z: float  # skip a loss so many deviations above the last 128 (0: never)
    norm_z: float  # the same for the gradient's norm
    loss_scaling: bool  # fp16's dynamic loss scale
    replicas_every: int = 0  # steps between comparisons of the ranks' weights (0: never)
    audit_every: int = 0  # steps between digests of the state (0: never)


@dataclass(frozen=True)
class Design:
    """A resolved run. `fp8` and `dropout` are for the rooms of that name, None where the run has neither."""

    device: torch.device
    dtype: torch.dtype  # of weights and activations
    ops: ModuleType
    plain_ops: ModuleType  # the same without fp8: for text, tasks, anything that reads the 16-bit weights
    model: ModuleType
    shape: ModelShape
    parameters: Table
    buckets: Buckets
    sharding: Sharding
    batch: Batch
    optimizer: Any
    schedule: Schedule
    guards: Guards
    seed: int
    recompute: int
    fp8: Any
    dropout: float
    plan: Plan
