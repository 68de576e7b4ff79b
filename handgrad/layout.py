"""The layout of the flat buffers: lanes and ranks, buckets, the shard that a rank owns of each.

A bucket is complete at one moment of a backward pass: a block's parameters, the embeddings, the last layer norm. It is cut
into as many equal parts as the run has lanes; of R ranks, each owns lanes / R neighbouring parts of every bucket. Work that
is done part by part does not depend on R. With one lane there is one bucket: everything.

A rank's shard of a flat buffer is its parts of the first bucket, then those of the second, and so on. The shard of a single
rank is the flat buffer itself.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace

from handgrad.models.rows import BLOCK_ELEMENTS, ParameterRow, Table, flat_elements

RING = 3  # blocks whose gradients exist at once with ZeRO 2: at work, in flight, and next


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
    """A range of a flat buffer."""

    name: str
    start: int
    stop: int

    @property
    def elements(self) -> int:
        return self.stop - self.start

    @property
    def flat(self) -> slice:
        return slice(self.start, self.stop)

    def owned(self, rank: int, ranks: int) -> slice:
        """The range in the flat buffer that `rank` of `ranks` owns."""
        share = self.elements // ranks
        return slice(self.start + rank * share, self.start + (rank + 1) * share)

    def local(self, ranks: int) -> slice:
        """The same in that rank's shard: the buckets before this one take as much of it as of the flat buffer."""
        return slice(self.start // ranks, self.stop // ranks)


Buckets = tuple[Bucket, ...]


def buckets_of(table: Table, lanes: int) -> Buckets:
    """The buckets of a table laid out for as many lanes, in memory order."""
    if lanes == 1:
        return (Bucket("all", 0, flat_elements(table)),)
    starts: dict[str, int] = {}
    for row in table:
        starts.setdefault(row.bucket, row.offset)
    stops = [*list(starts.values())[1:], flat_elements(table, lanes)]
    return tuple(Bucket(name, start, stop) for (name, start), stop in zip(starts.items(), stops, strict=True))


def gradient_ring(buckets: Buckets) -> dict[str, slice]:
    """With ZeRO 2, the range that each bucket's gradients take: `RING` blocks in turn, the others on their own."""
    places, stop = {}, 0
    for index, bucket in enumerate(buckets):  # the embedding's is the first, blocks follow, the last norm's is the last
        block = index - 1
        if RING <= block < len(buckets) - 2:
            places[bucket.name] = places[buckets[index - RING].name]
            continue
        places[bucket.name] = slice(stop, stop + bucket.elements)
        stop += bucket.elements
    return places


def moved(table: Table, buckets: Buckets, places: dict[str, slice]) -> Table:
    """The table with its rows where `places` has their buckets."""
    shifts = {bucket.name: places[bucket.name].start - bucket.start for bucket in buckets}
    return tuple(replace(row, offset=row.offset + shifts[bucket_of(row, buckets).name]) for row in table)


def bucket_of(row: ParameterRow, buckets: Buckets) -> Bucket:
    return next(bucket for bucket in buckets if bucket.start <= row.offset < bucket.stop)


@dataclass(frozen=True)
class Part:
    """A range in the flat buffer and in the rank's shard."""

    flat: slice
    local: slice


@dataclass(frozen=True)
class NormPart(Part):
    """A part whose blocks' sums of squares lie at `partials` among those of the rank."""

    partials: slice


def norm_parts(buckets: Buckets, lanes: int, rank: int, ranks: int) -> list[NormPart]:
    """The rank's parts, each cut into blocks of its own: part after part, in each bucket after bucket, so that the ranks'
    sums one after another are those of a single rank."""
    parts, place = [], 0
    for part in range(rank * lanes // ranks, (rank + 1) * lanes // ranks):
        for bucket in buckets:
            flat = bucket.owned(part, lanes)
            first = bucket.local(ranks).start - bucket.owned(rank, ranks).start
            blocks = -(-(flat.stop - flat.start) // BLOCK_ELEMENTS)
            local = slice(first + flat.start, first + flat.stop)
            parts.append(NormPart(flat, local, slice(place, place + blocks)))
            place += blocks
    return parts


def norm_blocks(buckets: Buckets, lanes: int) -> int:
    """The number of sums of squares behind the global norm."""
    return lanes * sum(-(-(bucket.elements // lanes) // BLOCK_ELEMENTS) for bucket in buckets)


@dataclass(frozen=True)
class UpdatePart(Part):
    """A part that the optimizer updates in one call, or, frozen, leaves as it is."""

    kind: Hashable
    frozen: bool


def update_parts(
    table: Table, buckets: Buckets, rank: int, ranks: int, kind: Callable[[ParameterRow], Hashable]
) -> list[UpdatePart]:
    """The rank's shard as ranges of one kind, frozen or not. The alignment gaps between tensors belong to the range before
    them; they hold zeros and stay zero."""
    parts: list[UpdatePart] = []
    for bucket in buckets:
        owned, shard = bucket.owned(rank, ranks), bucket.local(ranks)
        for first, end, row in row_ranges(table, bucket):
            start, stop = max(first, owned.start), min(end, owned.stop)
            if start >= stop:
                continue
            local = slice(shard.start + start - owned.start, shard.start + stop - owned.start)
            last = parts[-1] if parts else None
            follows = last and (last.flat.stop, last.local.stop) == (start, local.start)
            if last and follows and (last.kind, last.frozen) == (kind(row), row.frozen):
                parts[-1] = replace(last, flat=slice(last.flat.start, stop), local=slice(last.local.start, local.stop))
                continue
            parts.append(UpdatePart(slice(start, stop), local, kind(row), row.frozen))
    return parts


def row_ranges(table: Table, bucket: Bucket) -> Iterator[tuple[int, int, ParameterRow]]:
    """The bucket's parameters as ranges (start, stop), each up to the beginning of the next."""
    rows = [row for row in table if bucket.start <= row.offset < bucket.stop]
    for row, following in zip(rows, (*rows[1:], None), strict=True):
        yield row.offset, following.offset if following else bucket.stop, row
