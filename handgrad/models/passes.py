"""A pass through a model as a list of stages."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A stretch of a pass: the first one that reads the weights of `bucket`, or, with `done`, the one after which the
    bucket's gradients are complete."""

    bucket: str
    run: Callable[[], None]
    done: bool = False


def run(stages: Iterable[Stage]) -> None:
    for stage in stages:
        stage.run()
