"""Packings and trained tokens: every number of a batch against the definition, position by position."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from handgrad.data.batches import Batches, Stretches, rows_of_whole_documents, validation_batches
from handgrad.data.shards import open_dataset
from handgrad.errors import DataError, UsageError
from tests.data.conftest import flip_bit

T, END = 12, 256


def documents_of(lengths, seed=0):
    """Tokens of documents of these lengths, each begun by end-of-text; a length of its own for the rest of one before."""
    random = np.random.default_rng(seed)
    return np.concatenate([np.append([END], random.integers(0, 250, n - 1)) for n in lengths]).astype(np.uint16)


def said(tokens):
    """Two stretches in each run of 13 tokens, some of them across the starts of documents, some side by side."""
    first = np.arange(2, len(tokens) - 6, 13)
    return np.sort(np.concatenate([np.stack([first, first + 3], 1), np.stack([first + 3, first + 4], 1)]), axis=0)


TRAIN = [
    documents_of([5, 1, 7, 30, 12, 13, 14, 2, 1, 1, 40, 25]),
    documents_of([3, 3, 3, 3, 90], 1)[1:],  # begins inside a document
    documents_of([26], 2),
]
VALIDATION = [documents_of([9, 4, 22, 3, 3, 3], 3), documents_of([6, 6, 6, 6], 4)]


@pytest.fixture
def shards(make_dataset):
    def make(chat, split="train"):
        folder = make_dataset(TRAIN, VALIDATION, f"chat{chat}", documents=True, trained=said if chat else None)
        return open_dataset(folder).splits[split]

    return make


def expected_row(shard, start, end, packing, chat):
    """(inputs, targets, document starts) of the tokens start ... end - 1 of a shard, by their definitions."""
    tokens = shard.tokens.astype(int).tolist()
    starts = {0, *shard.document_starts.tolist()} if packing != "stream" else set()
    trained = {t for a, b in said(shard.tokens) for t in range(a, b)} if chat else set(range(len(tokens)))
    inputs, targets, first, begun = [], [], [], 0
    for n in range(T):
        at = start + n
        if (at in starts and n) or at == end:
            begun = n
        inputs.append(tokens[at] if at < end else END)
        counts = at + 1 < end and at + 1 in trained and not (chat and at + 1 in starts)
        targets.append(tokens[at + 1] if counts else -1)
        first.append(begun)
    return inputs, targets, first


def naive_rows(shard):
    """(start, end) of the rows of whole documents of a shard, by the definition."""
    starts = sorted({0, *shard.document_starts.tolist()})
    rows = []
    for a, b in itertools.pairwise([*starts, shard.token_count]):
        if rows and b - rows[-1][0] <= T + 1:
            rows[-1] = rows[-1][0], b
            continue
        while b - a > T + 1:
            rows.append((a, a + T + 1))
            a += T
        rows.append((a, b))
    return rows


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("packing", ["stream", "masked", "whole"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_number_of_an_epoch(shards, packing, chat, shuffle):
    batches = Batches(shards(chat), T, 5, shuffle=shuffle, packing=packing)
    count = batches.samples_per_epoch
    inputs, targets = (torch.full((count, T), -7) for _ in range(2))
    starts = torch.full((count, T), -7, dtype=torch.int32)
    batches.fill(inputs, targets, 2 * count, starts)  # of the third epoch
    seen = []
    for row in range(count):
        shard, start = batches.locate(2 * count + row)[:2]
        end = start + len(batches.window(2 * count + row))
        assert end - start == T + 1 or packing == "whole"
        found = inputs[row].tolist(), targets[row].tolist(), starts[row].tolist()
        assert found == expected_row(batches.shards[shard], start, end, packing, chat), (shard, start, end)
        seen.append((shard, start, end))
        assert batches.trained_tokens(2 * count + row, 1) == (targets[row] >= 0).sum()
    assert batches.trained_tokens(2 * count, count) == (targets >= 0).sum() > 0
    assert batches.trains_all == (targets >= 0).all(), "by which a run decides whether the kernels look at targets"
    if packing == "whole":
        rows = [(n, *row) for n, shard in enumerate(batches.shards) for row in naive_rows(shard)]
        assert sorted(seen) == rows and (seen == rows) == (not shuffle)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 9), st.integers(0, 3))
def test_rows_of_whole_documents(lengths, length, cut):
    """Every prediction inside a document stands in one row once; a row is full, or the next document does not fit."""
    starts = np.cumsum([0, *lengths])[:-1] - min(cut, lengths[0] - 1)  # a shard may begin inside a document
    count = sum(lengths) - min(cut, lengths[0] - 1)
    starts = starts[starts >= 0]
    first, sizes = rows_of_whole_documents(starts.astype(np.uint32), count, length)
    begins = {0, *starts.tolist()}
    predicted = [t for a, n in zip(first, sizes, strict=True) for t in range(a + 1, a + n) if t not in begins]
    assert predicted == [t for t in range(count) if t not in begins] and sizes.max() <= length + 1
    ends = [*sorted(begins - {0}), count]
    for n, (a, size) in enumerate(zip(first.tolist(), sizes.tolist(), strict=True)):
        after = next((end for end in ends if end > a + size), None)
        assert after is None or after - a > length + 1 or n == len(first) - 1, "the next document fits"


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=2, max_size=12),
    st.sets(st.integers(0, 40)),
    st.integers(0, 20),
    st.integers(1, 20),
)
def test_stretches(edges, points, first, size):
    positions = np.cumsum(edges)[: len(edges) // 2 * 2]
    stretches = Stretches(positions[::2], positions[1::2])
    members = {t for a, b in zip(positions[::2], positions[1::2], strict=True) for t in range(a, b)}
    for left, these in ((members, stretches), (members - points, stretches.without(np.array(sorted(points), np.int64)))):
        expected = [t in left for t in range(first, first + size)]
        assert these.mask(first, first + size).tolist() == expected and these.count(first, first + size) == sum(expected)
        many = these.count(np.arange(30), np.arange(30) + size)
        assert many.tolist() == [sum(t in left for t in range(n, n + size)) for n in range(30)]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("packing, stride", [("stream", 5), ("masked", 0), ("masked", 5), ("whole", 0)])
def test_scored_tokens(shards, packing, stride, chat):
    """Those of validation samples from their context on, not -1; `samples_of` finds the samples of a number of them."""
    batches = Batches(shards(chat, "validation"), T, 0, shuffle=False, stride=stride, packing=packing)
    count = batches.samples_per_epoch
    inputs, targets = torch.empty(count, T, dtype=torch.int64), torch.empty(count, T, dtype=torch.int64)
    batches.fill(inputs, targets, 0)
    scored = [0]
    for row in range(count):
        scored.append(scored[-1] + int((targets[row, batches.context(row) :] >= 0).sum()))
    assert [batches.scored_tokens(n) for n in range(count + 1)] == scored
    assert batches.samples_per_epoch == count and scored[-1] > 0
    for tokens in (1, 7, 20, 10**6):
        found = max(n for n in range(count + 1) if scored[n] <= tokens)
        assert batches.samples_of(tokens) == max(found, next(n for n in range(count + 1) if scored[n] > 0), 1)
    if (packing, chat) == ("masked", False):
        assert batches.scored_tokens(count) == sum(T - batches.context(row) for row in range(count))


def test_a_sample_is_a_function_of_seed_and_number(shards):
    chat = shards(True)
    reference, again, other = (Batches(chat, T, seed, packing="whole") for seed in (7, 7, 8))
    places = [reference.locate(i) for i in range(80)]
    for i in np.random.default_rng(0).permutation(80).tolist():
        assert again.locate(i) == places[i] and again.trained_tokens(i, 3) == reference.trained_tokens(i, 3)
    assert places != [other.locate(i) for i in range(80)]


def test_what_does_not_go_together(shards, make_dataset):
    with pytest.raises(UsageError, match="packed whole, found eval_stride 5; try --eval-stride 0"):
        Batches(shards(False, "validation"), T, 0, shuffle=False, stride=5, packing="whole")
    bare = open_dataset(make_dataset([TRAIN[0]], [TRAIN[0]], "bare")).splits["train"][0]
    object.__setattr__(bare, "index_sha256", None)  # as in a bare folder of llm.c
    assert Batches([bare], T, 0).samples_per_epoch
    for packing in ("masked", "whole"):
        with pytest.raises(DataError, match="expected a manifest with document boundaries"):
            Batches([bare], T, 0, packing=packing)
    silent = make_dataset(TRAIN, VALIDATION, "silent", documents=True, trained=lambda tokens: np.empty((0, 2), int))
    with pytest.raises(DataError, match="expected a token that counts in the loss, found none among"):
        validation_batches(open_dataset(silent), T, packing="whole").samples_of(10)


def test_damaged_trained_stretches(make_dataset):
    folder = make_dataset(TRAIN, VALIDATION, "damaged", documents=True, trained=said)
    dataset = open_dataset(folder)
    assert dataset.is_chat
    again = make_dataset(TRAIN, VALIDATION, "other", documents=True, trained=lambda tokens: said(tokens)[1:])
    plain = make_dataset(TRAIN, VALIDATION, "plain", documents=True)
    assert len({dataset.identity, open_dataset(again).identity, open_dataset(plain).identity}) == 3
    flip_bit(folder / "train_000001.trained", 4)
    with pytest.raises(DataError, match=r"SHA-256.*train_000001\.trained"):
        _ = dataset.splits["train"][1].trained
    (folder / "train_000000.trained").unlink()
    with pytest.raises(DataError, match=r"train_000000\.trained, found none"):
        _ = open_dataset(folder).splits["train"][0].trained
    wrong = make_dataset(TRAIN, VALIDATION, "wrong", documents=True, trained=lambda tokens: np.array([[5, 4000]]))
    with pytest.raises(DataError, match="expected rising stretches of at most"):
        _ = open_dataset(wrong).splits["train"][0].trained


def test_a_million_documents():
    """No token is left out, and no row is longer than it may be."""
    lengths = np.random.default_rng(0).integers(1, 400, 1_000_000)
    starts = np.cumsum(lengths) - lengths
    first, sizes = rows_of_whole_documents(starts, int(lengths.sum()), 1024)
    assert [len(each) for each in rows_of_whole_documents(starts[:0], 0, 8)] == [0, 0]
    assert sizes.sum() == lengths.sum() and sizes.max() <= 1025 and len(first) < 250_000
