"""The order of the data: sample i is a pure function of (seed, i), so a run resumes from one integer.

A window is `sequence_length` + 1 tokens of one shard, its inputs and, one further, its targets; windows of a shard
start `sequence_length` tokens apart, so that each token is predicted once. An epoch visits every window once: the
shards in a shuffled order, the windows of a shard in a shuffled order, and nothing of these orders is stored
(`permutation`). The tokens that do not fill a window are skipped at the start or the end of a shard, a different share
in each epoch.

To validate, windows may overlap: they start `stride` tokens apart, and each scores only its last `stride` tokens, the
first of a shard all. Each token is scored once, after at least `sequence_length` - `stride` tokens of its shard or all
that precede it.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from handgrad.data.permutation import mix, permute
from handgrad.data.shards import Dataset, Shard
from handgrad.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor  # `prepare` shares this package and runs without torch

# The purpose in a key: no two uses of a seed draw the same numbers.
SHARD_ORDER, WINDOW_ORDER, OFFSET = 1, 2, 3


class Batches:
    """Samples of `sequence_length` tokens from `shards`; without `shuffle` in order and from the first token on, every
    `stride` tokens (0: `sequence_length`).

    Raises DataError: no shard holds a single window.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        sequence_length: int,
        seed: int,
        shuffle: bool = True,
        stride: int = 0,
        packing: str = "stream",
    ):
        assert 0 <= stride <= sequence_length > 0 and not (stride and shuffle)
        self.shards = tuple(shards)
        self.sequence_length = sequence_length
        self.seed = seed
        self.shuffle = shuffle
        self.stride = stride or sequence_length
        overlap = sequence_length - self.stride
        self._windows = [max(0, shard.token_count - 1 - overlap) // self.stride for shard in self.shards]
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

        Raises DataError: a shard, touched for the first time, is damaged.
        """
        assert first_sample >= 0 and inputs.shape == targets.shape and inputs.shape[1] == self.sequence_length
        inputs_array, targets_array = inputs.numpy(), targets.numpy()  # the same memory; pinned tensors too
        for row in range(len(inputs_array)):
            window = self.window(first_sample + row)
            inputs_array[row] = window[:-1]
            targets_array[row] = window[1:]

    def trained_tokens(self, first_sample: int, samples: int) -> int:
        return samples * self.sequence_length

    def window(self, sample: int) -> np.ndarray:
        """The tokens of a sample, uint16, (T + 1,), a read-only view of its shard."""
        shard, start = self.locate(sample)
        return self.shards[shard].tokens[start : start + self.sequence_length + 1]

    def locate(self, sample: int) -> tuple[int, int]:
        """(number of a sample's shard, offset of its first token there)."""
        epoch, position = divmod(sample, self.samples_per_epoch)
        if epoch != self._epoch:
            self._enter(epoch)
        visit = int(np.searchsorted(self._first, position, side="right")) - 1
        shard, window, offset = self._order[visit], position - int(self._first[visit]), 0
        if self.shuffle:
            window = permute(window, self._windows[shard], mix(self.seed, WINDOW_ORDER, epoch, shard))
            slack = self.shards[shard].token_count - 1 - self._windows[shard] * self.sequence_length
            offset = mix(self.seed, OFFSET, epoch, shard) % (slack + 1)
        return shard, offset + window * self.stride

    def context(self, sample: int) -> int:
        """The number of first targets of a sample that it does not score: the sample before it does."""
        return self.sequence_length - self.stride if self.locate(sample)[1] else 0

    def scored_tokens(self, samples: int) -> int:
        """The number of tokens that the first `samples` samples score, at most an epoch's."""
        begun = sum(first < samples for first in accumulate(filter(None, self._windows), initial=0))  # shards
        return samples * self.stride + begun * (self.sequence_length - self.stride)

    def samples_of(self, tokens: int) -> int:
        """The number of first samples that score at most `tokens` tokens, at least 1 and at most an epoch's."""
        every = range(self.samples_per_epoch + 1)
        return max(1, bisect_right(every, tokens, key=self.scored_tokens) - 1)

    def _enter(self, epoch: int) -> None:
        """Tabulates the order of the shards that hold a window, and the position in the epoch where each begins."""
        used = [shard for shard, windows in enumerate(self._windows) if windows]
        if self.shuffle:
            key = mix(self.seed, SHARD_ORDER, epoch)
            used = [used[permute(i, len(used), key)] for i in range(len(used))]
        self._order = used
        self._first = np.cumsum([0] + [self._windows[shard] for shard in used[:-1]])
        self._epoch = epoch


def validation_batches(dataset: Dataset, sequence_length: int, stride: int = 0, packing: str = "stream") -> Batches | None:
    """The validation split in order, or None if there is none."""
    shards = dataset.splits["validation"]
    return Batches(shards, sequence_length, 0, shuffle=False, stride=stride, packing=packing) if shards else None
