"""The sizes of the CUDA operations' scratch, for a GPU that is not there: arithmetic, without Triton and CUDA's libraries.

`handgrad.ops.cuda` and `handgrad.fp8.cuda` have the same functions beside their kernels; a test compares them.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace

import torch

from handgrad.config import RunConfig
from handgrad.gpus import HOPPER, Gpu
from handgrad.run.resolve import resolve
from handgrad.training.design import Design

WORKSPACE_BYTES = 32 << 20  # of cuBLASLt
CHOICES = 1024  # logits of a program that chooses tokens
CUDNN_HEADS = range(72, 129, 8)  # channels of the heads that cuDNN takes on Hopper
CUDNN_SUMS = 8  # float32 partial sums of dq in its deterministic backward: as seen with heads of 64, only the library knows


def parts(size: int, tile: int) -> int:
    return -(-size // tile)


def power_of_two(size: int) -> int:
    """The smallest one from `size` on."""
    return 1 << (size - 1).bit_length()


@dataclass(frozen=True)
class Sizes:
    """The sizes that a design asks its operations for."""

    cudnn: bool  # it takes the heads that it can: on Hopper, and without dropout

    @property
    def decode(self) -> SimpleNamespace:
        return SimpleNamespace(choosing_scratch_bytes=choosing_scratch_bytes)

    def scratch_bytes(self, *, tokens: int, channels: int, widest: int) -> int:
        """The workspace of cuBLASLt, or float32 partial sums: of a layer norm, of a bias gradient, of the embedding."""
        sums = 512 * 3 * channels, min(64, parts(tokens, 64)) * widest, parts(tokens, 32) * 2 * channels
        return max(WORKSPACE_BYTES, 4 * max(sums))

    def attention_scratch_bytes(
        self,
        *,
        batch: int,
        length: int,
        num_heads: int,
        head_width: int,
        dtype: torch.dtype,
        kv_heads: int = 0,
        documents: bool = False,
    ) -> int:
        """Triton's, two float32 numbers per query and head, or cuDNN's, which keeps no documents apart."""
        queries = batch * length * num_heads
        if self.cudnn and not documents and dtype.itemsize == 2 and head_width in CUDNN_HEADS:
            return cudnn_scratch_bytes(queries, head_width)
        return 8 * queries

    def muon_scratch_bytes(self, *, matrices: int, rows: int, columns: int) -> int:
        """Partial sums of squares, the other X, A and B of a batch; or a factor of each row, and a sum for every four."""
        elements, square = rows * columns, min(rows, columns) ** 2
        sizes = 4 * parts(elements, 1 << 16), 2 * elements, 2 * square, 2 * square
        return max(sum(parts(matrices * size, 512) * 512 for size in sizes), 4 * (rows + parts(rows, 4)))

    def statistics_parts(
        self,
        *,
        batch: int,
        length: int,
        num_heads: int,
        head_width: int,
        channels: int,
        feed_forward: int,
        widest: int,
        padded_vocab_size: int,
    ) -> int:
        """Programs of the fp8 kernel with the most of them; each leaves a part of its tensor's statistics."""
        tokens, row = batch * length, power_of_two(channels)
        wide = head_width > 64  # attention's smallest tiles of any GPU follow from it
        rows_forward = min(16, max(1, 2048 // row))
        programs_backward = min(512 if row <= 1024 else 256, parts(tokens, 2 if row <= 2048 else 1))
        return max(
            parts(tokens, 64) * parts(widest, 128),
            parts(widest, 64) * parts(channels, 128),
            parts(channels, 64) * parts(widest, 128),
            parts(padded_vocab_size, 64) * parts(channels, 128),
            parts(tokens, rows_forward),
            programs_backward,
            batch * num_heads * parts(length, 64),
            batch * num_heads * (parts(length, 64) + parts(length, 32 if wide else 64)),
            parts(tokens * feed_forward, 8192),
            parts(tokens, 32) * parts(feed_forward, 128),
            min(4096, parts(tokens, min(16, max(1, 1024 // row)))),
        )


def cudnn_scratch_bytes(queries: int, head_width: int) -> int:
    """The workspace of cuDNN's backward for (B, H, T) queries."""
    return 4 * queries * (CUDNN_SUMS * head_width + 1) + 256


def choosing_scratch_bytes(*, batch: int, vocab_size: int) -> int:
    return 16 * batch * parts(vocab_size, CHOICES)


def sizes_on(gpu: Gpu, config: RunConfig) -> Sizes:
    return Sizes(cudnn=gpu.capability == HOPPER and not config.dropout)


def resolve_for(gpu: Gpu, config: RunConfig, vocab_size: int, ranks: int = 1) -> Design:
    """The design of a run on such a GPU, which this machine need not have. The precision must not be auto; TF32, a way to
    multiply float32 numbers, takes the memory of float32."""
    precision = "fp32" if config.precision == "tf32" else config.precision
    return sized(replace(config, precision=precision), vocab_size, ranks, sizes_on(gpu, config))


@lru_cache(maxsize=32)  # most GPUs share a design; one of 48 layers takes half a second
def sized(config: RunConfig, vocab_size: int, ranks: int, sizes: Sizes) -> Design:
    return resolve(config, vocab_size, ranks=ranks, device=torch.device("meta"), sizes=sizes)
