"""Tables of a model's activations and their gradients, declared like its parameters as fields of dataclasses.

activation      shape, dtype, lifetime in stages, and the recompute level from which it is recomputed. Activation gradients
                are such rows too: one buffer each, which all blocks use in turn
optional_input  an input that only some runs have
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from handgrad.machine.devices import accumulation_dtype
from handgrad.memory.arena import ALWAYS, WHOLE_BLOCKS, Buffer, Clock, Interval, Lives, recomputed_lifetimes
from handgrad.memory.rows import KIND, Dims, sizes
from handgrad.networks import ModelShape
from handgrad.networks.network import NEVER


def activation(
    shape: str,
    dtype: torch.dtype | Literal["16-bit", "statistics"] = "16-bit",
    *,
    lives: Lives | None = None,
    recomputed_from: int = NEVER,
    of: str = "",
    optional: bool = False,
) -> Any:
    """An activation, or the gradient of one. `dtype`: "16-bit" is the run's dtype, "statistics" the accumulators'. `lives`:
    the ticks it lives through, by default all. `recomputed_from`: from this recompute level on it lives only at its first
    and last tick (but see `recomputed_lifetimes`). `of`: this row aliases that tensor, and allocates memory only
    for its other forms. `optional`: a model may lack it."""
    row = {"shape": shape, "dtype": dtype, "lives": lives, "recomputed_from": recomputed_from, "of": of}
    return field(metadata=row | {"optional": optional})


def optional_input() -> Any:
    """An input that only some runs have: the view of this name, or None (`joins.documents`)."""
    return field(metadata={"optional": True})


@dataclass
class PassTensors:
    """The inputs of a pass, its losses, and the scratch of its operations."""

    tokens: Tensor = activation("B T", torch.int64)
    targets: Tensor = activation("B T", torch.int64)
    sorted_positions: Tensor = activation("N", torch.int32)  # 0..N-1 ordered by token, for the embedding's backward
    document_starts: Tensor | None = optional_input()  # if a row packs several documents
    losses: Tensor = activation("N", "statistics")
    scratch: Tensor = activation("scratch", torch.uint8)


@dataclass(frozen=True)
class ActivationRow:
    """A tensor of a pass. `ticks`: its lifetimes, one per layer for a gradient that all blocks use in turn."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    ticks: tuple[Interval, ...]
    recomputed_from: int = NEVER
    of: str = ""  # the tensor that this row aliases, without memory of its own
    whole_blocks: tuple[Interval, ...] = ()  # the lifetimes of a block's tensor at the recompute level `WHOLE_BLOCKS`

    def lifetimes(self, recompute: int) -> tuple[Interval, ...]:
        if recompute >= WHOLE_BLOCKS and self.whole_blocks:
            return self.whole_blocks
        if recompute < self.recomputed_from:
            return self.ticks
        ((first, last),) = self.ticks
        return ((first, first), (last, last))

    def buffer(self, recompute: int) -> Buffer:
        return Buffer(self.name, self.shape, self.dtype, KIND, self.lifetimes(recompute))


def activation_rows(
    tensors: type, dims: Dims, dtypes: Mapping[str, torch.dtype], clock: Clock, prefix: str = ""
) -> Iterator[ActivationRow]:
    """The rows of a dataclass of activations, in field order."""
    for f in fields(tensors):
        row = f.metadata
        if "block" in row:
            for layer in clock.every_layer():
                yield from activation_rows(row["block"], dims, dtypes, layer, f"{prefix}{f.name}.{layer.layer}.")
        elif "shape" in row:
            ticks = row["lives"](clock) if row["lives"] else ALWAYS
            dtype = dtypes.get(row["dtype"], row["dtype"])
            shape = sizes(row["shape"], dims)
            whole = recomputed_lifetimes(clock, ticks) if prefix and clock.training else ()
            yield ActivationRow(prefix + f.name, shape, dtype, ticks, row["recomputed_from"], row["of"], whole)


def dtypes_of(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtypes behind "16-bit" and "statistics" in a run with weights and activations of `dtype`."""
    return {"16-bit": dtype, "statistics": accumulation_dtype(dtype)}


def rows_of_pass(
    tables: tuple[type, type],
    shape: ModelShape,
    batch: int,
    length: int,
    dtype: torch.dtype,
    ops: ModuleType,
    *,
    chunk: int,
    training: bool,
) -> Iterator[ActivationRow]:
    """The rows of an architecture's `Activations` and, in training, its `Gradients`, for `batch` samples of `length`
    tokens. `chunk`: tokens per chunk of the loss head."""
    N, clock = batch * length, Clock(shape.num_layers, stages=2, training=training)
    attention = {"num_heads": shape.num_heads, "kv_heads": shape.kv_heads, "head_width": shape.head_width}
    sizes = {**shape.letters, "B": batch, "T": length, "N": N, "chunk": chunk}
    sizes["scratch"] = ops.scratch_bytes(tokens=N, channels=shape.channels, widest=shape.widest)
    if training:
        attention |= {"batch": batch, "length": length, "window": shape.window}
        sizes["attention_scratch"] = ops.attention_scratch_bytes(dtype=dtype, **attention)
    for table in tables if training else tables[:1]:
        yield from activation_rows(table, sizes, dtypes_of(dtype), clock)
