"""Documents into rows, and the tokens of a shard that are trained: plain arithmetic on offsets, computed once per shard."""

import functools

import numpy as np


def rows_of_whole_documents(
    document_starts: np.ndarray, token_count: int, sequence_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """(first token, number of tokens) of each row, int64: documents one after another while they fit (next fit).

    A row holds up to `sequence_length` + 1 tokens, the last one a target alone. A longer document becomes rows of that
    many, `sequence_length` apart, so that each of its tokens is predicted once; others follow it in its last row. A shard
    that begins inside a document begins with the rest of it.
    """
    starts, lengths = documents_of(document_starts, token_count)
    parts = -(-lengths // sequence_length)
    number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    first = np.repeat(starts, parts) + number * sequence_length
    end = np.minimum(first + sequence_length + 1, np.repeat(starts + lengths, parts))
    # The row that begins with part i ends before part following[i], the first that ends too late for it.
    following = np.searchsorted(end, first + sequence_length + 1, side="right").tolist()
    rows = [0] if following else []
    while rows and following[rows[-1]] < len(following):
        rows.append(following[rows[-1]])
    start = first[np.array(rows, np.int64)]
    last = np.array([following[part] - 1 for part in rows], np.int64)
    return start, end[last] - start


def starts_within(document_starts: np.ndarray, first: int, end: int) -> np.ndarray:
    """Offsets from `first` of the documents that start in tokens `first` ... `end` - 1."""
    a, b = np.searchsorted(document_starts, (first, end))
    return document_starts[a:b].astype(np.int64) - first


class Stretches:
    """Disjoint stretches of a shard's tokens: from each of `first` to before the one of `end`, both int64 and rising."""

    def __init__(self, first: np.ndarray, end: np.ndarray):
        some = end > first
        self.first, self.end = first[some], end[some]

    @functools.cached_property
    def _before(self) -> np.ndarray:
        """Tokens in the stretches before each."""
        return np.cumsum(self.end - self.first) - (self.end - self.first)

    def without(self, tokens: np.ndarray) -> "Stretches":
        """These stretches but for single `tokens`, rising offsets."""
        stretch = np.searchsorted(self.first, tokens, side="right") - 1
        inside = tokens[(stretch >= 0) & (tokens < self.end[stretch])] if len(self.first) else tokens[:0]
        return Stretches(np.sort(np.append(self.first, inside + 1)), np.sort(np.append(self.end, inside)))

    def count(self, first: np.ndarray | int, end: np.ndarray | int) -> np.ndarray:
        """The number of tokens of the stretches in `first` ... `end` - 1, elementwise."""
        return self._count_before(end) - self._count_before(first)

    def _count_before(self, token: np.ndarray | int) -> np.ndarray:
        if not len(self.first):
            return np.zeros_like(token)
        stretch = np.maximum(np.searchsorted(self.first, token) - 1, 0)
        inside = np.clip(token - self.first[stretch], 0, self.end[stretch] - self.first[stretch])
        return self._before[stretch] + inside

    def mask(self, first: int, end: int) -> np.ndarray:
        """True for the tokens of the stretches among `first` ... `end` - 1."""
        a, b = np.searchsorted(self.end, first, side="right"), np.searchsorted(self.first, end)
        edges = np.zeros(end - first + 1, np.int8)
        edges[np.maximum(self.first[a:b] - first, 0)] += 1
        edges[np.minimum(self.end[a:b], end) - first] -= 1
        return np.cumsum(edges[:-1], dtype=np.int8).astype(bool)


def documents_of(document_starts: np.ndarray, token_count: int) -> tuple[np.ndarray, np.ndarray]:
    """(first token, number of tokens) of each document in a shard, int64, and of the rest of one with which it begins."""
    starts = document_starts.astype(np.int64)
    starts = np.insert(starts, 0, 0) if token_count and (not len(starts) or starts[0]) else starts
    return starts, np.diff(starts, append=token_count)
