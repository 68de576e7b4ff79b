"""Tokens to text: whole characters, and nothing of a stop string is ever shown."""

import itertools
import random

import pytest

from handgrad.data.tokenizer import Tokenizer, train_bpe
from handgrad.data.tokenizer_loading import load_tokenizer
from handgrad.generation.generate import Continuation, TextStream


def shown(tokenizer: Tokenizer, text: str, stops: list[str], cuts: list[int] | None = None) -> tuple[list[str], str]:
    """The pieces of `text`, whose tokens arrive as cut at `cuts` (default: one by one), and why it ended."""
    ids = tokenizer.encode(text).tolist()
    written = Continuation([tokenizer.end_of_text], 10**6, 0)
    stream, pieces = TextStream(tokenizer, stops), []
    edges = [*range(len(ids)), len(ids)] if cuts is None else [0, *cuts, len(ids)]
    for start, end in itertools.pairwise(edges):
        written.tokens.extend(ids[start:end])
        pieces.append(stream.read(written))
        if written.stopped:
            return pieces, written.stopped
    written.stopped = "end_of_text"
    return [*pieces, stream.read(written)], written.stopped


@pytest.mark.parametrize("text", ["naïve 東京 🦉", "", "\ufeff e\u0301"])
def test_a_character_cut_over_tokens_comes_out_whole(text: str) -> None:
    pieces, stopped = shown(load_tokenizer("bytes"), text, [])
    assert "".join(pieces) == text and stopped == "end_of_text"
    assert "\ufffd" not in "".join(pieces[:-1])


def test_a_character_that_never_ends_is_shown_as_broken() -> None:
    tokenizer = load_tokenizer("bytes")
    written = Continuation([0], 2, 0, tokens=tokenizer.encode("東").tolist()[:2])
    stream = TextStream(tokenizer, ["x"])
    assert stream.read(written) == ""
    written.stopped = "max_tokens"
    assert stream.read(written) == "\ufffd"


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two three", ["two"], "one "),
        ("one tw", ["two"], "one tw"),
        ("aaab", ["aab"], "a"),
        ("abababac", ["ababac"], "ab"),
        ("xabcd", ["abcd", "bc"], "xa"),  # "bc" is complete first
        ("xabc", ["bc", "abc"], "x"),  # both end there, "abc" begins first
        ("two", ["two"], ""),
        ("a\n\nb", ["\n\n", "b"], "a"),
        ("snow 東京 owl", ["京"], "snow 東"),
        ("plain", [], "plain"),
    ],
)
@pytest.mark.parametrize("kind", ["bytes", "bpe", "gpt2"])
def test_a_text_ends_before_a_stop(kind: str, text: str, stops: list[str], expected: str) -> None:
    tokenizer = train_bpe(["one two three a b c abab 東京 "] * 20, 290) if kind == "bpe" else load_tokenizer(kind)
    pieces, stopped = shown(tokenizer, text, stops)
    assert "".join(pieces) == expected
    assert stopped == ("stop" if expected != text else "end_of_text")


def test_no_cutting_into_tokens_changes_a_text() -> None:
    """Texts and stops of three letters, cut at random: the text is that before the stop which is complete first, and what
    is held back is never more than the longest stop."""
    tokenizer, random_source, found = load_tokenizer("bytes"), random.Random(0), 0
    for _ in range(400):
        text = "".join(random_source.choices("abc", k=random_source.randrange(20)))
        stops = ["".join(random_source.choices("abc", k=random_source.randrange(1, 5))) for _ in range(2)]
        ends = [n for n in range(len(text) + 1) if any(text[:n].endswith(stop) for stop in stops)]
        first = text[: ends[0]] if ends else ""
        expected = first[: -max(len(s) for s in stops if first.endswith(s))] if ends else text
        cuts = sorted(random_source.sample(range(1, len(text) + 1), random_source.randrange(len(text) + 1)))
        pieces, stopped = shown(tokenizer, text, stops, cuts)
        assert "".join(pieces) == expected and stopped == ("stop" if ends else "end_of_text"), (text, stops, cuts)
        for cut, sofar in zip(cuts, range(1, len(pieces)), strict=False):
            assert len("".join(pieces[:sofar])) > cut - max(map(len, stops))
        found += bool(ends)
    assert 100 < found < 390
