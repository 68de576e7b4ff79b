"""The keys that attention's queries see."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """Causal, and with `document_starts` (B, T) int32 within documents side by side in a row: it holds the position at
    which the document of each position starts, and query i sees key j if document_starts[i] <= j <= i."""

    document_starts: Tensor | None = None

    def hidden(self, sample: int, length: int, device: torch.device) -> Tensor:
        """(T, T) bool: whether a query of this sample (first) does not see a key (last)."""
        hidden = torch.ones(length, length, dtype=torch.bool, device=device).triu_(1)
        if self.document_starts is not None:
            hidden |= torch.arange(length, device=device) < self.document_starts[sample].unsqueeze(1)
        return hidden

    def starts_like(self, lse: Tensor) -> Tensor | None:
        """`document_starts`, if there are any, as kernels read them for lse (B, H, T)."""
        starts = self.document_starts
        if starts is not None:
            fits = tuple(starts.shape) == (lse.shape[0], lse.shape[2]) and starts.dtype == torch.int32
            message = f"document starts {tuple(starts.shape)} {starts.dtype} for lse {tuple(lse.shape)}"
            assert fits and starts.is_contiguous(), message
        return starts


CAUSAL = Mask()
