"""The layout of the flat buffers: lanes and ranks, buckets, and each rank's shard.

A bucket holds parameters whose gradients a backward pass completes at the same time: a block, the embeddings, the last
layer norm. Each bucket is cut into one part per lane: equal parts or, if the optimizer updates parameters whole, cuts at
parameter borders. Each of R ranks owns lanes / R neighbouring parts of every bucket. Work that goes part by part, or
parameter by parameter, does not depend on R. A run with one lane has one bucket for everything.

A rank's shard of a flat buffer concatenates its parts of the buckets, in order. With a single rank the shard is the flat
buffer itself.
"""

import itertools
import operator
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace

from handgrad.memory.rows import BLOCK_ELEMENTS, ParameterRow, Table, flat_elements


@dataclass(frozen=True)
class Sharding:
    """A rank hosts lanes / ranks neighbouring lanes. With ZeRO 0 every rank keeps everything; with 1 only its shard of
    master weights and optimizer state; with 2 also only its shard of the gradients."""

    lanes: int = 1
    rank: int = 0
    ranks: int = 1
    zero: int = 1
    rounded: bool = False  # ranks exchange gradients in bf16

    @property
    def lanes_per_rank(self) -> int:
        return self.lanes // self.ranks

    @property
    def levels(self) -> int:
        """Gradient buffers of a rank: one for the current lane, and a partial sum per level of the tree over its lanes."""
        return self.lanes_per_rank.bit_length()

    @property
    def shards(self) -> int:
        """The number of shards of master weights and optimizer state."""
        return self.ranks if self.zero else 1

    @property
    def shard(self) -> int:
        """The index of this process's shard."""
        return self.rank if self.zero else 0

    @property
    def shards_gradients(self) -> bool:
        return self.zero == 2 and self.ranks > 1


@dataclass(frozen=True)
class Bucket:
    """A range of a flat buffer, cut into one part per lane."""

    name: str
    cuts: tuple[int, ...]  # start of each lane's part, then the bucket's end
    before: tuple[int, ...]  # start of this bucket in each lane's shard

    @property
    def start(self) -> int:
        return self.cuts[0]

    @property
    def stop(self) -> int:
        return self.cuts[-1]

    @property
    def elements(self) -> int:
        return self.stop - self.start

    @property
    def flat(self) -> slice:
        return slice(self.start, self.stop)

    def owned(self, rank: int, ranks: int) -> slice:
        """The range of the flat buffer that `rank` of `ranks` owns."""
        lanes = len(self.before) // ranks
        return slice(self.cuts[rank * lanes], self.cuts[(rank + 1) * lanes])

    def local(self, rank: int, ranks: int) -> slice:
        """The offsets of that range in the rank's shard."""
        owned, lanes = self.owned(rank, ranks), len(self.before) // ranks
        start = sum(self.before[rank * lanes : (rank + 1) * lanes])
        return slice(start, start + owned.stop - owned.start)

    def shares(self, ranks: int) -> list[int]:
        """The number of elements that each rank owns."""
        return [owned.stop - owned.start for owned in (self.owned(rank, ranks) for rank in range(ranks))]

    def wire_elements(self, ranks: int) -> int:
        """Elements of the communication buffer: the bucket, or the largest share times `ranks` if that is more."""
        return max(self.elements, ranks * max(self.shares(ranks)))


Buckets = tuple[Bucket, ...]


def buckets_of(table: Table, lanes: int, elements: int = 0) -> Buckets:
    """The buckets, in memory order, of a table laid out for `lanes`. `elements`: buffer length; 0: `flat_elements`."""
    rows: dict[str, list[ParameterRow]] = {}
    for row in table:
        rows.setdefault("all" if lanes == 1 else row.bucket, []).append(row)
    starts = [min(row.offset for row in members) for members in rows.values()]
    stops = [*starts[1:], elements or flat_elements(table, lanes)]
    buckets, before = list[Bucket](), [0] * lanes
    for (name, members), start, stop in zip(rows.items(), starts, stops, strict=True):
        parts = [(stop - start) // lanes] * lanes
        if lanes > 1 and members[0].lane is not None:
            parts = [sum(row.aligned_elements for row in members if row.lane == lane) for lane in range(lanes)]
        cuts = (*itertools.accumulate(parts[:-1], initial=start), stop)
        buckets.append(Bucket(name, cuts, tuple(before)))
        before = [sum(lane) for lane in zip(before, map(operator.sub, cuts[1:], cuts), strict=True)]
    return tuple(buckets)


@dataclass(frozen=True)
class Layout:
    """The rows of a flat buffer and its buckets."""

    rows: Table
    buckets: Buckets

    @property
    def elements(self) -> int:
        return self.buckets[-1].stop


def state_layout(name: str, parameters: Layout, shapes: Callable[[ParameterRow], dict[str, tuple[int, ...]]]) -> Layout:
    """The layout of optimizer state tensor `name`, with a row `name.PARAMETER` per parameter. `shapes`: shapes of a
    parameter's state. Rows and cuts follow the parameters' layout, moved down by the elements that smaller rows save. Only
    a row that is updated whole may be smaller, because no cut divides it."""
    rows = tuple(replace(row, name=f"{name}.{row.name}", shape=shapes(row)[name]) for row in parameters.rows)
    pairs = [(row, parameter) for row, parameter in zip(rows, parameters.rows, strict=True) if row.shape != parameter.shape]
    assert all(row.whole and row.elements <= parameter.elements for row, parameter in pairs)
    savings = [(row.offset, parameter.aligned_elements - row.aligned_elements) for row, parameter in pairs]

    def moved_up(offset: int) -> int:
        return offset - sum(elements for start, elements in savings if start < offset)

    rows, lanes = tuple(replace(row, offset=moved_up(row.offset)) for row in rows), len(parameters.buckets[0].before)
    return Layout(rows, buckets_of(rows, lanes, moved_up(parameters.elements)))


def shard_elements(buckets: Buckets, ranks: int) -> int:
    """The length of the longest shard."""
    return max(buckets[-1].local(rank, ranks).stop for rank in range(ranks))


def bucket_of(row: ParameterRow, buckets: Buckets) -> Bucket:
    return next(bucket for bucket in buckets if bucket.start <= row.offset < bucket.stop)


@dataclass(frozen=True)
class Part:
    """A range as offsets in the flat buffer and in the rank's shard."""

    flat: slice
    local: slice


@dataclass(frozen=True)
class NormPart(Part):
    """A part; `partials` locates the sums of squares of its blocks among the rank's."""

    partials: slice


def norm_parts(buckets: Buckets, lanes: int, rank: int, ranks: int) -> list[NormPart]:
    """The rank's parts, with blocks of their own, by lane, then bucket: all ranks' sums in turn are a single rank's."""
    parts, most = [], norm_blocks_per_lane(buckets, lanes)
    for index, part in enumerate(range(rank * lanes // ranks, (rank + 1) * lanes // ranks)):
        partial = index * most
        for bucket in buckets:
            flat = bucket.owned(part, lanes)
            first = bucket.local(rank, ranks).start - bucket.owned(rank, ranks).start
            blocks = -(-(flat.stop - flat.start) // BLOCK_ELEMENTS)
            local = slice(first + flat.start, first + flat.stop)
            if blocks:
                parts.append(NormPart(flat, local, slice(partial, partial + blocks)))
            partial += blocks
    return parts


def norm_blocks_per_lane(buckets: Buckets, lanes: int) -> int:
    """The most sums of squares of any lane. A lane with fewer leaves the rest zero."""
    shares = [bucket.shares(lanes) for bucket in buckets]
    return max(sum(-(-elements[lane] // BLOCK_ELEMENTS) for elements in shares) for lane in range(lanes))


def norm_blocks(buckets: Buckets, lanes: int) -> int:
    """The number of sums of squares in the global norm."""
    return lanes * norm_blocks_per_lane(buckets, lanes)


@dataclass(frozen=True)
class UpdatePart(Part):
    """A part that the optimizer updates in one call or, if frozen, skips."""

    kind: Hashable
    frozen: bool
    shape: tuple[int, ...] | None  # of a whole parameter; None: a range


def update_parts(
    table: Table, buckets: Buckets, rank: int, ranks: int, kind: Callable[[ParameterRow], Hashable]
) -> list[UpdatePart]:
    """The rank's shard as parameters updated whole, and ranges of one kind, frozen or not. An alignment gap belongs to the
    range before it; gaps hold zeros and stay zero."""
    parts: list[UpdatePart] = []
    for bucket in buckets:
        owned, shard = bucket.owned(rank, ranks), bucket.local(rank, ranks)
        for first, end, row in row_ranges(table, bucket):
            start, stop = max(first, owned.start), min(first + row.elements if row.whole else end, owned.stop)
            if start >= stop:
                continue
            flat, local = slice(start, stop), slice(shard.start + start - owned.start, shard.start + stop - owned.start)
            part = UpdatePart(flat, local, kind(row), row.frozen, row.shape if row.whole else None)
            last = parts[-1] if parts else None
            if last and follows(last, part):
                flat, local = slice(last.flat.start, stop), slice(last.local.start, local.stop)
                parts[-1] = replace(part, flat=flat, local=local)
            else:
                parts.append(part)
    return parts


def follows(last: UpdatePart, part: UpdatePart) -> bool:
    """True if `part` extends `last` as one range of one kind."""
    adjacent = (last.flat.stop, last.local.stop) == (part.flat.start, part.local.start)
    return adjacent and (last.kind, last.frozen, last.shape, None) == (part.kind, part.frozen, None, part.shape)


def row_ranges(table: Table, bucket: Bucket) -> Iterator[tuple[int, int, ParameterRow]]:
    """Yields (start, stop, row) of the bucket's parameters in memory order; each range ends at the next one's start."""
    rows = sorted((row for row in table if bucket.start <= row.offset < bucket.stop), key=lambda row: row.offset)
    for row, following in zip(rows, (*rows[1:], None), strict=True):
        yield row.offset, following.offset if following else bucket.stop, row
