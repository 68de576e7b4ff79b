"""A pass through a model as a list of stages, and the loss head, which all architectures share. The head works on one chunk
of tokens at a time."""

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
    """Launches nothing: for an operation that a model lacks, or a stage that only marks the first use of its bucket."""


@dataclass(frozen=True)
class Stage:
    """A section of a pass: the first to read the weights of `bucket` or, with `done`, the last to add to its gradients."""

    bucket: str
    run: Launch
    done: bool = False


def run(stages: Iterable[Stage]) -> None:
    for stage in stages:
        stage.run()


def head_logits(ops: ModuleType, w: Any, act: Any) -> Iterator[tuple[slice, Tensor]]:
    """Yields (rows, logits) chunk by chunk: logits = act.lnf[rows] w.head^T. All chunks share one buffer."""
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
    """Computes `head_losses` and d.dlnf (N, C) = scale * dL/dlnf, and adds the head's weight gradient to `g`. scale (1), or
    (N) with a weight for each token. `last_norm`: the norm's backward, which adds to d.dresidual (N, C), zeroed here."""
    sizes = {"vocab_size": shape.vocab_size, "softcap": shape.softcap}
    for rows, logits in head_logits(ops, w, act):
        each = scale if len(scale) == 1 else scale[rows]
        ops.classifier_forward_backward(act.losses[rows], logits, act.targets.view(-1)[rows], each, **sizes)
        ops.linear_backward(d.dlnf[rows], g.head, None, logits, act.lnf[rows], w.head, scratch=act.scratch)
    d.dresidual.zero_()
    last_norm()
