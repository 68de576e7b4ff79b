"""Checks that a run's shapes and settings support fp8 GEMMs. `RunConfig` imports them."""

import math
from typing import Any

from handgrad.errors import UsageError
from handgrad.networks import NETWORKS, VOCABULARY_MULTIPLE, ModelShape

WIDEST_HEAD_OF_FP8 = 128  # wider heads spill registers in attention kernels that also write fp8
HEAD_GEMMS = ("forward", "dgrad", "wgrad")  # of the loss head; each switches to fp8 by itself
FP8_MULTIPLE = 16  # every side of an fp8 GEMM is a multiple: cuBLASLt reads 16 bytes at a time


def check_fp8(config: Any) -> None:
    """Raises `UsageError` for settings or shapes that fp8 does not support."""
    shape: ModelShape = config.shape(VOCABULARY_MULTIPLE)
    if not shape.network.fp8(shape):
        raise UsageError(f"architecture {config.architecture} has no forms in fp8; --precision bf16 trains it")
    if not shape.fp8_parts and not config.fp8_head_gemms:
        head = f"{config.fp8_head_gemms or 'none'}{' beside lora' * bool(config.lora)}"
        raise UsageError(
            f"architecture {config.architecture} has forms in fp8 of the loss head alone, found fp8_head {head};"
            " --precision bf16 trains it"
        )
    if config.dropout:
        raise UsageError(f"precision fp8 trains without dropout, found {config.dropout:g}; --precision bf16 trains with it")
    if shape.fp8_parts and (width := shape.head_width) > WIDEST_HEAD_OF_FP8:
        more = f", --num-heads {fitting_heads(config.channels)} fits" if shape.network.head_width is None else ""
        raise UsageError(
            f"precision fp8 takes heads of up to {WIDEST_HEAD_OF_FP8} channels, found {width};"
            f" --precision bf16 takes them{more}"
        )
    if config.channels % FP8_MULTIPLE:
        raise UsageError(f"channels must be a multiple of {FP8_MULTIPLE} for precision fp8, found {config.channels}")
    for name, size in shape.network.sides(shape).items() if shape.fp8_parts else ():
        if size % FP8_MULTIPLE:
            actual = f"for precision fp8, found {size}"
            raise UsageError(f"{config.architecture} must have {name} in multiples of {FP8_MULTIPLE} {actual}")
    samples, length = config.micro_batch, config.sequence_length
    if not takes_micro_batch(config, samples):
        least = FP8_MULTIPLE // math.gcd(FP8_MULTIPLE, length)
        more = -(-samples // least) * least
        together = more * length * max(1, config.lanes)
        tokens = -(-config.tokens_per_step // together) * together
        step = f" --tokens-per-step {tokens}" if tokens != config.tokens_per_step and not config.batch_schedule else ""
        raise UsageError(
            f"micro_batch * sequence_length must be a multiple of {FP8_MULTIPLE} for precision fp8, found {samples} *"
            f" {length} = {samples * length}; try --micro-batch {more}{step}"
        )
    chunk = config.head_chunk_tokens
    if "wgrad" in config.fp8_head_gemms and chunk % FP8_MULTIPLE:
        raise UsageError(
            f"head_chunk_tokens must be a multiple of {FP8_MULTIPLE} for fp8_head wgrad, found {chunk};"
            f" try --head-chunk-tokens {-(-chunk // FP8_MULTIPLE) * FP8_MULTIPLE}, or --fp8-head forward,dgrad"
        )


def fitting_heads(channels: int) -> int:
    """The fewest heads into which fp8 can divide `channels`."""
    return next(heads for heads in range(-(-channels // WIDEST_HEAD_OF_FP8), channels + 1) if channels % heads == 0)


def gradient_format(config: Any) -> str:
    """`fp8_gradients` with "auto" replaced by what suits the network; adapters keep e4m3."""
    suitable = "e4m3" if config.lora else NETWORKS[config.architecture].fp8_gradients
    return suitable if config.fp8_gradients == "auto" else config.fp8_gradients


def takes_micro_batch(config: Any, samples: int) -> bool:
    """True if the GEMMs of the run's precision support a micro-batch of this many samples."""
    return config.precision != "fp8" or samples * config.sequence_length % FP8_MULTIPLE == 0
