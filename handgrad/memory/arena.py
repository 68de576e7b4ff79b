"""The memory planner: places named buffers with lifetimes in one allocation per kind, before the first step.

A buffer's lifetime is a set of intervals on a clock of stages (the forward of layer 3's attention is one tick). Two
buffers may share bytes if they are never alive at the same tick. A recomputed activation, for example, lives at its forward
tick and again at its backward tick; in between, other buffers use its bytes.
"""

import bisect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

ALIGNMENT_BYTES = 512  # of each buffer's start: enough for any vector load and any GPU's copy engine

Interval = tuple[int, int]  # first and last tick, both inclusive
ALWAYS: tuple[Interval, ...] = ((-(1 << 60), 1 << 60),)


@dataclass(frozen=True)
class Buffer:
    """A planned tensor: name, shape, dtype, allocation and lifetimes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str  # its allocation: "parameters", "gradients", "activations", ...
    lifetimes: tuple[Interval, ...] = ALWAYS

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def padded_bytes(self) -> int:
        return -(-self.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def overlaps(self, other: "Buffer") -> bool:
        """True if both buffers are alive at some tick."""
        return any(a[0] <= b[1] and b[0] <= a[1] for a in self.lifetimes for b in other.lifetimes)


@dataclass(frozen=True)
class Plan:
    """The offset of every buffer. Pure arithmetic: `handgrad plan` can print it without allocating the memory."""

    buffers: tuple[Buffer, ...]
    offsets: dict[str, int]  # bytes from the start of the kind's allocation, by buffer name
    size_bytes: dict[str, int]  # of each kind's allocation

    @property
    def total_bytes(self) -> int:
        return sum(self.size_bytes.values())

    def allocate(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Makes one zeroed allocation per kind; returns a view of it for each buffer, by name."""
        storage = {kind: torch.zeros(size, dtype=torch.uint8, device=device) for kind, size in self.size_bytes.items()}
        return self.lay_over(storage)

    def lay_over(self, storage: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The views over existing memory: uint8, at least `size_bytes` of each kind. Plans that take turns can share it."""
        views = {}
        for buffer in self.buffers:
            start = self.offsets[buffer.name]
            raw = storage[buffer.kind][start : start + buffer.size_bytes]
            views[buffer.name] = raw.view(buffer.dtype).view(buffer.shape)
        return views


def allocation_of(view: torch.Tensor) -> torch.Tensor:
    """The whole allocation under a view, as bytes (uint8)."""
    return torch.empty(0, dtype=torch.uint8, device=view.device).set_(view.untyped_storage())


def ticks_of(buffers: list[Buffer]) -> list[int]:
    """Each buffer's lifetime as a bit mask: two buffers overlap if their masks share a bit. Only ticks that begin an
    interval need a bit, because two overlapping intervals are both alive when the later one begins."""
    begins = sorted({first for buffer in buffers for first, _ in buffer.lifetimes})
    ticks = []
    for buffer in buffers:
        bits = 0
        for first, last in buffer.lifetimes:
            bits |= (1 << bisect.bisect_right(begins, last)) - (1 << bisect.bisect_left(begins, first))
        ticks.append(bits)
    return ticks


def make_plan(buffers: Iterable[Buffer]) -> Plan:
    """Places the buffers of each kind: the permanent ones in the given order, then the others, largest first,
    each at the lowest offset that is free during its lifetime (greedy by size; within 1.6 % of the least that the
    tables of this package need, which `tests/test_arena.py` measures)."""
    buffers = tuple(buffers)
    assert len({b.name for b in buffers}) == len(buffers), "buffer names must be unique"
    offsets: dict[str, int] = {}
    size_bytes: dict[str, int] = {}
    for kind in dict.fromkeys(b.kind for b in buffers):
        of_kind = [b for b in buffers if b.kind == kind]
        lasting = [b for b in of_kind if b.lifetimes == ALWAYS]
        passing = sorted((b for b in of_kind if b.lifetimes != ALWAYS), key=lambda b: -b.padded_bytes)
        base = 0
        for buffer in lasting:
            offsets[buffer.name] = base
            base += buffer.padded_bytes
        top = base
        placed: list[tuple[int, int, int]] = []  # (start, stop, ticks) of each placed buffer, sorted by start
        for buffer, ticks in zip(passing, ticks_of(passing), strict=True):
            offset, size = base, buffer.padded_bytes
            for start, stop, others_ticks in placed:
                if start >= offset + size:
                    break  # the buffer fits in the gap below this one
                if stop > offset and ticks & others_ticks:
                    offset = stop
            offsets[buffer.name] = offset
            bisect.insort(placed, (offset, offset + size, ticks))
            top = max(top, offset + size)
        size_bytes[kind] = top
    return Plan(buffers, offsets, size_bytes)


# The clock of a micro-step, and lifetimes on it.

WHOLE_BLOCKS = 3  # the recompute level at which a block keeps only its input


@dataclass(frozen=True)
class Clock:
    """The ticks of a micro-step: the embedding is 0, stage s of block l is 1 + S l + s, the loss head comes next, and the
    backward mirrors the forward. Without a backward a lifetime ends at the last read of the forward."""

    layers: int
    stages: int  # S, of a block
    training: bool = True
    layer: int = 0

    @property
    def head(self) -> int:
        return 1 + self.stages * self.layers

    def tick(self, stage: int) -> int:
        """The forward tick of this layer's stage; stage S is the next layer's first."""
        return 1 + self.stages * self.layer + stage

    def mirrored(self, tick: int) -> int:
        return 2 * self.head - tick if self.training else tick

    def every_layer(self) -> "Iterator[Clock]":
        return (replace(self, layer=layer) for layer in range(self.layers))


Lives = Callable[[Clock], tuple[Interval, ...]]


def kept(stage: int, until: int | None = None) -> Lives:
    """From the forward of `stage` to the backward of stage `until`, by default the same."""
    return lambda clock: ((clock.tick(stage), clock.mirrored(clock.tick(stage if until is None else until))),)


def recomputed_lifetimes(clock: Clock, ticks: tuple[Interval, ...]) -> tuple[Interval, ...]:
    """A block tensor's lifetimes at `WHOLE_BLOCKS`. In the forward it lives to its last reader. The block's backward begins
    by recomputing it, and it lives to its last reader there. Tensors that only later blocks read are kept."""
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
