"""The order of samples: a pure function of (seed, i), every window once an epoch, well mixed at every size."""

import itertools
import sys
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from handgrad.data.batches import WINDOW_ORDER, Batches, mix, permute, permute_all, validation_batches
from handgrad.data.shards import open_dataset
from handgrad.errors import DataError
from tests.data.conftest import flip_bit

T = 8


@pytest.fixture
def shards(make_dataset):
    lengths = (100, 5, 8 * 12 + 1, 300)  # the second holds no window; the third has no slack
    return open_dataset(make_dataset([np.arange(n) % 250 for n in lengths], [np.arange(60)])).splits["train"]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 400), st.integers(0, 2**70))
def test_permute_is_a_bijection(size, key):
    assert sorted(permute(i, size, key) for i in range(size)) == list(range(size))


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_small_permutations_are_uniform(size):
    orders = list(itertools.permutations(range(size)))
    draws = 40 * len(orders)
    counts = Counter(tuple(permute_all(np.arange(size), size, key).tolist()) for key in range(draws))
    chi_square = sum((counts[order] - 40) ** 2 / 40 for order in orders)
    freedom = len(orders) - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations


def test_the_order_of_the_data_is_that_of_earlier_versions():
    """Else a run that resumes under this one reads samples twice and leaves others out."""
    assert [permute(i, 10, mix(1337, 2, 0, 3)) for i in range(10)] == [3, 2, 8, 5, 9, 0, 6, 1, 4, 7]


@pytest.mark.nightly(but=["7", "100"])
@pytest.mark.parametrize("size", [7, 16, 100, 300])
def test_large_permutations_mix(size):
    keys = range(2000)
    places = np.array([permute_all(np.arange(2), size, key) for key in keys])
    first = places / size
    assert abs(first.mean() - (size - 1) / (2 * size)) < 5 * (1 / 12 / first.size) ** 0.5
    assert abs(np.corrcoef(first.T)[0, 1] + 1 / (size - 1)) < 5 / len(keys) ** 0.5
    neighbours = np.mean((places[:, 1] - places[:, 0]) % size == 1)
    assert abs(neighbours - 1 / (size - 1)) < 5 * (1 / (size - 1) / len(keys)) ** 0.5
    fixed = np.mean([np.sum(permute_all(np.arange(size), size, key) == np.arange(size)) for key in range(200)])
    assert abs(fixed - 1) < 5 / 200**0.5  # a random permutation has one fixed point on average, with variance one


def test_mix_depends_on_every_value_and_its_place():
    values = {mix(), mix(0), mix(0, 0), mix(1), mix(0, 1), mix(1, 0), mix(1, 1), mix(2**40), mix(2**40, 1)}
    assert len(values) == 9


def test_every_window_once_an_epoch(shards):
    batches = Batches(shards, T, seed=3)
    assert batches.samples_per_epoch == 12 + 12 + 37
    orders, offsets = [], []
    for epoch in range(6):
        first = epoch * batches.samples_per_epoch
        places = [batches.locate(first + i)[:2] for i in range(batches.samples_per_epoch)]
        offset = {shard: min(start for s, start in places if s == shard) for shard in (0, 2, 3)}
        expected = {(s, offset[s] + T * w) for s, windows in ((0, 12), (2, 12), (3, 37)) for w in range(windows)}
        assert len(places) == len(set(places)) and set(places) == expected
        assert all(start + T + 1 <= shards[s].token_count for s, start in places)
        assert places != sorted(places)
        orders.append(places)
        offsets.append((offset[0], offset[2], offset[3]))
    assert len({tuple(order) for order in orders}) == 6
    assert len(set(offsets)) > 1 and {o[1] for o in offsets} == {0}  # the tail left out varies where there is one
    assert len({tuple(dict.fromkeys(s for s, _ in order)) for order in orders}) > 1  # so does the order of the shards


def test_every_token_of_the_slack_is_seen_in_some_epoch(shards):
    batches = Batches(shards[:1], T, seed=0)
    starts = {batches.locate(e * batches.samples_per_epoch + i)[1] for e in range(40) for i in range(12)}
    assert 0 in starts and max(starts) == 100 - T - 1


def test_the_seed_decides_shards_windows_and_offsets(shards):
    """Each of the three by itself, in one epoch of several seeds."""

    def places(seed, chosen=shards):
        batches = Batches(chosen, T, seed=seed)
        return [batches.locate(i)[:2] for i in range(batches.samples_per_epoch)]

    found = [places(seed) for seed in range(8)]
    assert len({tuple(dict.fromkeys(shard for shard, _ in each)) for each in found}) > 3, "the order of the shards"
    orders = set()
    for shard in (0, 2, 3):
        starts = [[start for s, start in each if s == shard] for each in found]
        offsets = [min(each) for each in starts]
        orders |= {tuple(start - offset for start in each) for each, offset in zip(starts, offsets, strict=True)}
        assert len(set(offsets)) > 2 or shard == 2, "where the windows begin, if there is room"
    assert len(orders) == 3 * 8, "the order of windows, also of two shards that hold as many"


def test_shards_of_equal_length_begin_at_offsets_of_their_own(make_dataset):
    """Drawn by shard, and by another draw than the order of windows takes: no two uses of a seed share their numbers."""
    shards = open_dataset(make_dataset([np.arange(100) % 250, np.arange(100) % 250], [np.arange(60)])).splits["train"]
    offsets, of_windows = [], []
    for seed in range(8):
        batches = Batches(shards, T, seed=seed)
        places = [batches.locate(i)[:2] for i in range(batches.samples_per_epoch)]
        offsets.append([min(start for s, start in places if s == shard) for shard in (0, 1)])
        of_windows.append([mix(seed, WINDOW_ORDER, 0, shard) % 4 for shard in (0, 1)])
    assert any(first != second for first, second in offsets)
    assert offsets != of_windows


def test_validation_takes_its_shards_from_the_first_token_on(make_dataset):
    splits = [np.arange(60)], [np.arange(30), np.arange(5), np.arange(20)]
    batches = validation_batches(open_dataset(make_dataset(*splits)), T)
    assert [batches.locate(i)[:2] for i in range(5)] == [(0, 0), (0, 8), (0, 16), (2, 0), (2, 8)]
    assert batches.samples_per_epoch == 5
    overlapping = validation_batches(open_dataset(make_dataset(*splits, "again")), T, 5)
    assert [overlapping.locate(i)[:2] for i in range(8)] == [
        *((0, 5 * n) for n in range(5)),
        *((2, 5 * n) for n in range(3)),
    ]
    assert validation_batches(open_dataset(make_dataset([np.arange(60)], [], "alone")), T) is None


@pytest.mark.parametrize("stride", [1, 3, 4, T])
def test_overlapping_windows_score_every_token_once(shards, stride):
    """From a shard's first prediction on, each after T - stride tokens or all before it; less than a stride is left."""
    batches = Batches(shards, T, 0, shuffle=False, stride=stride)
    scored = []
    for sample in range(batches.samples_per_epoch):
        shard, start = batches.locate(sample)[:2]
        targets = range(start + 1, start + T + 1)[batches.context(sample) :]
        assert all(target - start > min(T - stride, target - 1) for target in targets)
        assert batches.window(sample).tolist() == shards[shard].tokens[start : start + T + 1].tolist()
        scored += [(shard, target) for target in targets]
        assert batches.scored_tokens(sample + 1) == len(scored)
    for shard, length in ((0, 100), (2, 97), (3, 300)):
        targets = [target for s, target in scored if s == shard]
        assert targets == list(range(1, len(targets) + 1)) and 0 <= length - 1 - len(targets) < stride
    assert len(scored) == len({*scored}) and not any(shard == 1 for shard, _ in scored)


def test_samples_of_a_number_of_tokens(shards):
    """The most that score no more than that, at least one; the first of each shard scores 8 tokens, the others 3."""
    batches = Batches(shards, T, 0, shuffle=False, stride=3)
    of_first = 1 + (100 - 1 - T) // 3
    counts = {1: 1, 8: 1, 10: 1, 11: 2, 14: 3, 8 + 3 * (of_first - 1): of_first, 8 + 3 * of_first: of_first}
    counts |= {16 + 3 * (of_first - 1): of_first + 1, 10**9: batches.samples_per_epoch}
    assert {tokens: batches.samples_of(tokens) for tokens in counts} == counts
    side_by_side = Batches(shards, T, 0, shuffle=False)
    assert [side_by_side.samples_of(tokens) for tokens in (1, 8, 15, 16, 8 * 61, 10**9)] == [1, 1, 1, 2, 61, 61]
    assert [side_by_side.context(sample) for sample in (0, 1, 60)] == [0, 0, 0]


def test_a_sample_depends_on_seed_and_number_only(shards):
    reference = [Batches(shards, T, seed=7).window(i).tolist() for i in range(200)]
    batches = Batches(shards, T, seed=7)
    for i in np.random.default_rng(0).permutation(200):  # any order, across epochs, one object
        assert batches.window(int(i)).tolist() == reference[i]
    for size in (1, 3, 16):
        filled = []
        for first in range(0, 190, size):
            inputs, targets = torch.full((size, T), -1), torch.full((size, T), -1)
            Batches(shards, T, seed=7).fill(inputs, targets, first)
            assert torch.equal(inputs[:, 1:], targets[:, :-1])
            filled += torch.cat([inputs, targets[:, -1:]], 1).tolist()
        assert filled == reference[: len(filled)]
    assert [Batches(shards, T, seed=8).window(i).tolist() for i in range(200)] != reference


def test_without_shuffle_in_order(shards):
    batches = Batches(shards, T, seed=1, shuffle=False)
    places = [batches.locate(i)[:2] for i in range(batches.samples_per_epoch)]
    assert places == [(s, T * w) for s, windows in ((0, 12), (2, 12), (3, 37)) for w in range(windows)]
    assert batches.locate(batches.samples_per_epoch)[:2] == (0, 0)


def test_a_corpus_shorter_than_one_sequence(make_dataset):
    splits = open_dataset(make_dataset([np.arange(T)], [np.arange(T + 1)])).splits
    with pytest.raises(DataError, match=r"at least 9 tokens, found at most 8 .*--sequence-length"):
        Batches(splits["train"], T, seed=0)
    with pytest.raises(DataError, match="no shard"):
        Batches((), T, seed=0)
    assert Batches(splits["validation"], T, seed=0).samples_per_epoch == 1


@pytest.mark.fault(21)
def test_a_damaged_shard_is_refused_before_use(make_dataset):
    folder = make_dataset([np.arange(100)], [np.arange(100)])
    flip_bit(folder / "train_000000.bin", 1100)
    batches = Batches(open_dataset(folder).splits["train"], T, seed=0)
    inputs = torch.full((2, T), -1)
    with pytest.raises(DataError, match="SHA-256"):
        batches.fill(inputs, inputs.clone(), 0)
    assert (inputs == -1).all()


def test_a_sample_costs_sixty_calls(make_dataset):
    """Of Python, counted, so that no load changes it, and no memory that grows with the data: a few microseconds."""
    shards = open_dataset(make_dataset([np.arange(400_000) % 250] * 3, [np.arange(60)])).splits["train"]
    batches = Batches(shards, 16, seed=0)
    inputs, targets = torch.empty(64, 16, dtype=torch.int64), torch.empty(64, 16, dtype=torch.int64)
    batches.fill(inputs, targets, 0)  # verifies
    calls = Counter()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    tracemalloc.start()
    try:
        for n in range(20):
            batches.fill(inputs, targets, n * 64)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        sys.setprofile(None)
    assert (calls["call"] + calls["c_call"]) / (20 * 64) < 60  # 600,000 tokens/s leave 1,700 us a sample
    assert peak < 64 << 10, "an order of all windows is 600 KB"
