"""The rows of a model's parameters, and the places, initial weights and views that derive from them.

An architecture declares its tensors once, as fields of dataclasses: the field's name is the tensor's, its metadata is the
row. A shape is written in the alphabet of `handgrad.ops` ("N 3C", "B H T"); the sizes of the letters come with the model.

    parameter   shape, initial distribution, bucket, optimizer group
    activation  shape, dtype, lifetimes (`memory.activations`)
    shared      a block's name for a tensor that all blocks use
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

ALIGN_ELEMENTS = 128  # a parameter starts at a multiple: 512 bytes of float32, 256 of bf16
BLOCK_ELEMENTS = 1 << 16  # gradient elements behind one partial sum of the global norm
LAYERS = re.compile(r"blocks\.(\d+)-(\d+)(\..*)?")  # of blocks, in a pattern of names
KIND = "activations"  # the arena's allocation of a model's activations

Dims = Mapping[str, int]  # the size of each letter
Group = Literal["matrix", "embedding", "vector"]  # optimizer groups
T = TypeVar("T")


@dataclass(frozen=True)
class Init:
    """An initial distribution, or the one `value` of a constant. `residual`: of a projection into the residual stream,
    scaled by 1/sqrt(2L); `by_inputs`: scaled by 1/sqrt(I) of a matrix with I columns."""

    kind: Literal["normal", "zeros", "constant"]
    std: float = 0.0
    residual: bool = False
    by_inputs: bool = False
    value: float = 0.0

    def std_of(self, shape: tuple[int, ...], layers: int) -> float:
        inputs = shape[-1] if self.by_inputs else 1
        return self.std / math.sqrt((2 * layers if self.residual else 1) * inputs)


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
    """A parameter. `bucket`: the parameters whose gradients are complete at the same moment (a block's have its name);
    `stored_rows`: the letter of the rows that are saved, where padding rows follow them. A model may be without it, if it
    is `optional` or has a `fallback`: the tensor that serves in its place. `rate`: its learning rate over the
    step's, with AdamW."""
    row = {"shape": shape, "init": init, "group": group, "bucket": bucket, "stored": stored_rows}
    return field(metadata=row | {"of": fallback, "optional": optional, "rate": rate})


def shared(of: str = "") -> Any:
    """A block's name for a tensor that all blocks use in turn; `of`: its name outside, if that is another one."""
    return field(metadata={"of": of})


def repeated(block: type) -> Any:
    """One `block` per layer."""
    return field(metadata={"block": block})


def sizes(shape: str, dims: Dims) -> tuple[int, ...]:
    return tuple(dims[letters] for letters in shape.split())


# Parameters.


@dataclass(frozen=True)
class ParameterRow:
    """A parameter in the flat buffers: weights, gradients and optimizer state share its offset."""

    name: str
    shape: tuple[int, ...]  # as allocated
    stored_rows: int  # as saved: the embedding without its padding
    init: Init
    std: float
    group: Group
    bucket: str
    offset: int = 0  # elements from the start of a flat buffer
    frozen: bool = False  # left as it is by the optimizer
    whole: bool = False  # updated in one call, with its shape
    lane: int | None = None  # the lane whose part holds all of it; None: any lanes' parts do
    rate: float = 1.0  # of learning, over the step's

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def aligned_elements(self) -> int:
        """With the gap that follows it."""
        return rounded_up(self.elements, ALIGN_ELEMENTS)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return (self.stored_rows, *self.shape[1:])

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.offset + self.elements].view(self.shape)

    def stored(self, flat: Tensor) -> Tensor:
        """The part that is saved and exchanged: no padding rows."""
        return self.view(flat)[: self.stored_rows]


Table = tuple[ParameterRow, ...]


def parameter_rows(tensors: type, shape: ModelShape, prefix: str = "") -> Iterator[ParameterRow]:
    """The rows of a dataclass of parameters in the order of its fields."""
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
    """The rows with their offsets. With several `lanes` each bucket can be cut into as many aligned parts: equal ones, or,
    where some of its parameters are updated `whole`, parts that cut no parameter."""
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
    """The rows in the order of their lanes. Largest first, each goes to the lane with the fewest elements (Graham 1969,
    longest processing time first). `loads`: the lanes' elements, which even out over a model's buckets, not within one."""
    parts: list[list[ParameterRow]] = [[] for _ in loads]
    for row in sorted(bucket, key=lambda row: -row.elements):
        lane = loads.index(min(loads))
        loads[lane] += row.aligned_elements
        parts[lane].append(replace(row, lane=lane))
    return [row for part in parts for row in part]


def rounded_up(elements: int, multiple: int) -> int:
    return -(-elements // multiple) * multiple


def flat_elements(table: Table, lanes: int = 1) -> int:
    """Length of a flat buffer: the table's end, rounded up to whole blocks, or to a part for every lane."""
    end = max(row.offset + row.elements for row in table)
    return rounded_up(end, BLOCK_ELEMENTS if lanes == 1 else ALIGN_ELEMENTS * lanes)


def count_parameters(table: Iterable[ParameterRow]) -> int:
    """Without the padding."""
    return sum(math.prod(row.stored_shape) for row in table)


def initialize(table: Table, seed: int, put: Callable[[ParameterRow, Tensor], object]) -> None:
    """Hands the initial weights to `put`, the stored part of each parameter in float32 on the CPU, from several threads;
    skips zeros.

    Each tensor has a generator of its own, keyed by (seed, its place in the table): every device, precision and number of
    ranks starts from the same numbers.
    """

    def draw(index: int) -> None:
        row = table[index]
        values = torch.full(row.stored_shape, row.init.value)
        if row.init.kind == "normal":
            values.normal_(0.0, row.std, generator=torch.Generator().manual_seed(seed * 1_000_003 + index))
        put(row, values)

    # A thread per processor: the draws of one tensor are a sequence, different tensors are independent.
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        list(threads.map(draw, [index for index, row in enumerate(table) if row.init.kind != "zeros"]))


# Parameters that a run leaves as they are, by their names.


def freeze(table: Table, patterns: str) -> Table:
    """The table with the rows frozen that one of the patterns names.

    Patterns are separated by commas. One names a row (`wte`, `blocks.3.qkv_weight`), all rows below a name (`blocks.3`),
    what a glob matches (`blocks.*.ln1_*`), or one of these for several layers (`blocks.0-5`, `blocks.0-5.fc_*`). Raises
    `UsageError` for a pattern that names no row, or a layer that is not there, and when nothing is left to train.
    """
    frozen: set[str] = set()
    for given in filter(None, (part.strip() for part in patterns.split(","))):
        for pattern in by_layer(given):
            below = pattern.rstrip(".") + ".*"
            found = {row.name for row in table if fnmatchcase(row.name, pattern) or fnmatchcase(row.name, below)}
            if not found:
                where = "" if pattern == given else f" ({given!r})"
                blocks = dict.fromkeys(filter(None, (row.name.rpartition(".")[0] for row in table)))
                near = nearest_name(pattern, [*(row.name for row in table), *blocks])
                raise UsageError(f"freeze names no parameter of this model: {pattern!r}{where}{near}")
            frozen |= found
    if len(frozen) == len(table):
        raise UsageError(f"freeze {patterns!r} leaves no parameter to train; name fewer")
    return tuple(replace(row, frozen=True) if row.name in frozen else row for row in table)


def by_layer(pattern: str) -> Iterator[str]:
    """`blocks.2-3.fc_*` -> `blocks.2.fc_*`, `blocks.3.fc_*`; another pattern as it is, and so a range without layers."""
    ranged = LAYERS.fullmatch(pattern)
    layers = range(int(ranged[1]), int(ranged[2]) + 1) if ranged else range(0)
    if not ranged or not layers:
        yield pattern
        return
    for layer in layers:
        yield f"blocks.{layer}{ranged[3] or ''}"


# Views.


def named(tensors: type[T], views: Mapping[str, Any], layers: int, prefix: str = "") -> T:
    """A dataclass of tensors with the views that bear its fields' names: of a block's field `blocks.3.name`, or the `name`
    that all blocks share. A tensor that the model lacks is None."""

    def lookup(f: Field) -> Any:
        row = f.metadata
        if "block" in row:
            return [named(row["block"], views, layers, f"{f.name}.{layer}.") for layer in range(layers)]
        names = (prefix + f.name, f.name, row.get("of") or f.name)
        found = next((name for name in names if name in views), None)
        assert found is not None or row.get("optional"), f"there is no {prefix}{f.name}"
        return None if found is None else views[found]

    return tensors(**{f.name: lookup(f) for f in fields(tensors)})  # type: ignore[arg-type]
