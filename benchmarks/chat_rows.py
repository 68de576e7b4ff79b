"""Made-up chats that fill rows, for handgrad and for other trainers."""

import numpy as np
from torch import Tensor

CHAT_TOKENS = (250, 750)  # of a chat, evenly drawn


class ChatRows:
    """Rows full of made-up chats, the last one cut; a chat's second half is trained. Row i is a pure function of (seed, i).
    As in handgrad's `masked` packing, no chat sees another, and the first token of a chat is no target."""

    def __init__(self, pool: np.ndarray, seed: int, length: int):
        self.pool, self.seed, self.length = pool, seed, length

    def lengths(self, row: int) -> list[int]:
        """The lengths of the chats in a row, in tokens."""
        draw, lengths = np.random.default_rng((self.seed, row)), list[int]()
        while (left := self.length - sum(lengths)) > 0:
            lengths.append(min(left, int(draw.integers(*CHAT_TOKENS))))
        return lengths

    def row(self, row: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """(tokens (length), whether each is trained (length), the chats' lengths)."""
        lengths = self.lengths(row)
        trained = np.concatenate([np.arange(length) >= max(1, length // 2) for length in lengths])
        return self.pool.take(row * self.length + np.arange(self.length), mode="wrap"), trained, lengths

    def fill(self, inputs: Tensor, targets: Tensor, first_sample: int, document_starts: Tensor | None = None) -> None:
        assert inputs.shape[1] == self.length
        for b in range(len(inputs)):
            tokens, trained, lengths = self.row(first_sample + b)
            inputs.numpy()[b] = tokens
            targets.numpy()[b, :-1] = np.where(trained[1:], tokens[1:], -1)
            targets.numpy()[b, -1] = -1
            if document_starts is not None:
                starts = np.cumsum([0, *lengths[:-1]])
                document_starts.numpy()[b] = np.repeat(starts, lengths)

    def trained_tokens(self, first_sample: int, samples: int) -> int:
        return sum(int(self.row(sample)[1].sum()) for sample in range(first_sample, first_sample + samples))
