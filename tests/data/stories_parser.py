"""The probability of a text under the grammar of the built-in stories, by parsing, and the grammar's exact entropy."""

import math
from collections.abc import Iterator

from handgrad.data.stories import STORY, UNCONDITIONAL, Phrase, Piece, Word


def derivation_spans(start: Piece, text: str) -> Iterator[int]:
    """The span of every derivation of `text` from `start`; the grammar is unambiguous where this yields one at most."""
    Partial = tuple[int, tuple[Piece, ...], dict[str, str], int]  # position, stack, words, span
    pending: list[Partial] = [(0, (start,), {UNCONDITIONAL: UNCONDITIONAL}, 1)]
    while pending:
        position, stack, words, span = pending.pop()
        if not stack:
            if position == len(text):
                yield span
            continue
        rest, piece = stack[:-1], stack[-1]
        if isinstance(piece, Phrase):
            width = len(piece.alternatives)
            pending.extend((position, rest + alternative, words, span * width) for alternative in piece.alternatives)
        elif isinstance(piece, Word) and piece.name not in words:
            row = piece.rows[words[piece.by]]
            for option in row:
                if text.startswith(option, position):
                    pending.append((position + len(option), rest, words | {piece.name: option}, span * len(row)))
        else:
            literal = words[piece.name] if isinstance(piece, Word) else piece
            if text.startswith(literal, position):
                pending.append((position + len(literal), rest, words, span))


def negative_log_probability(text: str) -> float | None:
    """-log p(text) in nats, from the text alone; None if no story has this text."""
    spans = list(derivation_spans(STORY, text))
    # Probabilities of derivations add up, so this stays right even for a grammar that became ambiguous.
    return -math.log(math.fsum(1 / span for span in spans)) if spans else None


def entropy_nats(start: Piece = STORY) -> float:
    """The exact mean of -log p over all stories, in nats per story.

    Follows every combination of phrases and none of words: the rows of a `By` table are equally long, so the cost of a word
    does not depend on its value.
    """

    def expected(stack: tuple[Piece, ...], words: frozenset[str]) -> float:
        nats = 0.0
        while stack:
            stack, piece = stack[:-1], stack[-1]
            if isinstance(piece, Phrase):
                width = len(piece.alternatives)
                branches = math.fsum(expected(stack + alternative, words) for alternative in piece.alternatives)
                return nats + math.log(width) + branches / width
            if isinstance(piece, Word) and piece.name not in words:
                nats += math.log(len(next(iter(piece.rows.values()))))
                words |= {piece.name}
        return nats

    return expected((start,), frozenset())
