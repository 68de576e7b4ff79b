"""The layout of the flat buffers: lanes and ranks, buckets, the shard that a rank owns of each.

A bucket is complete at one moment of a backward pass: a block's parameters, the embeddings, the last layer norm. It is cut
into as many parts as the run has lanes: equal ones or, where the optimizer updates parameters whole, at their borders. Of R
ranks, each owns lanes / R neighbouring parts of every bucket. Work done part by part, or parameter by parameter, does not
depend on R. With one lane there is one bucket: everything.

A rank's shard of a flat buffer is its parts of the first bucket, then of the second, and so on. The shard of a single
rank is the flat buffer itself.
"""

import itertools
import operator
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace

from handgrad.memory.rows import BLOCK_ELEMENTS, ParameterRow, Table, flat_elements


@dataclass(frozen=True)
class Sharding:
    """A rank hosts lanes / ranks neighbouring lanes. With ZeRO 0 every rank keeps everything, with 1 its shard of master
    weights and optimizer state, with 2 also its shard of the gradients alone."""

    lanes: int = 1
    rank: int = 0
    ranks: int = 1
    zero: int = 1
    rounded: bool = False  # gradients are rounded to bf16 on their way

    @property
    def lanes_per_rank(self) -> int:
        return self.lanes // self.ranks

    @property
    def levels(self) -> int:
        """Gradient buffers of a rank: the lane at work, and a partial sum for every level of the tree over its lanes."""
        return self.lanes_per_rank.bit_length()

    @property
    def shards(self) -> int:
        """Parts into which master weights and optimizer state are cut."""
        return self.ranks if self.zero else 1

    @property
    def shard(self) -> int:
        """This process's part."""
        return self.rank if self.zero else 0

    @property
    def shards_gradients(self) -> bool:
        return self.zero == 2 and self.ranks > 1


@dataclass(frozen=True)
class Bucket:
    """A range of a flat buffer, cut into a part for every lane."""

    name: str
    cuts: tuple[int, ...]  # where the lanes' parts begin, and the bucket's end
    before: tuple[int, ...]  # elements of the lanes' parts in the buckets before it

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
        """The range in the flat buffer that `rank` of `ranks` owns: the parts of its lanes."""
        lanes = len(self.before) // ranks
        return slice(self.cuts[rank * lanes], self.cuts[(rank + 1) * lanes])

    def local(self, rank: int, ranks: int) -> slice:
        """The same in that rank's shard."""
        owned, lanes = self.owned(rank, ranks), len(self.before) // ranks
        start = sum(self.before[rank * lanes : (rank + 1) * lanes])
        return slice(start, start + owned.stop - owned.start)

    def shares(self, ranks: int) -> list[int]:
        """The elements that each rank owns."""
        return [owned.stop - owned.start for owned in (self.owned(rank, ranks) for rank in range(ranks))]

    def wire_elements(self, ranks: int) -> int:
        """Elements of the communication buffer: the bucket, or the largest rank's share times the ranks."""
        return max(self.elements, ranks * max(self.shares(ranks)))


Buckets = tuple[Bucket, ...]


def buckets_of(table: Table, lanes: int, elements: int = 0) -> Buckets:
    """The buckets of a table laid out for as many lanes, in memory order. `elements`: `flat_elements` if 0."""
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
    """The layout of one tensor of an optimizer's state, by its `shapes`: a row `name.PARAMETER` per parameter. Rows and
    cuts lie where the parameters' do, less the elements that smaller rows before them save. Only a row that is updated
    whole may be smaller: no cut divides it."""
    rows = tuple(replace(row, name=f"{name}.{row.name}", shape=shapes(row)[name]) for row in parameters.rows)
    pairs = [(row, parameter) for row, parameter in zip(rows, parameters.rows, strict=True) if row.shape != parameter.shape]
    assert all(row.whole and row.elements <= parameter.elements for row, parameter in pairs)
    savings = [(row.offset, parameter.aligned_elements - row.aligned_elements) for row, parameter in pairs]

    def moved_up(offset: int) -> int:
        return offset - sum(elements for start, elements in savings if start < offset)

    rows, lanes = tuple(replace(row, offset=moved_up(row.offset)) for row in rows), len(parameters.buckets[0].before)
    return Layout(rows, buckets_of(rows, lanes, moved_up(parameters.elements)))


def shard_elements(buckets: Buckets, ranks: int) -> int:
    """The length of a rank's shard: the longest."""
    return max(buckets[-1].local(rank, ranks).stop for rank in range(ranks))


def bucket_of(row: ParameterRow, buckets: Buckets) -> Bucket:
    return next(bucket for bucket in buckets if bucket.start <= row.offset < bucket.stop)


@dataclass(frozen=True)
class Part:
    """A range in the flat buffer and in the rank's shard."""

    flat: slice
    local: slice


@dataclass(frozen=True)
class NormPart(Part):
    """A part whose blocks' sums of squares lie at `partials` among the rank's."""

    partials: slice


def norm_parts(buckets: Buckets, lanes: int, rank: int, ranks: int) -> list[NormPart]:
    """The rank's parts, each cut into blocks of its own: part after part, in each bucket after bucket, so that the ranks'
    sums one after another are a single rank's."""
    parts, most = [], norm_blocks_per_lane(buckets, lanes)
    for place, part in enumerate(range(rank * lanes // ranks, (rank + 1) * lanes // ranks)):
        partial = place * most
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
    """The most sums of squares that any lane has. A lane with fewer leaves the rest at zero."""
    shares = [bucket.shares(lanes) for bucket in buckets]
    return max(sum(-(-elements[lane] // BLOCK_ELEMENTS) for elements in shares) for lane in range(lanes))


def norm_blocks(buckets: Buckets, lanes: int) -> int:
    """The number of sums of squares behind the global norm."""
    return lanes * norm_blocks_per_lane(buckets, lanes)


@dataclass(frozen=True)
class UpdatePart(Part):
    """A part that the optimizer updates in one call, or, frozen, leaves as it is."""

    kind: Hashable
    frozen: bool
    shape: tuple[int, ...] | None  # of the parameter that it is; None: a range


def update_parts(
    table: Table, buckets: Buckets, rank: int, ranks: int, kind: Callable[[ParameterRow], Hashable]
) -> list[UpdatePart]:
    """The rank's shard: parameters that are updated whole, and ranges of one kind, frozen or not. Alignment gaps between
    tensors belong to the range before them; they hold zeros and stay zero."""
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
    """True if the two are one range of one kind."""
    adjacent = (last.flat.stop, last.local.stop) == (part.flat.start, part.local.start)
    return adjacent and (last.kind, last.frozen, last.shape, None) == (part.kind, part.frozen, None, part.shape)


def row_ranges(table: Table, bucket: Bucket) -> Iterator[tuple[int, int, ParameterRow]]:
    """The bucket's parameters in memory order as ranges (start, stop), each up to the beginning of the next."""
    rows = sorted((row for row in table if bucket.start <= row.offset < bucket.stop), key=lambda row: row.offset)
    for row, following in zip(rows, (*rows[1:], None), strict=True):
        yield row.offset, following.offset if following else bucket.stop, row
