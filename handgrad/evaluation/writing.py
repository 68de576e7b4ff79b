"""The decoder of a loaded model's texts, in memory that grows with the longest of them."""

from collections.abc import Iterable
from types import ModuleType

import torch
from torch import Tensor

from handgrad.evaluation.load import LoadedModel, check_available
from handgrad.generation.decode import LEAST_CACHE, decode_buffers, decode_tensors, with_cache
from handgrad.generation.generate import Decoder, SamplingOptions
from handgrad.machine import devices
from handgrad.memory.arena import Buffer, make_plan


class GrowingMemory:
    """One allocation that serves plan after plan, as large as the largest so far."""

    def __init__(self, device: torch.device):
        self.device = device
        self.storage = torch.empty(0, dtype=torch.uint8, device=device)

    def holds(self, buffers: Iterable[Buffer]) -> bool:
        """True if `lay` would find the memory for them now."""
        available = devices.available_bytes(self.device)
        return available is None or make_plan(buffers).total_bytes <= available + self.storage.numel()

    def lay(self, buffers: Iterable[Buffer], purpose: str) -> dict[str, Tensor]:
        """Zeroed views of buffers of one kind, over all earlier views. Raises `DataError`, which names the `purpose`, if
        the device has too little memory."""
        plan = make_plan(buffers)
        ((kind, size_bytes),) = plan.size_bytes.items()
        if self.storage.numel() < size_bytes:
            self.storage = torch.empty(0, dtype=torch.uint8, device=self.device)  # frees it before asking for more
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # else what was freed does not count as free
            check_available(size_bytes, self.device, purpose, "ask for fewer at once, or load with precision bf16")
            self.storage = torch.zeros(size_bytes, dtype=torch.uint8, device=self.device)
        else:
            self.storage[:size_bytes].zero_()
        return plan.lay_over({kind: self.storage})


class Writing:
    """The last decoder of a model's texts, with its recorded graph."""

    def __init__(self, model: LoadedModel, dtype: torch.dtype, ops_of_one: ModuleType):
        """`ops_of_one`: the operations of a text that is written alone."""
        self.model, self.dtype, self.ops_of_one = model, dtype, ops_of_one
        self.memory = GrowingMemory(model.device)
        self.size = (0, 0)  # texts at once, tokens of the cache
        self.last: Decoder | None = None

    def decoder(self, batch: int, longest: int, options: SamplingOptions, ends: frozenset[int]) -> Decoder:
        """A decoder of texts of up to `longest` tokens, `batch` at once: the last one, if it is for such. Raises
        `DataError` without memory for its cache."""
        shape = with_cache(self.model.shape, longest)
        if self.last is None or self.size != (batch, shape.sequence_length):
            self.last = None  # or it would keep its memory
            buffers = decode_tensors(shape, self.memory.lay(self.table(batch, longest), f"writing {batch} text(s) at once"))
        elif (self.last.options, self.last.ends) == (options, ends):
            return self.last
        else:
            buffers = self.last.buf
        ops, weights = self.ops_of_one if batch == 1 else self.model.ops, self.model.weights
        self.last = Decoder(self.model.shape, ops, weights, buffers, options, end_of_text=None, ends=ends)
        self.size = batch, shape.sequence_length
        return self.last

    def table(self, batch: int, longest: int) -> list[Buffer]:
        return decode_buffers(with_cache(self.model.shape, longest), batch, self.dtype, self.model.ops)

    def fitting(self, tokens: int) -> int:
        """`tokens` of one text, or the largest part of them, by halves, whose cache the device has memory for now."""
        while tokens > LEAST_CACHE and not self.memory.holds(self.table(1, tokens)):
            tokens = max(LEAST_CACHE, tokens // 2)
        return tokens
