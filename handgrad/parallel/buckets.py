"""How lanes and ranks divide the flat buffers: buckets, their parts, and what one rank owns of them.

A bucket is what is complete at the same moment of a backward pass: a block's parameters, the embeddings, the last layer
norm. It is cut into as many equal parts as the run has lanes; of R ranks, each owns lanes / R neighbouring parts of every
bucket. So what is done part by part does not depend on R. With one lane there is one bucket: everything.

A rank's own share of a flat buffer, its shard, is its parts of the first bucket, then those of the second, and so on. The
shard of a rank that is alone is the flat buffer itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from handgrad.models.parameters import BLOCK_ELEMENTS, ParameterRow, bucket_name, flat_elements


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
        """What `rank` of `ranks` owns of it, in a flat buffer."""
        share = self.elements // ranks
        return slice(self.start + rank * share, self.start + (rank + 1) * share)

    def local(self, ranks: int) -> slice:
        """The same in that rank's shard: the buckets before this one take as much of it as of the flat buffer."""
        return slice(self.start // ranks, self.stop // ranks)


def buckets(table: tuple[ParameterRow, ...], lanes: int) -> tuple[Bucket, ...]:
    """The buckets of a table made for as many lanes, in memory order."""
    if lanes == 1:
        return (Bucket("all", 0, flat_elements(table)),)
    starts: dict[str, int] = {}
    for row in table:
        starts.setdefault(bucket_name(row.name), row.offset)
    stops = [*list(starts.values())[1:], flat_elements(table, lanes)]
    return tuple(Bucket(name, start, stop) for (name, start), stop in zip(starts.items(), stops, strict=True))


RING = 3  # blocks whose gradients are there at once with zero 2: at work, on their way, and about to be used


def gradient_places(all_buckets: tuple[Bucket, ...], zero: int) -> dict[str, slice]:
    """Where each bucket's gradients are made: in a flat buffer, or, with zero 2, blocks in a ring of places."""
    if zero < 2:
        return {bucket.name: bucket.flat for bucket in all_buckets}
    places, stop = {}, 0
    for index, bucket in enumerate(all_buckets):  # the first is the embedding's, blocks follow, the last norm's is the last
        block = index - 1
        if RING <= block < len(all_buckets) - 2:
            places[bucket.name] = places[all_buckets[index - RING].name]
            continue
        places[bucket.name] = slice(stop, stop + bucket.elements)
        stop += bucket.elements
    return places


def placed(
    table: tuple[ParameterRow, ...], all_buckets: tuple[Bucket, ...], places: dict[str, slice]
) -> tuple[ParameterRow, ...]:
    """The table with its rows where `gradient_places` has their buckets."""
    moves = [(bucket, places[bucket.name].start - bucket.start) for bucket in all_buckets]
    return tuple(
        replace(row, offset=row.offset + next(move for b, move in moves if b.start <= row.offset < b.stop)) for row in table
    )


@dataclass(frozen=True)
class NormSegment:
    """A part of a bucket in the flat buffer and in the rank's shard, and the places of its blocks' sums among those of the
    rank."""

    flat: slice
    local: slice
    partials: slice


def norm_segments(all_buckets: tuple[Bucket, ...], lanes: int, rank: int, ranks: int) -> list[NormSegment]:
    """The rank's parts, each cut into blocks of its own: part after part, and in each bucket after bucket, so that the
    ranks' sums one after another are those of a single rank."""
    segments, place = [], 0
    for part in range(rank * lanes // ranks, (rank + 1) * lanes // ranks):
        for bucket in all_buckets:
            flat = bucket.owned(part, lanes)
            first = bucket.local(ranks).start - bucket.owned(rank, ranks).start
            blocks = -(-(flat.stop - flat.start) // BLOCK_ELEMENTS)
            local = slice(first + flat.start, first + flat.stop)
            segments.append(NormSegment(flat, local, slice(place, place + blocks)))
            place += blocks
    return segments


def norm_blocks(all_buckets: tuple[Bucket, ...], lanes: int) -> int:
    """How many sums the global norm is made of."""
    return lanes * sum(-(-(bucket.elements // lanes) // BLOCK_ELEMENTS) for bucket in all_buckets)


@dataclass(frozen=True)
class UpdateRun:
    """A range that the optimizer updates in one call: in the flat buffers and in the rank's shard."""

    flat: slice
    local: slice
    decays: bool
    frozen: bool  # or leaves as it is: the weights, and their moments

    def goes_on_in(self, other: "UpdateRun") -> bool:
        """Whether `other` is of the same kind and begins where this one ends."""
        neighbours = self.flat.stop == other.flat.start and self.local.stop == other.local.start
        return neighbours and (self.decays, self.frozen) == (other.decays, other.frozen)


def update_runs(
    table: tuple[ParameterRow, ...], all_buckets: tuple[Bucket, ...], rank: int, ranks: int
) -> Iterator[UpdateRun]:
    """The rank's shard as runs of one kind: equal decay, frozen or not. The alignment gaps between tensors belong to the
    run before them; they hold zeros and stay zero."""
    runs: list[UpdateRun] = []
    for bucket in all_buckets:
        owned, shard = bucket.owned(rank, ranks), bucket.local(ranks)
        for kind in kind_ranges(table, bucket):
            start, stop = max(kind.start, owned.start), min(kind.stop, owned.stop)
            if start >= stop:
                continue
            local = slice(shard.start + start - owned.start, shard.start + stop - owned.start)
            run = UpdateRun(slice(start, stop), local, kind.decays, kind.frozen)
            if runs and runs[-1].goes_on_in(run):
                last = runs.pop()
                run = replace(run, flat=slice(last.flat.start, stop), local=slice(last.local.start, local.stop))
            runs.append(run)
    yield from runs


@dataclass(frozen=True)
class KindRange:
    start: int
    stop: int
    decays: bool
    frozen: bool


def kind_ranges(table: tuple[ParameterRow, ...], bucket: Bucket) -> Iterator[KindRange]:
    """The bucket's tensors as ranges, each up to the beginning of the next."""
    rows = [row for row in table if bucket.start <= row.offset < bucket.stop]
    for row, following in zip(rows, (*rows[1:], None), strict=True):
        yield KindRange(row.offset, following.offset if following else bucket.stop, row.decays, row.frozen)
