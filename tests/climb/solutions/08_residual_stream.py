from collections.abc import Callable

from torch import Tensor


def residual_stream(dstream: Tensor, branches: list[Callable[[Tensor], Tensor]]) -> None:
    for branch in reversed(branches):
        dstream.add_(branch(dstream))
