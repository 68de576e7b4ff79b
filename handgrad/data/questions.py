"""The built-in chat data: short questions with one right answer each, in conversations of one to three turns.

`conversation(seed, number, held_out)` draws one. `check` reads the questions of a conversation and decides whether an
answer is right, so it works for any model's conversation. An eighth of all questions, chosen by a hash of their text (and
of the text that they refer to), is held out: these are only in validation, the others only in training.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
PEOPLE = ("Ann", "Ben", "Cora", "Dan", "Eve", "Finn", "Gus", "Ida", "Jon", "Kim", "Lea", "Max")
COLOURS = ("red", "blue", "green", "black", "white", "brown")
THINGS = ("ball", "cup", "hat", "kite", "lamp", "map", "pen", "ring", "shoe", "top")
TIMES = {"twice": 2, "three times": 3}
HELD_OUT = 32  # of 256
FACT = re.compile(r"(\w+) has the (\w+) (\w+)\. ")
AND_PLUS = re.compile(r"And plus (\d+)\?")


class Draw:
    """Choices from a hash of `key`: they depend on no other draw and on no library's version."""

    def __init__(self, *key: object):
        self.number = int.from_bytes(hashlib.sha256("/".join(map(str, key)).encode()).digest(), "little")

    def below(self, count: int) -> int:
        self.number, digit = divmod(self.number, count)
        return digit

    def one(self, choices: Sequence[str]) -> str:
        return choices[self.below(len(choices))]

    def some(self, choices: Sequence[str], count: int) -> list[str]:
        """`count` different choices."""
        left = list(choices)
        return [left.pop(self.below(len(left))) for _ in range(count)]

    def word(self, syllables: int) -> str:
        return "".join(self.one(CONSONANTS) + self.one(VOWELS) for _ in range(syllables))


class Kind(NamedTuple):
    """A kind of question: draws its text, recognises it, answers it."""

    ask: Callable[[Draw], str]
    pattern: re.Pattern[str]
    answer: Callable[[re.Match[str]], str]


def _subtraction(draw: Draw) -> str:
    large = draw.below(100)
    return f"What is {large} - {draw.below(large + 1)}?"


def _comparison(draw: Draw) -> str:
    first = draw.below(100)
    return f"Which is {draw.one(('larger', 'smaller'))}, {first} or {(first + 1 + draw.below(99)) % 100}?"


def _count(draw: Draw) -> str:
    word = draw.word(3)
    return f"How often is {draw.one(word + CONSONANTS)} in {word}?"


KINDS: dict[str, Kind] = {
    "copy": Kind(lambda d: f"Say {d.word(2)} {d.word(2)}.", re.compile(r"Say (\w+ \w+)\."), lambda m: m[1]),
    "capitals": Kind(
        lambda d: f"Write {d.word(2)} in capitals.", re.compile(r"Write (\w+) in capitals\."), lambda m: m[1].upper()
    ),
    "dashes": Kind(
        lambda d: f"Write {d.word(1)} {d.word(1)} {d.word(1)} with dashes.",
        re.compile(r"Write (\w+) (\w+) (\w+) with dashes\."),
        lambda m: "-".join(m.groups()),
    ),
    "times": Kind(
        lambda d: f"Write {d.word(2)} {d.one(tuple(TIMES))}.",
        re.compile(r"Write (\w+) (twice|three times)\."),
        lambda m: " ".join([m[1]] * TIMES[m[2]]),
    ),
    "edge": Kind(
        lambda d: f"What is the {d.one(('first', 'last'))} letter of {d.word(2 + d.below(2))}?",
        re.compile(r"What is the (first|last) letter of (\w+)\?"),
        lambda m: m[2][0 if m[1] == "first" else -1],
    ),
    "reverse": Kind(
        lambda d: f"Spell {d.word(2)} backwards.", re.compile(r"Spell (\w+) backwards\."), lambda m: m[1][::-1]
    ),
    "length": Kind(
        lambda d: f"How long is {d.word(1 + d.below(4)) + d.one(('', *CONSONANTS))}?",
        re.compile(r"How long is (\w+)\?"),
        lambda m: str(len(m[1])),
    ),
    "count": Kind(_count, re.compile(r"How often is (\w) in (\w+)\?"), lambda m: str(m[2].count(m[1]))),
    "order": Kind(
        lambda d: f"Put {' '.join(str(d.below(10)) for _ in range(4))} in order.",
        re.compile(r"Put (\d+(?: \d+)+) in order\."),
        lambda m: " ".join(sorted(m[1].split(), key=int)),
    ),
    "compare": Kind(
        _comparison,
        re.compile(r"Which is (larger|smaller), (\d+) or (\d+)\?"),
        lambda m: str((max if m[1] == "larger" else min)(int(m[2]), int(m[3]))),
    ),
    "add": Kind(
        lambda d: f"What is {d.below(100)} + {d.below(100)}?",
        re.compile(r"What is (\d+) \+ (\d+)\?"),
        lambda m: str(int(m[1]) + int(m[2])),
    ),
    "subtract": Kind(_subtraction, re.compile(r"What is (\d+) - (\d+)\?"), lambda m: str(int(m[1]) - int(m[2]))),
}
OWNER, COLOUR = re.compile(r"Who has the (\w+)\?"), re.compile(r"What colour is the (\w+)\?")
NAMES = (*KINDS, "world", "plus")  # of all kinds; the last two may refer to an earlier turn


def conversation(seed: int, number: int, held_out: bool) -> tuple[tuple[str, str], ...]:
    """(role, content) of the messages of conversation `number` of a seed; its questions are all held out, or none is."""
    asked: list[str] = []
    for turn in range((1, 1, 2, 3)[Draw("turns", seed, number).below(4)]):
        for attempt in range(10_000):
            question = _question(Draw(seed, number, turn, attempt), asked)
            if is_held_out([*asked, question]) == held_out:
                break
        asked.append(question)
    answers = [_follow(asked[: turn + 1])[1] for turn in range(len(asked))]
    return tuple(message for q, a in zip(asked, answers, strict=True) for message in (("user", q), ("assistant", a or "")))


def check(messages: Sequence[Mapping[str, str]], answer: str) -> bool:
    """True if `answer`, ignoring blanks around it, is right for the last question of a conversation."""
    return answer.strip() == known_answer(messages)


def known_answer(messages: Sequence[Mapping[str, str]]) -> str | None:
    """The right answer to the last question of a conversation; None for a question of an unknown kind."""
    return _follow(_questions(messages))[1]


def kind_of(messages: Sequence[Mapping[str, str]]) -> str | None:
    """The kind of the last question, one of `NAMES`, or None."""
    return _follow(_questions(messages))[0]


def is_held_out(asked: Sequence[str]) -> bool:
    """True if the last question of a conversation, with the text that it refers to, is only in validation."""
    context = asked[-2] + " " if AND_PLUS.fullmatch(asked[-1]) else ""
    if OWNER.fullmatch(asked[-1]) or COLOUR.fullmatch(asked[-1]):
        context = _facts(asked)
    return hashlib.sha256(f"question {context}{asked[-1]}".encode()).digest()[0] < HELD_OUT


def _questions(messages: Sequence[Mapping[str, str]]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "user"]


def _question(draw: Draw, asked: Sequence[str]) -> str:
    facts = FACT.findall(_facts(asked))
    if asked and draw.below(2):
        if facts:
            return _about(draw, [thing for _, _, thing in facts])
        if (_follow(asked)[1] or "").isdigit():
            return f"And plus {draw.below(10)}?"
    kind = draw.below(len(KINDS) + 2)
    if kind < len(KINDS):
        return [*KINDS.values()][kind].ask(draw)
    count = 2 + draw.below(2)
    people, colours, things = draw.some(PEOPLE, count), draw.some(COLOURS, count), draw.some(THINGS, count)
    return "".join(f"{p} has the {c} {t}. " for p, c, t in zip(people, colours, things, strict=True)) + _about(draw, things)


def _about(draw: Draw, things: Sequence[str]) -> str:
    return f"{draw.one(('Who has', 'What colour is'))} the {draw.one(things)}?"


def _facts(asked: Sequence[str]) -> str:
    """The facts in the last question that states any."""
    for question in reversed(asked):
        if told := [match[0] for match in FACT.finditer(question)]:
            return "".join(told)
    return ""


def _follow(asked: Sequence[str]) -> tuple[str | None, str | None]:
    """(kind, right answer) of the last question of a conversation."""
    if not asked:
        return None, None
    if match := AND_PLUS.fullmatch(asked[-1]):
        before = _follow(asked[:-1])[1] or ""
        return ("plus", str(int(before) + int(match[1]))) if before.isdigit() else (None, None)
    question = FACT.sub("", asked[-1])
    for pattern, group in ((OWNER, 0), (COLOUR, 1)):
        if match := pattern.fullmatch(question):
            fact = next((fact for fact in FACT.findall(_facts(asked)) if fact[2] == match[1]), None)
            return ("world", fact[group]) if fact else (None, None)
    for name, kind in KINDS.items():
        if match := kind.pattern.fullmatch(asked[-1]):
            return name, kind.answer(match)
    return None, None
