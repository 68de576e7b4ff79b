"""Documents side by side in rows, for tests of attention."""

import torch
from torch import Tensor

# Lengths of the documents in each row: rows of one, of several, of single tokens, with padding at the end.
PACKINGS = {
    "a token": [[1]],
    "one each": [[37], [37]],
    "odd": [[5, 1, 20, 11], [30, 7]],
    "single tokens": [[1] * 19],
    "padding": [[13, 16, 4], [33]],
}


def document_starts(rows: list[list[int]]) -> Tensor:
    """(B, T) int32: the position at which the document of each position starts."""
    starts = [[sum(row[:i]) for i, length in enumerate(row) for _ in range(length)] for row in rows]
    return torch.tensor(starts, dtype=torch.int32)


def within(starts: Tensor, window: int) -> Tensor:
    """The first key that each query sees in its document, at most `window` back with its own; 0: all of the document."""
    return torch.maximum(starts, torch.arange(starts.shape[1]).int() + 1 - window) if window else starts


def visible(starts: Tensor) -> Tensor:
    """(B, 1, T, T) bool: the keys (last) that each query sees."""
    places = torch.arange(starts.shape[1], device=starts.device)
    return ((places <= places[:, None]) & (places >= starts[:, :, None]))[:, None]
