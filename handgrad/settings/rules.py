"""Ranges of a setting's value, each with the words of its message."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from handgrad.errors import UsageError


class Rule(NamedTuple):
    """A condition on a value; a message reads "NAME must be TEXT"."""

    text: str
    holds: Callable[[Any], bool]

    def check(self, name: str, value: Any) -> None:
        if not self.holds(value):
            raise UsageError(f"{name} must be {self.text}, found {value}")


def at_most(most: float) -> Rule:
    return Rule(f"at most {most}", lambda value: value <= most)


def between(least: float, most: float, unit: str = "") -> Rule:
    return Rule(f"{least} to {most}{unit}", lambda value: least <= value <= most)


AT_LEAST_1 = Rule("at least 1", lambda value: value >= 1)
NOT_NEGATIVE = Rule("a finite number, 0 or more", lambda value: 0 <= value < math.inf)
ABOVE_0 = Rule("above 0", lambda value: 0 < value < math.inf)
BELOW_1 = Rule("in [0, 1)", lambda value: 0 <= value < 1)
BELOW_2_32 = Rule("below 2^32", lambda value: value < 1 << 32)
UP_TO_2 = Rule("0, 1 or 2", lambda value: value in (0, 1, 2))
UP_TO_3 = Rule("0, 1, 2 or 3", lambda value: value in (0, 1, 2, 3))
LANES = Rule("a power of two up to 4096, or 0", lambda value: value & (value - 1) == 0 and 0 <= value <= 4096)
SECONDS = between(1, 86400)
