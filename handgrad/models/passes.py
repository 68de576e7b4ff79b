"""A pass through a model as a list of stages, and the loss head, which takes a chunk of tokens at a time."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor


def nothing() -> None:
    """Launches nothing: what is left out, or a stage that only marks where its bucket's weights are needed."""


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


Onto = Callable[[Tensor, Tensor, Tensor, Tensor | None], None]  # (out, residual, weight, bias)


def onto_stream(ops: ModuleType, attend: Callable[[], None], attended: Tensor, scratch: Tensor) -> Onto:
    """Returns `attend`, which makes y = `attended` (N, H D), and then out = residual + y weight^T + bias."""

    def both(out: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        attend()
        ops.linear_residual_forward(out, residual, attended, weight, bias, scratch=scratch)

    return both


def head_logits(ops: ModuleType, w: Any, act: Any) -> Iterator[tuple[slice, Tensor]]:
    """(rows, logits) of one chunk of tokens after the other, all in one buffer: the products of act.lnf with w.head."""
    N, chunk = act.lnf.shape[0], act.logits.shape[0]
    for start in range(0, N, chunk):
        rows = slice(start, min(start + chunk, N))
        logits = act.logits[: rows.stop - start]
        ops.linear_forward(logits, act.lnf[rows], w.head, None, scratch=act.scratch)
        yield rows, logits
