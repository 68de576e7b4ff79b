"""Feeds micro-batches into the model's buffers, reading and copying one while the device works on the one before."""

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

SLOTS = 2  # micro-batches in flight


class Source(Protocol):
    """A source of samples: `handgrad.data.batches.Batches`, or anything that fills like it."""

    def fill(self, inputs: Tensor, targets: Tensor, first_sample: int) -> None: ...


def sort_positions(sorted_positions: Tensor, tokens: Tensor) -> None:
    """sorted_positions (N) int32 = 0..N-1 ordered by tokens (B, T), equal tokens in their order."""
    flat = tokens.numpy().reshape(-1)
    # Keys of 16 bits take a radix sort: 0.27 ms for 65,536 of them.
    keys = flat.astype(np.uint16) if flat.size and flat.max() < 1 << 16 else flat
    sorted_positions.numpy()[:] = np.argsort(keys, kind="stable")


class BatchFeed:
    """Fills `act.tokens`, `act.targets` and `act.sorted_positions`.

    On a CPU it writes in place. For a CUDA device a micro-batch goes through one of two slots: pinned host memory, from
    there on a stream of its own into device memory, and in the micro-step's turn into the buffers. The host waits only for
    a slot that is still in flight, two micro-steps behind.
    """

    def __init__(self, source: Source, act: Any, samples: Tensor | None = None):
        """`act`: the model's activations; `samples`: takes the numbers of the micro-batch's samples."""
        self.source = source
        self.targets: tuple[Tensor, ...] = (act.tokens, act.targets, act.sorted_positions)
        if samples is not None:
            self.targets += (samples,)
        self.on_host = act.tokens.device.type != "cuda"
        if act.tokens.device.type == "mps":
            self.host = [tuple(torch.empty_like(t, device="cpu") for t in self.targets)]
        elif self.on_host:
            self.host = [self.targets]
        else:
            self.host = [
                tuple(torch.empty_like(t, device="cpu", pin_memory=True) for t in self.targets) for _ in range(SLOTS)
            ]
            self.staging = [tuple(torch.empty_like(t) for t in self.targets) for _ in range(SLOTS)]
            self.stream = torch.cuda.Stream()
            self.arrived = [torch.cuda.Event() for _ in range(SLOTS)]
            self.taken = [torch.cuda.Event() for _ in range(SLOTS)]
        self.slot = 0

    def fill(self, first_sample: int) -> None:
        """Samples `first_sample`, ... as the next micro-batch; on CUDA in the order of the current stream."""
        slot, self.slot = self.slot, (self.slot + 1) % len(self.host)
        tokens, targets, sorted_positions, *samples = self.host[slot]
        if not self.on_host:
            self.arrived[slot].synchronize()  # the slot's last copy has left its pinned memory
        self.source.fill(tokens, targets, first_sample)
        sort_positions(sorted_positions, tokens)
        for numbers in samples:
            torch.arange(first_sample, first_sample + len(numbers), out=numbers)
        if self.on_host:
            if tokens is not self.targets[0]:
                for destination, value in zip(self.targets, self.host[slot], strict=True):
                    destination.copy_(value)
            return
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self.taken[slot])
            for staged, value in zip(self.staging[slot], self.host[slot], strict=True):
                staged.copy_(value, non_blocking=True)
            self.arrived[slot].record()
        torch.cuda.current_stream().wait_event(self.arrived[slot])
        for destination, staged in zip(self.targets, self.staging[slot], strict=True):
            destination.copy_(staged)
        self.taken[slot].record()
