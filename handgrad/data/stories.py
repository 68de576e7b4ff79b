"""The built-in corpus: short stories from a grammar whose probabilities are known, so the least possible loss is known.

`story(seed, index)` draws one. Every choice is uniform, so a derivation made of choices among n_1, n_2, ... n_k
alternatives has probability 1 / (n_1 n_2 ... n_k). That product, the derivation's *span*, is an integer: probabilities
here are exact, and `nats` = log(span) rounds once. The text determines its derivation, so log(span) is also the text's
own -log p; a parser in the tests (tests/data/stories_parser.py) recovers it from the text alone.

Nothing can follow a story's last sentence, so the end of the text costs no nats. `stories_grammar` has the
tables; docs/stories.md compares a training run with the floor.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from handgrad.data.stories_grammar import GRAMMAR, START, Alternatives, By

UNCONDITIONAL = ""  # the key of the only row of a word that depends on no other word


class Story(NamedTuple):
    text: str
    nats: float  # -log p(text), in nats; the end of the text included


@dataclass(frozen=True, eq=False)
class Word:
    """A slot without slots inside: drawn at its first occurrence, repeated at the others."""

    name: str
    by: str  # the word that selects the row, or UNCONDITIONAL
    rows: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, eq=False)
class Phrase:
    """A slot with slots inside. Alternatives are stored last piece first, ready to be pushed on a stack."""

    name: str
    alternatives: tuple[tuple["Piece", ...], ...]


Piece = str | Word | Phrase  # a str is literal text


def compile_grammar(grammar: dict[str, Alternatives], start: str = START) -> Piece:
    """The slot `start` with every slot it mentions resolved to its Word or Phrase."""
    slots: dict[str, Piece] = {}

    def resolve(name: str) -> Piece:
        if name not in slots:
            source = grammar[name]
            if isinstance(source, By):
                slots[name] = Word(name, source.slot, source.rows)
            elif not any("{" in alternative for alternative in source):
                slots[name] = Word(name, UNCONDITIONAL, {UNCONDITIONAL: source})
            else:
                slots[name] = Phrase(name, tuple(pieces(alternative) for alternative in source))
        return slots[name]

    def pieces(alternative: str) -> tuple[Piece, ...]:
        split = re.split(r"\{(\w+)\}", alternative)  # literal, slot, literal, slot, ... literal
        resolved = [resolve(part) if position % 2 else part for position, part in enumerate(split)]
        return tuple(piece for piece in reversed(resolved) if piece != "")

    return resolve(start)


STORY = compile_grammar(GRAMMAR)


def derive(start: Piece, number: int) -> tuple[str, int]:
    """Text and span of the derivation that `number` >= 0 selects: its digits, in mixed radix, are the choices.

    Derivations are chosen by the residue of `number` modulo their own span, so `number` uniform on [0, 2^256) gives
    each its probability up to a relative span / 2^256: below 2^-180 for a story, far less than float64 can see.
    """
    words = {UNCONDITIONAL: UNCONDITIONAL}
    stack, output, span = [start], [], 1
    while stack:
        piece = stack.pop()
        if type(piece) is Word:
            text = words.get(piece.name)
            if text is None:
                row = piece.rows[words[piece.by]]
                number, digit = divmod(number, len(row))
                span *= len(row)
                text = words[piece.name] = row[digit]
            output.append(text)
        elif type(piece) is Phrase:
            number, digit = divmod(number, len(piece.alternatives))
            span *= len(piece.alternatives)
            stack.extend(piece.alternatives[digit])
        else:
            output.append(piece)
    return "".join(output), span


def story(seed: int, index: int) -> Story:
    """Story `index` of the corpus `seed`: the same text on every platform, in any order, in any process."""
    # SHA-256 of the counter and not a generator's state: no story needs the ones before it, and no library version
    # or word size can change the text.
    digest = hashlib.sha256(f"{seed:d}/{index:d}".encode()).digest()
    text, span = derive(STORY, int.from_bytes(digest, "little"))
    return Story(text, math.log(span))
