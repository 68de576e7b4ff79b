"""A pass through a model as a list of stages, and the part of it that all architectures share: the loss head, which takes a
chunk of tokens at a time."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor

from handgrad.networks import ModelShape

Launch = Callable[[], None]
# Attention with its output projection and the residual sum: out (N, C) = residual + y weight^T + bias.
Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None], None]  # (out, residual, weight, bias)


def no_launch() -> None:
    """Launches nothing, for an operation that a model lacks, or in a stage that only marks where its bucket's weights are
    needed."""


@dataclass(frozen=True)
class Stage:
    """A stretch of a pass: the first one that reads the weights of `bucket`, or, with `done`, the one after which the
    bucket's gradients are complete."""

    bucket: str
    run: Launch
    done: bool = False


def run(stages: Iterable[Stage]) -> None:
    for stage in stages:
        stage.run()


def head_logits(ops: ModuleType, w: Any, act: Any) -> Iterator[tuple[slice, Tensor]]:
    """(rows, logits) of one chunk of tokens after the other, all in one buffer: the products of act.lnf with w.head."""
    N, chunk = act.lnf.shape[0], act.logits.shape[0]
    for start in range(0, N, chunk):
        rows = slice(start, min(start + chunk, N))
        logits = act.logits[: rows.stop - start]
        ops.linear_forward(logits, act.lnf[rows], w.head, None, scratch=act.scratch)
        yield rows, logits


def head_losses(ops: ModuleType, w: Any, act: Any, shape: ModelShape) -> None:
    """act.lnf (N, C), act.targets (B, T) -> act.losses (N): the cross-entropy of each token in nats."""
    sizes = {"vocab_size": shape.vocab_size, "softcap": shape.softcap}
    for rows, logits in head_logits(ops, w, act):
        ops.classifier_forward(act.losses[rows], logits, act.targets.view(-1)[rows], **sizes)


def head_backward(
    ops: ModuleType, w: Any, g: Any, act: Any, d: Any, scale: Tensor, shape: ModelShape, last_norm: Launch
) -> None:
    """`head_losses`, and d.dlnf (N, C) = scale * dL/dlnf; adds the gradient of the head's weight to `g`. `last_norm`: the
    norm's backward, which adds its part to d.dresidual (N, C), 0 before it."""
    sizes = {"vocab_size": shape.vocab_size, "softcap": shape.softcap}
    for rows, logits in head_logits(ops, w, act):
        targets = act.targets.view(-1)[rows]
        ops.classifier_forward_backward(act.losses[rows], logits, targets, scale, **sizes)
        ops.linear_backward(d.dlnf[rows], g.head, None, logits, act.lnf[rows], w.head, scratch=act.scratch)
    d.dresidual.zero_()
    last_norm()
