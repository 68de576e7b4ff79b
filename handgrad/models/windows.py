"""Attention windows: layers whose queries see a number of keys before them, and not all.

A query at i of a layer with a window of w keys sees those from max(start of its document, i - w + 1) to i. This bound never
falls along a row, so the kernels that keep documents apart compute windows too, and skip the blocks before them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from handgrad.memory.activations import PassTensors, activation
from handgrad.ops.reference.attention import Mask


def fill_window_starts(out: Tensor, document_starts: Tensor | None, window: int) -> None:
    """out (B, T) int32: the first key that each query sees."""
    T = out.shape[1]
    out.copy_(torch.arange(1 - window, T + 1 - window, dtype=out.dtype, device=out.device).clamp_(min=0))
    if document_starts is not None:
        torch.maximum(out, document_starts, out=out)


@dataclass
class WindowedPass(PassTensors):
    """The inputs of a pass through a network that may have windows, all of one size."""

    window_starts: Tensor = activation("B T", torch.int32, optional=True)

    def begin_windows(self, window: int) -> None:
        """Fills `window_starts` for this pass, if there is a window shorter than a row."""
        if self.hides(window):
            fill_window_starts(self.window_starts, self.document_starts, window)

    def masks(self, window: int) -> dict[str, Mask]:
        """The argument by which a layer's attention stays within its window; none for one that hides nothing."""
        return {"mask": Mask(self.window_starts, window, self.document_starts is not None)} if self.hides(window) else {}

    def hides(self, window: int) -> bool:
        """True if the window, of 0 for none, is shorter than a row."""
        return 0 < window < self.tokens.shape[1]
