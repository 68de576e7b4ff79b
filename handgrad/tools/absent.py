"""A run's design on a GPU that is not there: its operations give their sizes alone (`handgrad.ops.sizes`)."""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from handgrad.machine.gpus import HOPPER, Gpu
from handgrad.ops import sizes
from handgrad.run.resolve import resolve
from handgrad.settings.config import RunConfig
from handgrad.training.design import Design


@dataclass(frozen=True)
class Sizes:
    """The sizes that a design asks its operations for."""

    cudnn: bool  # it takes the heads that it can: on Hopper, and without dropout

    scratch_bytes = staticmethod(sizes.scratch_bytes)
    muon_scratch_bytes = staticmethod(sizes.muon_scratch_bytes)
    statistics_parts = staticmethod(sizes.statistics_parts)
    decode = sizes

    def attention_scratch_bytes(
        self, *, head_width: int, dtype: torch.dtype, kv_heads: int = 0, documents: bool = False, **heads: int
    ) -> int:
        """Triton's, or cuDNN's, which keeps no documents apart."""
        if self.cudnn and not documents and dtype.itemsize == 2 and head_width in sizes.CUDNN_HEADS:
            return sizes.cudnn_scratch_bytes(**heads, head_width=head_width)
        return sizes.attention_scratch_bytes(**heads)


def sizes_on(gpu: Gpu, config: RunConfig) -> Sizes:
    return Sizes(cudnn=gpu.capability == HOPPER and not config.dropout)


def resolve_for(gpu: Gpu, config: RunConfig, vocab_size: int, ranks: int = 1) -> Design:
    """The design of a run on such a GPU, which this machine need not have. The precision must not be auto; TF32, a way to
    multiply float32 numbers, takes the memory of float32."""
    precision = "fp32" if config.precision == "tf32" else config.precision
    return sized(replace(config, precision=precision), vocab_size, ranks, sizes_on(gpu, config))


@lru_cache(maxsize=32)  # most GPUs share a design; one of 48 layers takes half a second
def sized(config: RunConfig, vocab_size: int, ranks: int, operations: Sizes) -> Design:
    return resolve(config, vocab_size, ranks=ranks, device=torch.device("meta"), sizes=operations)
