"""The ways in which a fault gets into a process, and the line with which it says that it has fired."""

import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

FIRED = "fault fired"


def fired() -> None:
    print(FIRED, file=sys.stderr, flush=True)


def before(owner: type, name: str, due: Callable[..., bool], act: Callable[[], Any]) -> None:
    """`act` before the first call of a method that is `due` by its arguments."""
    original, done = getattr(owner, name), []

    def patched(*given: Any, **named: Any) -> Any:
        if not done and due(*given):
            done.append(True)
            fired()
            act()
        return original(*given, **named)

    setattr(owner, name, patched)


def nth(number: int) -> Callable[..., bool]:
    """True of call `number`, counted from 0."""
    calls = itertools.count()
    return lambda *_: next(calls) == number


def send(number: int) -> Callable[[], None]:
    """A signal to this process."""
    return lambda: os.kill(os.getpid(), number)
