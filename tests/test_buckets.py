"""Lanes and ranks divide the flat buffers: nothing twice, nothing left out, in an order independent of the ranks."""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings, strategies as st

from handgrad.joins.parallel.gradient_sync import RING, gradient_ring, moved
from handgrad.memory.layout import (
    Bucket,
    Layout,
    UpdatePart,
    buckets_of,
    norm_blocks,
    norm_parts,
    row_ranges,
    shard_elements,
    state_layout,
    update_parts,
)
from handgrad.memory.rows import ALIGN_ELEMENTS, BLOCK_ELEMENTS, ParameterRow, flat_elements
from handgrad.models import parameter_table
from handgrad.optimizers.adamw import AdamW
from handgrad.settings.config import ModelShape

TINY = ModelShape(vocab_size=257, sequence_length=32, num_layers=3, num_heads=2, channels=64)
ODD = ModelShape(vocab_size=1000, sequence_length=50, num_layers=7, num_heads=1, channels=40)  # nothing fits anything
GPT2 = ModelShape(vocab_size=50257, sequence_length=1024, num_layers=12, num_heads=12, channels=768)  # many norm blocks
SHAPES = [TINY, ODD, GPT2]
WIDTHS = [(lanes, ranks) for lanes in (1, 2, 4, 8, 64) for ranks in (1, 2, 4, 8, 64) if ranks <= lanes]

shapes = pytest.mark.parametrize("shape", SHAPES, ids=["tiny", "odd", "gpt2"])
widths = pytest.mark.parametrize(("lanes", "ranks"), WIDTHS)


decays = AdamW(beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1, seed=0).kind


Whole = Callable[[ParameterRow], bool]


def nothing(row: ParameterRow) -> bool:
    return False


def matrices(row: ParameterRow) -> bool:
    return row.group == "matrix"


units = pytest.mark.parametrize("whole", [nothing, matrices], ids=["ranges", "whole"])


def layout(
    shape: ModelShape, lanes: int, whole: Whole = nothing
) -> tuple[tuple[ParameterRow, ...], tuple[Bucket, ...], int]:
    table = parameter_table(shape, lanes, whole)
    return table, buckets_of(table, lanes), flat_elements(table, lanes)


def tiles(pieces: list[slice], start: int, stop: int) -> bool:
    """True if the pieces that are not empty, in any order, cover the range exactly once."""
    ordered = sorted((piece for piece in pieces if piece.start < piece.stop), key=lambda piece: piece.start)
    if not ordered:
        return start == stop
    edges = [start, *(edge for piece in ordered for edge in (piece.start, piece.stop)), stop]
    return edges[::2] == edges[1::2] and all(piece.start < piece.stop for piece in ordered)


def of_rank(all_buckets: tuple[Bucket, ...], rank: int, ranks: int) -> int:
    """The length of a rank's shard."""
    return sum(bucket.owned(rank, ranks).stop - bucket.owned(rank, ranks).start for bucket in all_buckets)


@shapes
@widths
@units
def test_every_element_has_one_owner(shape: ModelShape, lanes: int, ranks: int, whole: Whole) -> None:
    table, all_buckets, elements = layout(shape, lanes, whole)
    assert tiles([bucket.flat for bucket in all_buckets], 0, elements)
    assert tiles([bucket.owned(rank, ranks) for bucket in all_buckets for rank in range(ranks)], 0, elements)
    for rank in range(ranks):
        assert tiles([bucket.local(rank, ranks) for bucket in all_buckets], 0, of_rank(all_buckets, rank, ranks))
    assert shard_elements(all_buckets, ranks) == max(of_rank(all_buckets, rank, ranks) for rank in range(ranks))
    for bucket in all_buckets:
        owned = [bucket.owned(rank, ranks) for rank in range(ranks)]
        assert bucket.shares(ranks) == [part.stop - part.start for part in owned]
        assert all(edge % ALIGN_ELEMENTS == 0 for edge in bucket.cuts), "kernels can take any part"
        if whole is nothing:
            assert len(set(bucket.shares(ranks))) == 1
    for row in table:  # no tensor lies in two buckets
        assert sum(b.start <= row.offset and row.offset + row.elements <= b.stop for b in all_buckets) == 1


@shapes
@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 64])
def test_no_part_cuts_a_whole_parameter(shape: ModelShape, lanes: int) -> None:
    """Of any number of ranks; and the lanes have about as much to do."""
    table, all_buckets, _ = layout(shape, lanes, matrices)
    parts = [bucket.owned(lane, lanes) for bucket in all_buckets for lane in range(lanes)]
    for row in filter(matrices, table):
        assert any(part.start <= row.offset and row.offset + row.elements <= part.stop for part in parts), row.name
    assert sum(row.elements for row in table) == sum(row.elements for row in parameter_table(shape))
    largest = max(row.aligned_elements for row in table if row.lane is not None) if lanes > 1 else 0
    lengths = [of_rank(all_buckets, lane, lanes) for lane in range(lanes)]
    assert max(lengths) - min(lengths) <= largest + len(all_buckets) * lanes * ALIGN_ELEMENTS


@shapes
@widths
@units
def test_a_rank_owns_neighbouring_parts_of_lanes(shape: ModelShape, lanes: int, ranks: int, whole: Whole) -> None:
    """So that what is done part by part is the same whoever does it."""
    _, all_buckets, _ = layout(shape, lanes, whole)
    share = lanes // ranks
    for bucket, rank in itertools.product(all_buckets, range(ranks)):
        parts = [bucket.owned(part, lanes) for part in range(rank * share, (rank + 1) * share)]
        owned = bucket.owned(rank, ranks)
        assert tiles(parts, owned.start, owned.stop)


@pytest.mark.parametrize("shape", SHAPES, ids=["tiny", "odd", "gpt2"])
def test_a_lane_alone_has_no_buckets(shape: ModelShape) -> None:
    """The layout of runs that knew no lanes: tensor after tensor, each aligned; the end a whole block of the norm."""
    table, all_buckets, elements = layout(shape, 1)
    assert all_buckets == (Bucket("all", (0, elements), (0,)),) and elements % BLOCK_ELEMENTS == 0
    offset = 0
    for row in table:
        assert row.offset == offset
        offset += -(-row.elements // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
    assert elements - BLOCK_ELEMENTS < offset <= elements
    wide = parameter_table(shape, 4)
    assert [(r.name, r.shape, r.stored_rows, r.init, r.std, r.group) for r in wide] == [
        (r.name, r.shape, r.stored_rows, r.init, r.std, r.group) for r in table
    ]


def test_the_buckets_of_a_model() -> None:
    _, all_buckets, _ = layout(TINY, 4)
    assert [bucket.name for bucket in all_buckets] == ["embedding", "blocks.0", "blocks.1", "blocks.2", "lnf"]
    assert len({bucket.elements for bucket in all_buckets[1:-1]}) == 1  # blocks are alike


@shapes
@widths
@units
def test_norms_of_all_ranks_are_those_of_one(shape: ModelShape, lanes: int, ranks: int, whole: Whole) -> None:
    """The ranks' sums one after another: the same blocks of the flat buffer at the same places."""

    def blocks(rank: int, of: int) -> list[tuple[int, int]]:
        """(start, stop) of each block by its place among the rank's sums; of one that stays zero, (0, 0)."""
        found: dict[int, tuple[int, int]] = {}
        for part in norm_parts(all_buckets, lanes, rank, of):
            starts = range(part.flat.start, part.flat.stop, BLOCK_ELEMENTS)
            places = range(part.partials.start, part.partials.stop)
            for place, start in zip(places, starts, strict=True):
                assert place not in found
                found[place] = start, min(start + BLOCK_ELEMENTS, part.flat.stop)
        places = range(norm_blocks(all_buckets, lanes) // of)
        assert set(found) <= set(places) and (whole is matrices or len(found) == len(places))
        return [found.get(place, (0, 0)) for place in places]

    _, all_buckets, elements = layout(shape, lanes, whole)
    alone = blocks(0, 1)
    assert [block for rank in range(ranks) for block in blocks(rank, ranks)] == alone
    assert tiles([slice(*block) for block in alone], 0, elements)


@shapes
@widths
@units
def test_parts_of_the_norm_lie_in_the_shard(shape: ModelShape, lanes: int, ranks: int, whole: Whole) -> None:
    """Their places in it are those of the same numbers."""
    _, all_buckets, _ = layout(shape, lanes, whole)
    for rank in {0, 1 % ranks, ranks - 1}:
        parts = norm_parts(all_buckets, lanes, rank, ranks)
        assert tiles([part.local for part in parts], 0, of_rank(all_buckets, rank, ranks))
        assert all(in_shard(all_buckets, rank, ranks, s.flat.start) == s.local.start for s in parts)
        assert all(s.flat.stop - s.flat.start == s.local.stop - s.local.start for s in parts)


def in_shard(all_buckets: tuple[Bucket, ...], rank: int, ranks: int, element: int) -> int:
    """The place of an element of the flat buffer lies in the shard of its owner: the owned parts, one after another."""
    before = 0
    for bucket in all_buckets:
        owned = bucket.owned(rank, ranks)
        if owned.start <= element < owned.stop:
            return before + element - owned.start
        before += owned.stop - owned.start
    raise AssertionError(f"{element} is not owned by rank {rank}")


@shapes
@widths
@units
def test_updates_cover_the_shard(shape: ModelShape, lanes: int, ranks: int, whole: Whole) -> None:
    """Every number once, with the decay of its tensor, cut where kernels that take numbers by the dozen may be cut; a whole
    parameter in one call with its shape, and without the gap behind it."""
    table, all_buckets, elements = layout(shape, lanes, whole)
    everywhere = list[UpdatePart]()
    ranges = [found for bucket in all_buckets for found in row_ranges(table, bucket)]
    gaps = [slice(start + row.elements, stop) for start, stop, row in ranges if row.whole]
    for rank in range(ranks):
        parts = update_parts(table, all_buckets, rank, ranks, decays)
        if whole is nothing:
            assert tiles([part.local for part in parts], 0, elements // ranks)
        for part in parts:
            assert part.flat.stop - part.flat.start == part.local.stop - part.local.start
            assert in_shard(all_buckets, rank, ranks, part.flat.start) == part.local.start
            for edge in (part.flat.start, part.local.start, *(() if part.shape else (part.flat.stop, part.local.stop))):
                assert edge % ALIGN_ELEMENTS == 0
        everywhere += parts
    found = sorted((part.flat.start, part.shape) for part in everywhere if part.shape)
    assert found == sorted((row.offset, row.shape) for row in table if row.whole)
    assert tiles([*(part.flat for part in everywhere), *gaps], 0, elements)
    starts = sorted((part.flat.start, part.flat.stop, part.kind) for part in everywhere)
    for row in table:
        touched = [kind for start, stop, kind in starts if start < row.offset + row.elements and stop > row.offset]
        assert set(touched) == {decays(row)}, row.name


@shapes
@widths
def test_a_smaller_state_lies_like_its_parameters(shape: ModelShape, lanes: int, ranks: int) -> None:
    """A number for each row of the matrices: each rank has the same ranges of both, in the same order, without holes; a
    state of the parameters' shapes lies exactly where they do."""
    table, all_buckets, elements = layout(shape, lanes, matrices)
    parameters = Layout(table, all_buckets)
    full = state_layout("m", parameters, lambda row: {"m": row.shape})
    assert full.buckets == all_buckets and [row.offset for row in full.rows] == [row.offset for row in table]
    rows = state_layout("v", parameters, lambda row: {"v": row.shape[:1] if row.whole else row.shape})
    assert [row.name for row in rows.rows] == [f"v.{row.name}" for row in table]
    spared = sum(row.aligned_elements - -(-row.shape[0] // ALIGN_ELEMENTS) * ALIGN_ELEMENTS for row in table if row.whole)
    assert rows.elements == elements - spared
    for rank in range(ranks):
        here = [bucket.local(rank, ranks) for bucket in rows.buckets]
        assert tiles(here, 0, of_rank(rows.buckets, rank, ranks))
        full_parts, parts = (update_parts(x.rows, x.buckets, rank, ranks, decays) for x in (full, rows))
        for one, other in zip(full_parts, parts, strict=True):
            assert one.kind == other.kind and other.shape == (one.shape[:1] if one.shape else None)
            size = one.shape[0] if one.shape else one.flat.stop - one.flat.start
            assert other.flat.stop - other.flat.start == other.local.stop - other.local.start == size
            assert other.flat.start % ALIGN_ELEMENTS == other.local.start % ALIGN_ELEMENTS == 0
            assert in_shard(rows.buckets, rank, ranks, other.flat.start) == other.local.start
            if one.shape:
                assert {(row.offset, row.shape) for row in rows.rows} >= {(other.flat.start, other.shape)}


@shapes
def test_neighbouring_updates_are_one(shape: ModelShape) -> None:
    """A call for each kind of tensor, not for each tensor: of a rank that is alone the buckets do not cut them either."""
    for lanes in (1, 4):
        table, all_buckets, _ = layout(shape, lanes)
        parts = update_parts(table, all_buckets, 0, 1, decays)
        assert all(a.kind != b.kind for a, b in itertools.pairwise(parts))
        assert len(parts) == 2 * shape.num_layers
        assert all(part.flat == part.local for part in parts)


def test_rows_reach_to_the_end_of_their_bucket() -> None:
    table, all_buckets, _ = layout(ODD, 4)
    for bucket in all_buckets:
        ranges = [slice(start, stop) for start, stop, _ in row_ranges(table, bucket)]
        assert tiles(ranges, bucket.start, bucket.stop)


def test_gradients_where_their_buckets_are_lie_flat() -> None:
    table, all_buckets, _ = layout(TINY, 4)
    assert moved(table, all_buckets, {bucket.name: bucket.flat for bucket in all_buckets}) == table


@settings(max_examples=60, deadline=None)
@given(layers=st.integers(1, 40), lanes=st.sampled_from([2, 4, 8, 16]), channels=st.sampled_from([16, 40, 64]))
def test_the_ring_has_room(layers: int, lanes: int, channels: int) -> None:
    """With zero 2: while a block's gradients are made, those of the block above are on their way, and the bias gradient of
    the block below begins. So any RING neighbours have places of their own, and the embedding and the last norm theirs."""
    shape = ModelShape(vocab_size=100, sequence_length=16, num_layers=layers, num_heads=1, channels=channels)
    table, all_buckets, elements = layout(shape, lanes)
    places = gradient_ring(all_buckets)
    assert all(places[b.name].stop - places[b.name].start == b.elements for b in all_buckets)
    for index in range(len(all_buckets)):
        alive = [places[b.name] for b in (all_buckets[0], *all_buckets[max(1, index - 1) : index + 2])]
        if index + 2 <= len(all_buckets) - 1:
            alive.append(places["lnf"])
        distinct = {(place.start, place.stop) for place in alive}
        stops = sorted(distinct)
        assert len(distinct) == len(alive) and all(a[1] <= b[0] for a, b in itertools.pairwise(stops)), index
    room = max(place.stop for place in places.values())
    block, kept = all_buckets[1].elements, all_buckets[0].elements + all_buckets[-1].elements
    assert room == kept + min(RING, layers) * block <= elements
    for old, new in zip(table, moved(table, all_buckets, places), strict=True):
        bucket = next(b for b in all_buckets if b.start <= old.offset < b.stop)
        assert new.offset - places[bucket.name].start == old.offset - bucket.start
