"""The order of the data: sample i is a pure function of (seed, i), so a run resumes from one integer.

A window is `sequence_length` + 1 tokens of one shard: all but the last are its inputs, all but the first its targets.
Windows of a shard start `sequence_length` tokens apart, so each token is predicted once. An epoch visits every window
once: it shuffles the shards, and the windows within each shard. `permute` computes both orders, so none is stored. Tokens
that do not fill a window are skipped at the start or the end of a shard, divided differently in each epoch.

For validation, windows may overlap: they start `stride` tokens apart, and each scores only its last `stride` tokens; a
shard's first window scores all of its tokens. Each token is scored once, after at least `sequence_length` - `stride`
tokens of its shard or all that precede it.

There are three packings. `stream` is the above. `masked` has the same windows and also gives the start of each position's
document, so attention stays inside it; a document's last token has the next document's end-of-text as its target. `whole`
fills a row with whole documents (`rows_of_whole_documents`) and pads it with end-of-text. In chat data, only the
assistant's tokens are targets, in every packing. A position without a target has -1 in `targets`.
"""

import functools
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from handgrad.data.shards import Dataset, Shard
from handgrad.errors import DataError, UsageError
from handgrad.settings.config import AUTO, STREAM, WHOLE

if TYPE_CHECKING:
    from torch import Tensor  # `prepare` shares this package and runs without torch

# Domain separators in hash keys: no two uses of a seed draw the same numbers.
SHARD_ORDER, WINDOW_ORDER, OFFSET = 1, 2, 3
MASK64 = (1 << 64) - 1
ROUNDS = 8  # the orders of 5 elements: 5 rounds are 3.9 standard deviations from uniform, 6 within 0.4


def mix(*values: int) -> int:
    """A 64-bit hash of a sequence of integers: splitmix64's finaliser (Steele, Lea, Flood 2014) chained over them."""
    return functools.reduce(mixed_in, values, len(values))


def mixed_in(state: int, value: Any) -> Any:
    """A step of `mix`; elementwise for an array of uint64."""
    state = ((state * 0x9E3779B97F4A7C15 + 1 & MASK64) + value) & MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK64
    return state ^ state >> 31


@functools.lru_cache(64)
def round_keys(key: int) -> list[int]:
    """The states of `mix(key, n, coordinate)` before the coordinate, of two hashes a round."""
    return [functools.reduce(mixed_in, (key, n), 3) for n in range(2 * ROUNDS)]


def permute(index: int, size: int, key: int) -> int:
    """`permute_all` of one index."""
    return int(permute_all(np.array([index]), size, key)[0])


def permute_all(indices: np.ndarray, size: int, key: int) -> np.ndarray:
    """The positions of `indices` in a shuffle of range(`size`) that `key` chooses, int64; a bijection of range(`size`).

    A Feistel network on a grid of `rows` x `columns` >= `size` cells: a round adds a hash of one coordinate to the
    other, which is invertible for any hash. The grid exceeds `size` by less than one column of cells; an index that lands
    in the excess is permuted again until it is below `size` (cycle walking, Black and Rogaway 2002): still a bijection."""
    rows = max(2, int(size**0.5))
    columns, keys = (-(-size // rows), round_keys(key))
    cells, outside = indices.astype(np.uint64), np.arange(len(indices))
    while len(outside):
        row, column = divmod(cells[outside], columns)
        for n in range(0, 2 * ROUNDS, 2):
            column = (column + mixed_in(keys[n], row) % columns) % columns
            row = (row + mixed_in(keys[n + 1], column) % rows) % rows
        cells[outside] = row * columns + column
        outside = outside[cells[outside] >= size]
    return cells.astype(np.int64)


def rows_of_whole_documents(
    document_starts: np.ndarray, token_count: int, sequence_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """(first token, number of tokens) of each row, int64: documents one after another while they fit (next fit).

    A row holds up to `sequence_length` + 1 tokens; the last is only a target. A longer document is split into rows of that
    size, `sequence_length` apart, so each of its tokens is predicted once; the next documents fill up its last row. If a
    shard begins inside a document, the rest of that document counts as one."""
    starts, lengths = documents_of(document_starts, token_count)
    parts = -(-lengths // sequence_length)
    number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    first = np.repeat(starts, parts) + number * sequence_length
    end = np.minimum(first + sequence_length + 1, np.repeat(starts + lengths, parts))
    # A row that begins with part i ends before part following[i], the first part that does not fit.
    following = np.searchsorted(end, first + sequence_length + 1, side="right").tolist()
    rows = [0] if following else []
    while rows and following[rows[-1]] < len(following):
        rows.append(following[rows[-1]])
    start = first[np.array(rows, np.int64)]
    return start, end[np.array([following[part] - 1 for part in rows], np.int64)] - start


class Stretches:
    """Disjoint stretches [first, end) of a shard's tokens; the arrays `first` and `end` are int64 and ascending."""

    def __init__(self, first: np.ndarray, end: np.ndarray):
        some = end > first
        self.first, self.end = first[some], end[some]

    @functools.cached_property
    def _before(self) -> np.ndarray:
        """The number of tokens in all stretches before each one."""
        return np.cumsum(self.end - self.first) - (self.end - self.first)

    def without(self, tokens: np.ndarray) -> "Stretches":
        """These stretches without single `tokens`, given as ascending offsets."""
        stretch = np.searchsorted(self.first, tokens, side="right") - 1
        inside = tokens[(stretch >= 0) & (tokens < self.end[stretch])] if len(self.first) else tokens[:0]
        return Stretches(np.sort(np.append(self.first, inside + 1)), np.sort(np.append(self.end, inside)))

    def count(self, first: np.ndarray | int, end: np.ndarray | int) -> np.ndarray:
        """The number of tokens in [`first`, `end`) that are inside a stretch, elementwise."""
        return self._count_before(end) - self._count_before(first)

    def _count_before(self, token: np.ndarray | int) -> np.ndarray:
        if not len(self.first):
            return np.zeros_like(token)
        stretch = np.maximum(np.searchsorted(self.first, token) - 1, 0)
        return self._before[stretch] + np.clip(token - self.first[stretch], 0, self.end[stretch] - self.first[stretch])

    def mask(self, first: int, end: int) -> np.ndarray:
        """A bool for each token in [`first`, `end`): True inside a stretch."""
        a, b = np.searchsorted(self.end, first, side="right"), np.searchsorted(self.first, end)
        edges = np.zeros(end - first + 1, np.int8)
        edges[np.maximum(self.first[a:b] - first, 0)] += 1
        edges[np.minimum(self.end[a:b], end) - first] -= 1
        return np.cumsum(edges[:-1], dtype=np.int8).astype(bool)


def documents_of(document_starts: np.ndarray, token_count: int) -> tuple[np.ndarray, np.ndarray]:
    """(first token, number of tokens) of each document in a shard, int64, including the tail of one at its beginning."""
    starts = document_starts.astype(np.int64)
    starts = np.insert(starts, 0, 0) if token_count and (not len(starts) or starts[0]) else starts
    return starts, np.diff(starts, append=token_count)


class Batches:
    """Samples of `sequence_length` tokens from `shards`; without `shuffle`, in order from the first token on, one every
    `stride` tokens (0: `sequence_length`). Raises DataError: no shard holds a window, or `packing` needs document
    boundaries that the shards lack; UsageError: a `stride` with overlap for rows of whole documents."""

    def __init__(
        self,
        shards: Sequence[Shard],
        sequence_length: int,
        seed: int,
        *,
        shuffle: bool = True,
        stride: int = 0,
        packing: str = STREAM,
    ):
        assert 0 <= stride <= sequence_length > 0 and not (stride and shuffle) and packing != AUTO
        if stride not in (0, sequence_length) and packing == WHOLE:
            raise UsageError(
                f"expected windows side by side, as rows are packed whole, found eval_stride {stride}; try --eval-stride 0"
            )
        self.packing = packing
        self.shards = tuple(shards)
        self.sequence_length = sequence_length
        self.seed = seed
        self.shuffle = shuffle
        self.stride = stride or sequence_length
        overlap = sequence_length - self.stride
        self._windows = [max(0, shard.token_count - 1 - overlap) // self.stride for shard in self.shards]
        self._rows = []  # by shard: (first token, number of tokens) of each row of whole documents
        self._trained: dict[int, Stretches | None] = {}  # by shard; a cache
        if packing != STREAM:
            documents = [(shard.document_starts, shard.token_count) for shard in self.shards]  # raises if there are none
            if packing == WHOLE:
                self._rows = [rows_of_whole_documents(*each, sequence_length) for each in documents]
                self._windows = [len(first) for first, _ in self._rows]
        self.samples_per_epoch = sum(self._windows)
        if self.samples_per_epoch == 0:
            longest = max((shard.token_count for shard in self.shards), default=0)
            folder = self.shards[0].path.parent if self.shards else "the dataset, which has no shard in this split"
            raise DataError(
                f"expected a shard of at least {sequence_length + 1} tokens, found at most {longest} in {folder}; "
                "prepare more text, or lower --sequence-length"
            )
        self._epoch = -1  # the epoch of the two tables below; a cache, not a state
        self._order: list[int] = []
        self._first: np.ndarray = np.empty(0, np.int64)

    def fill(self, inputs: "Tensor", targets: "Tensor", first_sample: int, document_starts: "Tensor | None" = None) -> None:
        """Writes samples `first_sample`, `first_sample` + 1, ... into `inputs` and `targets`, int64 CPU tensors (B, T).
        Writes into `document_starts`, int32 (B, T), for each position the start of its document, a position in its row.
        Raises DataError: a shard that is read for the first time is damaged."""
        assert first_sample >= 0 and inputs.shape == targets.shape and inputs.shape[1] == self.sequence_length
        inputs_array, targets_array = inputs.numpy(), targets.numpy()  # share the memory, also of pinned tensors
        for row, (shard, start, length) in enumerate(self.locate_all(first_sample, len(inputs_array)).tolist()):
            window = self.shards[shard].read(start, length)
            predicted = length - 1
            inputs_array[row, :predicted] = window[:-1]
            targets_array[row, :predicted] = window[1:]
            if predicted < self.sequence_length:
                inputs_array[row, predicted] = window[-1]
                inputs_array[row, length:] = self.shards[shard].end_of_text
                targets_array[row, predicted:] = -1
            if (trained := self._targets(shard)) is not None:
                targets_array[row, :predicted][~trained.mask(start + 1, start + length)] = -1
            if document_starts is not None:
                self._fill_starts(document_starts[row].numpy(), shard, start, length)

    def _fill_starts(self, row: np.ndarray, shard: int, start: int, length: int) -> None:
        row[:] = 0
        if self.packing != STREAM:
            starts = self.shards[shard].document_starts
            # Of their own dtype: another one would copy all of them.
            first, end = starts.searchsorted(np.array((start, start + min(length, len(row))), starts.dtype))
            within = starts[first:end].astype(np.int64) - start
            row[within] = within
            if length < len(row):
                row[length] = length  # padding is a document of its own
            np.maximum.accumulate(row, out=row)

    def trained_tokens(self, first_sample: int, samples: int) -> int:
        """The number of targets of samples `first_sample`, ... that are not -1."""
        return sum(self._trained_of(*row) for row in self.locate_all(first_sample, samples).tolist())

    def _trained_of(self, shard: int, start: int, length: int) -> int:
        trained = self._targets(shard)
        return length - 1 if trained is None else int(trained.count(start + 1, start + length))

    def _targets(self, shard: int) -> Stretches | None:
        """The tokens of a shard that may be targets; None: all."""
        if shard not in self._trained:
            trained = self.shards[shard].trained
            stretches = None if trained is None else Stretches(*trained.T.astype(np.int64))
            if stretches is not None and self.packing != STREAM:
                stretches = stretches.without(self.shards[shard].document_starts.astype(np.int64))
            self._trained[shard] = stretches
        return self._trained[shard]

    def window(self, sample: int) -> np.ndarray:
        """The tokens of a sample, (T + 1,), fewer if its row is padded; a read-only view of its shard."""
        shard, start, length = self.locate(sample)
        return self.shards[shard].tokens[start : start + length]

    def locate(self, sample: int) -> tuple[int, ...]:
        """(shard number, offset of the first token in that shard, number of tokens) of a sample."""
        return tuple(self.locate_all(sample, 1)[0].tolist())

    def locate_all(self, first_sample: int, samples: int) -> np.ndarray:
        """`locate` of samples `first_sample`, ..., (samples, 3) int64: a shard's at once."""
        located, begin = np.full((samples, 3), self.sequence_length + 1), 0
        while begin < samples:
            epoch, position = divmod(first_sample + begin, self.samples_per_epoch)
            if epoch != self._epoch:
                self._enter(epoch)
            visit, offset = int(np.searchsorted(self._first, position, side="right")) - 1, 0
            shard, window = self._order[visit], position - int(self._first[visit])
            windows = np.arange(window, min(window + samples - begin, self._windows[shard]))
            rows = located[begin : begin + len(windows)]
            if self.shuffle:
                windows = permute_all(windows, self._windows[shard], mix(self.seed, WINDOW_ORDER, epoch, shard))
                slack = self.shards[shard].token_count - 1 - self._windows[shard] * self.sequence_length
                offset = mix(self.seed, OFFSET, epoch, shard) % (slack + 1) if self.packing != WHOLE else 0
            rows[:, 0], rows[:, 1] = shard, offset + windows * self.stride
            if self.packing == WHOLE:
                rows[:, 1], rows[:, 2] = (column[windows] for column in self._rows[shard])
            begin += len(windows)
        return located

    def context(self, sample: int) -> int:
        """The number of leading targets of a sample that it does not score, because the previous sample does."""
        return self.sequence_length - self.stride if self.locate(sample)[1] else 0

    def scored_tokens(self, samples: int) -> int:
        """The number of tokens that the first `samples` samples, at most one epoch, score."""
        if not self.trains_all:
            return int(self._scored[samples])
        begun = sum(first < samples for first in accumulate(filter(None, self._windows), initial=0))  # shards
        return samples * self.stride + begun * (self.sequence_length - self.stride)

    def samples_of(self, tokens: int) -> int:
        """The largest number of leading samples, at most an epoch, that score at most `tokens` tokens (0: all), or one."""
        if not tokens:
            return self.samples_per_epoch
        every = range(self.samples_per_epoch + 1)
        some = bisect_right(every, 0, key=self.scored_tokens)  # the first samples may score none
        return max(some, bisect_right(every, tokens, key=self.scored_tokens) - 1)

    @property
    def trains_all(self) -> bool:
        """True if `fill` writes no target of -1: every row is a window, and every token of a shard may be a target."""
        return self.packing != WHOLE and all(shard.trained_sha256 is None for shard in self.shards)

    @functools.cached_property
    def _scored(self) -> np.ndarray:
        """The number of tokens that the first 0, 1, 2, ... samples of an unshuffled epoch score, int64."""
        assert not self.shuffle
        counts = [np.zeros(1, np.int64)]
        for shard, windows in enumerate(self._windows):
            if windows and self.packing == WHOLE:
                first, lengths = self._rows[shard]
            else:
                first, lengths = np.arange(windows) * self.stride, np.full(windows, self.sequence_length + 1)
            context = np.where(first > 0, self.sequence_length - self.stride, 0)
            trained = self._targets(shard)
            every = lengths - 1 - context
            counts.append(every if trained is None else trained.count(first + 1 + context, first + lengths))
        scored = np.cumsum(np.concatenate(counts))
        if not scored[-1]:
            raise DataError(
                f"expected a token that counts in the loss, found none among {len(scored) - 1} windows of"
                f" {self.shards[0].path.parent}; prepare more text, or raise --sequence-length"
            )
        return scored

    def _enter(self, epoch: int) -> None:
        """Tabulates the order of the shards that hold a window, and the position in the epoch where each begins."""
        used = [shard for shard, windows in enumerate(self._windows) if windows]
        if self.shuffle:
            key = mix(self.seed, SHARD_ORDER, epoch)
            used = [used[index] for index in permute_all(np.arange(len(used)), len(used), key).tolist()]
        self._order = used
        self._first = np.cumsum([0] + [self._windows[shard] for shard in used[:-1]])
        self._epoch = epoch


def validation_batches(dataset: Dataset, sequence_length: int, stride: int = 0, packing: str = STREAM) -> Batches | None:
    """The validation split in order, or None if there is none."""
    shards = dataset.splits["validation"]
    return Batches(shards, sequence_length, 0, shuffle=False, stride=stride, packing=packing) if shards else None
