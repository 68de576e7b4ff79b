"""Memory, planned: named buffers with lifetimes, placed in one allocation per kind before the first step.

A buffer's lifetime is a set of intervals on a clock of stages (the forward of layer 3's attention is one tick). Two
buffers may share bytes when no tick has both alive. A recomputed activation, for example, lives at its forward tick and
again at its backward tick, and lends its bytes to others in between.
"""

import bisect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

ALIGNMENT_BYTES = 512  # of every buffer's start: enough for any vector load and any GPU's copy engine

Interval = tuple[int, int]  # first and last tick, both inclusive
ALWAYS: tuple[Interval, ...] = ((-(1 << 60), 1 << 60),)


@dataclass(frozen=True)
class Buffer:
    """A planned tensor: name, shape, dtype, allocation and lifetimes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str  # the allocation it belongs to: "parameters", "gradients", "activations", ...
    lifetimes: tuple[Interval, ...] = ALWAYS

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def padded_bytes(self) -> int:
        return -(-self.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def overlaps(self, other: "Buffer") -> bool:
        """True if some tick has both buffers alive."""
        return any(a[0] <= b[1] and b[0] <= a[1] for a in self.lifetimes for b in other.lifetimes)


@dataclass(frozen=True)
class Plan:
    """The place of every buffer: pure arithmetic, so it can be made and printed without the memory it describes."""

    buffers: tuple[Buffer, ...]
    offsets: dict[str, int]  # bytes from the start of the kind's allocation, by buffer name
    size_bytes: dict[str, int]  # of each kind's allocation

    @property
    def total_bytes(self) -> int:
        return sum(self.size_bytes.values())

    def allocate(self, device: torch.device) -> dict[str, torch.Tensor]:
        """One zeroed allocation per kind, and a view of it for every buffer, by name."""
        storage = {kind: torch.zeros(size, dtype=torch.uint8, device=device) for kind, size in self.size_bytes.items()}
        return self.lay_over(storage)

    def lay_over(self, storage: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same views in memory that is there: uint8, of each kind at least `size_bytes`. So one allocation can serve
        two plans that are never at work at the same time."""
        views = {}
        for buffer in self.buffers:
            start = self.offsets[buffer.name]
            raw = storage[buffer.kind][start : start + buffer.size_bytes]
            views[buffer.name] = raw.view(buffer.dtype).view(buffer.shape)
        return views


def allocation_of(view: torch.Tensor) -> torch.Tensor:
    """The whole allocation that a view of a plan lies in, as bytes (uint8)."""
    return torch.empty(0, dtype=torch.uint8, device=view.device).set_(view.untyped_storage())


def ticks_of(buffers: list[Buffer]) -> list[int]:
    """The ticks of each buffer's life as bits of a number: two buffers overlap where both have a bit. Ticks at which no
    interval begins have none, as intervals that overlap do so where the later one begins."""
    begins = sorted({first for buffer in buffers for first, _ in buffer.lifetimes})
    found = []
    for buffer in buffers:
        bits = 0
        for first, last in buffer.lifetimes:
            bits |= (1 << bisect.bisect_right(begins, last)) - (1 << bisect.bisect_left(begins, first))
        found.append(bits)
    return found


def make_plan(buffers: Iterable[Buffer]) -> Plan:
    """Places the buffers of each kind: the lasting ones in the order given, then the others, largest first, each at the
    lowest offset where no buffer alive at the same time lies (greedy by size; within 1.6 % of the least that the
    tables of this package need, which `tests/test_arena.py` measures)."""
    buffers = tuple(buffers)
    assert len({b.name for b in buffers}) == len(buffers), "buffer names must be unique"
    offsets: dict[str, int] = {}
    size_bytes: dict[str, int] = {}
    for kind in dict.fromkeys(b.kind for b in buffers):
        mine = [b for b in buffers if b.kind == kind]
        lasting = [b for b in mine if b.lifetimes == ALWAYS]
        passing = sorted((b for b in mine if b.lifetimes != ALWAYS), key=lambda b: -b.padded_bytes)
        base = 0
        for buffer in lasting:
            offsets[buffer.name] = base
            base += buffer.padded_bytes
        top = base
        placed: list[tuple[int, int, int]] = []  # start, stop and ticks of the buffers laid out, sorted by start
        for buffer, ticks in zip(passing, ticks_of(passing), strict=True):
            offset, size = base, buffer.padded_bytes
            for start, stop, others_ticks in placed:
                if start >= offset + size:
                    break  # the gap before this one is large enough, and the list is sorted
                if stop > offset and ticks & others_ticks:
                    offset = stop
            offsets[buffer.name] = offset
            bisect.insort(placed, (offset, offset + size, ticks))
            top = max(top, offset + size)
        size_bytes[kind] = top
    return Plan(buffers, offsets, size_bytes)
