"""Memory for calls of any size: one allocation, planned for the call at hand, kept for the next."""

from collections.abc import Iterable

import torch
from torch import Tensor

from handgrad.arena import Buffer, make_plan
from handgrad.evaluation.load import check_available


class GrowingMemory:
    """Takes one plan after the other. Its allocation is as large as the largest of them so far."""

    def __init__(self, device: torch.device):
        self.device = device
        self.storage = torch.empty(0, dtype=torch.uint8, device=device)

    def lay(self, buffers: Iterable[Buffer], what: str) -> dict[str, Tensor]:
        """Views of buffers of one kind, zeroed, in the place of all views before. `DataError` if the device has not so much
        memory: `what` says for what it is needed."""
        plan = make_plan(buffers)
        ((kind, size_bytes),) = plan.size_bytes.items()
        if self.storage.numel() < size_bytes:
            self.storage = torch.empty(0, dtype=torch.uint8, device=self.device)  # given back before more is asked for
            check_available(size_bytes, self.device, what, "ask for fewer at once, or load with precision bf16")
            self.storage = torch.zeros(size_bytes, dtype=torch.uint8, device=self.device)
        else:
            self.storage[:size_bytes].zero_()
        return plan.lay_over({kind: self.storage})
