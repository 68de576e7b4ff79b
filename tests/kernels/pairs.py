"""Fewer cases than all combinations: every pair of two axes' values, as a mistake rarely takes three. For kernels in the
interpreter, most of which a GPU runs in all combinations (tests/gpu)."""

from collections.abc import Iterable
from itertools import combinations
from typing import Any


def every_pair(cases: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Some of the cases, which hold every pair of values (of two of a case's places) that any of them holds."""
    pairs = {case: set(combinations(enumerate(case), 2)) for case in cases}
    missing, kept = set().union(*pairs.values()), []
    while missing:
        kept.append(max(pairs, key=lambda case: len(pairs[case] & missing)))
        missing -= pairs[kept[-1]]
    return kept
