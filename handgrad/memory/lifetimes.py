"""The clock of a micro-step, and the lifetimes of activations on it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from handgrad.memory.arena import Interval
from handgrad.networks.network import NEVER as NEVER

WHOLE_BLOCKS = 3  # the recompute level at which a block keeps its input alone


@dataclass(frozen=True)
class Clock:
    """The ticks of a micro-step: the embedding is 0, stage s of block l is 1 + S l + s, then comes the loss head, and the
    backward mirrors the forward. Without a backward everything ends where the forward reads it last."""

    layers: int
    stages: int  # S, of a block
    training: bool = True
    layer: int = 0

    @property
    def head(self) -> int:
        return 1 + self.stages * self.layers

    def tick(self, stage: int) -> int:
        """The forward tick of a stage of this layer; stage S is the next layer's first."""
        return 1 + self.stages * self.layer + stage

    def mirrored(self, tick: int) -> int:
        return 2 * self.head - tick if self.training else tick

    def every_layer(self) -> "Iterator[Clock]":
        return (replace(self, layer=layer) for layer in range(self.layers))


Lives = Callable[[Clock], tuple[Interval, ...]]


def kept(stage: int, until: int | None = None) -> Lives:
    """From its stage in the forward to the backward of stage `until` (by default the same)."""
    return lambda clock: ((clock.tick(stage), clock.mirrored(clock.tick(stage if until is None else until))),)


def recomputed_lifetimes(clock: Clock, ticks: tuple[Interval, ...]) -> tuple[Interval, ...]:
    """The ticks of a block's tensor at `WHOLE_BLOCKS`: to its last reader in the forward; then, recomputed as the block's
    backward begins, to its last reader there. Tensors that only the blocks above read are kept."""
    ((first, last),) = ticks
    begin = clock.mirrored(clock.tick(clock.stages - 1))
    if last < clock.head:
        return (first, last), (begin, begin)
    return ((first, clock.mirrored(last)), (begin, last)) if begin <= last else ticks


def from_embedding(stage: int) -> Lives:
    """From the embedding to the backward of this stage of the first block."""
    return lambda clock: ((0, clock.mirrored(clock.tick(stage))),)


def at_head(clock: Clock) -> tuple[Interval, ...]:
    return ((clock.head, clock.head),)


def in_backward(clock: Clock) -> tuple[Interval, ...]:
    """From the loss head to the end of the backward."""
    return ((clock.head, clock.mirrored(0)),)


def backward_of(*stages: int, first: int = 0, last: int = 0) -> Lives:
    """The backward ticks of these stages in all layers, from `first` ticks before to `last` ticks after."""

    def ticks(clock: Clock) -> tuple[Interval, ...]:
        middle = [layer.mirrored(layer.tick(stage)) for stage in stages for layer in clock.every_layer()]
        return tuple((tick - first, tick + last) for tick in middle)

    return ticks
