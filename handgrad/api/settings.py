"""The settings of a run as keywords, for editors, type checkers and notebooks.

`Settings` repeats the fields of `RunConfig`, as a type checker reads it without running anything; a test holds the two
together.
"""

import inspect
import os
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar

Described = TypeVar("Described", bound=Callable[..., Any])


class Settings(TypedDict, total=False):
    """Single fields of `RunConfig`; `handgrad train --help-all` says what each means."""

    data: str | os.PathLike[str]
    out: str | os.PathLike[str]
    architecture: str
    techniques: str
    llama: str
    num_layers: int
    num_heads: int
    channels: int
    sequence_length: int
    init_from: str | os.PathLike[str]
    freeze: str
    lora: str
    steps: int
    tokens_per_step: int
    batch_schedule: str
    micro_batch: int
    lanes: int
    packing: str
    overfit_one_batch: bool
    learning_rate: float
    optimizer: str
    matrix_learning_rate: float
    schedule: str
    warmup_steps: int
    cooldown_fraction: float
    final_learning_rate_fraction: float
    weight_decay: float
    beta1: float
    beta2: float
    adam_epsilon: float
    clip_norm: float
    skip_loss_z: float
    skip_norm_z: float
    max_skips: int
    seed: int
    dropout: float
    zero: int
    reduce_precision: str
    check_ranks_every: int
    join_seconds: int
    silence_seconds: int
    stall_seconds: int
    fp8_keep_bf16: str
    fp8_head: str
    fp8_gradients: str
    fp8_scaling: str
    fp8_window: int
    fp8_margin: int
    fp8_count_every: int
    fp8_on_saturation: str
    fp8_saturation_steps: int
    eval_every: int
    eval_tokens: int
    eval_stride: int
    eval_tasks: str
    eval_task_examples: int
    sample_every: int
    sample_tokens: int
    log_every: int
    log_to: str
    audit_every: int
    gpu_every: int
    save_every: int
    keep_checkpoints: int
    keep_every: int
    keep_best: bool
    async_save: bool
    device: str
    precision: str
    backend: str
    master_weights: bool
    moments: str
    offload: bool
    recompute: int
    head_chunk_tokens: int


def with_settings(described: Described) -> Described:
    """Shows the fields instead of `**settings` in the signature, for completion in a notebook and for `help`."""
    signature = inspect.signature(described)
    *own, rest = signature.parameters.values()
    assert rest.kind is rest.VAR_KEYWORD
    fields = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=..., annotation=kind)
        for name, kind in Settings.__annotations__.items()
    ]
    described.__signature__ = signature.replace(parameters=[*own, *fields])  # type: ignore[attr-defined]
    return described
