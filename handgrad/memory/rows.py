"""The parameter table of a model, and the offsets, initial weights and views derived from it.

An architecture declares each tensor once, as a field of a dataclass: the field's name names the tensor, its metadata is the
row. Shapes use the letters of `handgrad.ops` ("N 3C", "B H T"); the model sets their sizes.

    parameter   shape, initial distribution, bucket, optimizer group
    activation  shape, dtype, lifetimes (`memory.activations`)
    shared      a block's alias of a tensor that all blocks use
    repeated    a dataclass per layer
"""

import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import Field, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from handgrad.errors import UsageError
from handgrad.names import nearest_name
from handgrad.networks import ModelShape

ALIGN_ELEMENTS = 128  # alignment of a parameter's start: 512 bytes of float32, 256 of bf16
BLOCK_ELEMENTS = 1 << 16  # gradient elements per partial sum of the global norm
LAYERS = re.compile(r"blocks\.(\d+)-(\d+)(\..*)?")  # a range of blocks in a name pattern
KIND = "activations"  # the arena's allocation of a model's activations

Dims = Mapping[str, int]  # the size of each letter
Group = Literal["matrix", "embedding", "vector", "codebook"]  # optimizer groups
T = TypeVar("T")


@dataclass(frozen=True)
class Init:
    """An initial distribution, or a constant `value`. `residual`: a projection into the residual stream, scaled by
    1/sqrt(2L); `by_inputs`: scaled by 1/sqrt(I) for a matrix with I columns."""

    kind: Literal["normal", "zeros", "constant"]
    std: float = 0.0
    residual: bool = False
    by_inputs: bool = False
    value: float = 0.0
    end: int | None = None  # of the columns that a distribution fills; the rest hold `value`

    def std_of(self, shape: tuple[int, ...], layers: int) -> float:
        return self.std / math.sqrt((2 * layers if self.residual else 1) * (shape[-1] if self.by_inputs else 1))


ZEROS, ONES = Init("zeros"), Init("constant", value=1.0)


# Fields.


def parameter(
    shape: str,
    init: Init,
    group: Group,
    *,
    bucket: str = "",
    stored_rows: str = "",
    fallback: str = "",
    optional: bool = False,
    rate: float = 1.0,
) -> Any:
    """A parameter. `bucket`: groups parameters whose gradients complete at the same time (a block's bucket has the block's
    name). `stored_rows`: the letter for the number of saved rows; padding rows follow them. A model may lack an
    `optional` parameter, or one with a `fallback`, the tensor to use instead. `rate`: multiplies the learning rate,
    with AdamW."""
    row = {"shape": shape, "init": init, "group": group, "bucket": bucket, "stored": stored_rows}
    return field(metadata=row | {"of": fallback, "optional": optional, "rate": rate})


def shared(of: str = "") -> Any:
    """A block's alias of a tensor that all blocks use in turn; `of`: the tensor's name, if it differs."""
    return field(metadata={"of": of})


def repeated(block: type) -> Any:
    """One `block` per layer."""
    return field(metadata={"block": block})


def sizes(shape: str, dims: Dims) -> tuple[int, ...]:
    return tuple(dims[letters] for letters in shape.split())


# Parameters.


@dataclass(frozen=True)
class ParameterRow:
    """A parameter in the flat buffers. Weights, gradients and optimizer state use the same offset."""

    name: str
    shape: tuple[int, ...]  # as allocated
    stored_rows: int  # as saved, without the embedding's padding
    init: Init
    std: float
    group: Group
    bucket: str
    offset: int = 0  # elements from the start of a flat buffer
    frozen: bool = False  # the optimizer skips it
    whole: bool = False  # the optimizer updates it in one call, with its shape
    lane: int | None = None  # the lane that holds all of it; None: cuts may divide it
    rate: float = 1.0  # multiplies the step's learning rate

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def aligned_elements(self) -> int:
        """Elements including the alignment gap after it."""
        return rounded_up(self.elements, ALIGN_ELEMENTS)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return (self.stored_rows, *self.shape[1:])

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.offset + self.elements].view(self.shape)

    def stored(self, flat: Tensor) -> Tensor:
        """The part that checkpoints and exports hold, without padding rows."""
        return self.view(flat)[: self.stored_rows]


Table = tuple[ParameterRow, ...]


def parameter_rows(tensors: type, shape: ModelShape, prefix: str = "") -> Iterator[ParameterRow]:
    """The rows of a dataclass of parameters, in field order."""
    dims = shape.letters
    for f in fields(tensors):
        if "block" in f.metadata:
            for layer in range(shape.num_layers):
                yield from parameter_rows(f.metadata["block"], shape, f"{f.name}.{layer}")
        elif "init" in f.metadata:
            row, allocated = f.metadata, sizes(f.metadata["shape"], dims)
            std = row["init"].std_of(allocated, shape.num_layers)
            stored = dims[row["stored"]] if row["stored"] else allocated[0]
            name = f"{prefix}.{f.name}" if prefix else f.name
            bucket = row["bucket"] or prefix
            yield ParameterRow(name, allocated, stored, row["init"], std, row["group"], bucket, rate=row["rate"])


def lay_out(
    rows: Iterable[ParameterRow], lanes: int = 1, whole: Callable[[ParameterRow], bool] = lambda row: False
) -> Table:
    """Assigns offsets to the rows. With several `lanes`, each bucket can be cut into one aligned part per lane: equal parts
    or, if `whole` holds for any of its parameters, cuts at parameter borders."""
    placed: dict[str, ParameterRow] = {}
    rows = [row if row.whole == (by_itself := whole(row)) else replace(row, whole=by_itself) for row in rows]
    offset, loads = 0, [0] * lanes
    for _, group in itertools.groupby(rows, key=lambda row: lanes == 1 or row.bucket):
        bucket = list(group)
        offset = rounded_up(offset, ALIGN_ELEMENTS * lanes)
        if lanes > 1 and any(row.whole for row in bucket):
            bucket = assigned_to_lanes(bucket, loads)
        for row in bucket:
            placed[row.name] = replace(row, offset=offset)
            offset += row.aligned_elements
    return tuple(placed[row.name] for row in rows)


def assigned_to_lanes(bucket: list[ParameterRow], loads: list[int]) -> list[ParameterRow]:
    """Assigns rows to lanes and sorts them by lane. Largest first, each goes to the lane with the fewest elements (Graham
    1969, longest processing time first). `loads`: elements per lane over all buckets so far, which balance as a whole."""
    parts: list[list[ParameterRow]] = [[] for _ in loads]
    for row in sorted(bucket, key=lambda row: -row.elements):
        lane = loads.index(min(loads))
        loads[lane] += row.aligned_elements
        parts[lane].append(replace(row, lane=lane))
    return [row for part in parts for row in part]


def rounded_up(elements: int, multiple: int) -> int:
    return -(-elements // multiple) * multiple


def flat_elements(table: Table, lanes: int = 1) -> int:
    """Length of a flat buffer: the table's end, rounded up to whole blocks or, with lanes, to equal aligned parts."""
    end = max(row.offset + row.elements for row in table)
    return rounded_up(end, BLOCK_ELEMENTS if lanes == 1 else ALIGN_ELEMENTS * lanes)


def count_parameters(table: Iterable[ParameterRow]) -> int:
    """The number of parameters, without padding."""
    return sum(math.prod(row.stored_shape) for row in table)


def initialize(table: Table, seed: int, put: Callable[[ParameterRow, Tensor], object]) -> None:
    """Draws the initial weights and passes the stored part of each parameter, float32 on the CPU, to `put` from several
    threads. Skips parameters that start at zero.

    Each tensor has its own generator, keyed by (seed, index in the table), so every device, precision and number of ranks
    starts from the same values."""

    def draw(index: int) -> None:
        row = table[index]
        values = torch.full(row.stored_shape, row.init.value)
        if row.init.kind == "normal":
            generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
            values[..., : row.init.end].normal_(0.0, row.std, generator=generator)
        put(row, values)

    # A thread per processor: one tensor's draws are sequential, different tensors are independent.
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        list(threads.map(draw, [index for index, row in enumerate(table) if row.init.kind != "zeros"]))


# Frozen parameters, by name.


def freeze(table: Table, patterns: str) -> Table:
    """Freezes every row that one of the patterns matches.

    Commas separate patterns. A pattern is a row (`wte`, `blocks.3.qkv_weight`), a prefix of rows (`blocks.3`), a glob
    (`blocks.*.ln1_*`), or one of these for a range of layers (`blocks.0-5`, `blocks.0-5.fc_*`). Raises `UsageError` for a
    pattern that matches no row, a layer that does not exist, or if no parameter is left to train."""
    frozen: set[str] = set()
    for listed in filter(None, (part.strip() for part in patterns.split(","))):
        for pattern in by_layer(listed):
            below = pattern.rstrip(".") + ".*"
            matches = {row.name for row in table if fnmatchcase(row.name, pattern) or fnmatchcase(row.name, below)}
            if not matches:
                where = "" if pattern == listed else f" ({listed!r})"
                names = dict.fromkeys(name for row in table for name in (row.name, row.name.rpartition(".")[0]) if name)
                near = nearest_name(pattern, names) + f"; name tensors, as --freeze {table[0].name}, or layers, as blocks.0"
                raise UsageError(f"freeze names no parameter of this model: {pattern!r}{where}{near}")
            frozen |= matches
    if len(frozen) == len(table):
        raise UsageError(f"freeze {patterns!r} leaves no parameter to train; name fewer")
    return tuple(replace(row, frozen=True) if row.name in frozen else row for row in table)


def by_layer(pattern: str) -> Iterator[str]:
    """`blocks.2-3.fc_*` -> `blocks.2.fc_*`, `blocks.3.fc_*`. Yields other patterns, and empty ranges, unchanged."""
    ranged = LAYERS.fullmatch(pattern)
    layers = range(int(ranged[1]), int(ranged[2]) + 1) if ranged else range(0)
    if not ranged or not layers:
        yield pattern
        return
    for layer in layers:
        yield f"blocks.{layer}{ranged[3] or ''}"


# Views.


def named(tensors: type[T], views: Mapping[str, Any], layers: int, prefix: str = "") -> T:
    """Fills a dataclass of tensors with the views named after its fields. A block's field takes `blocks.3.name`, or `name`
    if all blocks share the tensor. A tensor that the model lacks is None."""

    def lookup(f: Field) -> Any:
        if "block" in (row := f.metadata):
            return [named(row["block"], views, layers, f"{f.name}.{layer}.") for layer in range(layers)]
        key = next((name for name in (prefix + f.name, f.name, row.get("of") or f.name) if name in views), None)
        assert key is not None or row.get("optional"), f"there is no {prefix}{f.name}"
        return None if key is None else views[key]

    return tensors(**{f.name: lookup(f) for f in fields(tensors)})  # type: ignore[arg-type]
