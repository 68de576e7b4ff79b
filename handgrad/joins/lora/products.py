"""The GEMMs of an adapter, added to its matrix's.

The parts of one matrix share a GEMM with their A's, one above the other, and one with B' = s B, in which each
part's B stands in the rows of its outputs and the columns of its A, zeros elsewhere (docs/lora.md):

    u = x A^T (N, R),  y += u B'^T.   Backward: du = dy B',  dB' = dy^T u,  dB += s dB' in its blocks,
                                                dx += du A,  dA += du^T x
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.joins.lora import reference
from handgrad.joins.lora.tables import Adapter


@dataclass(frozen=True)
class AdapterTensors:
    """An adapter's tensors: A (R, I), B (outputs of its parts, r) and their gradients."""

    adapter: Adapter
    a: Tensor
    b: Tensor
    da_acc: Tensor
    db_acc: Tensor


def add_linear_operations(ops: ModuleType) -> tuple[Callable[..., None], Callable[..., None]]:
    """`add_linear_forward` and `add_linear_backward` beside the plain operations `ops`."""
    if not ops.__name__.startswith("handgrad.ops.cuda"):
        return reference.add_linear_forward, reference.add_linear_backward
    from handgrad.joins.lora import cuda  # imports the library of a GPU

    tf32 = ops.__name__.endswith("tf32")
    return partial(cuda.add_linear_forward, tf32=tf32), partial(cuda.add_linear_backward, tf32=tf32)


class AdapterProducts:
    """The adapters of a model by the weights that they adapt: by the very object that the model passes."""

    def __init__(self, ops: ModuleType, tensors: Mapping[Any, AdapterTensors], memory: Mapping[str, Tensor]):
        """`ops`: the plain operations; `memory`: views of `adapter_buffers`, for u, du, B' and dB'."""
        self.ops, self.tensors, self.memory = ops, tensors, memory
        self.add_linear_forward, self.add_linear_backward = add_linear_operations(ops)

    def forward(self, out: Tensor, inp: Tensor, weight: Tensor, scratch: Tensor) -> None:
        """out (N, O) += u B'^T, as many tokens at a time as there is memory for: generation may have more."""
        if weight not in self.tensors:
            return
        own = self.tensors[weight]
        scaled_b, ranks = self.scaled_b(own), own.adapter.ranks
        most = self.memory["lora.u"].numel() // ranks
        for first in range(0, inp.shape[0], most):
            rows = slice(first, first + most)
            u = self.view("lora.u", len(inp[rows]), ranks)
            self.ops.linear_forward(u, inp[rows], own.a, None, scratch=scratch)
            self.add_linear_forward(out[rows], u, scaled_b, scratch=scratch)

    def backward(self, dinp: Tensor, dout: Tensor, inp: Tensor, weight: Tensor, scratch: Tensor) -> None:
        """dinp (N, I) += du A, and the gradients of A and B. u is made again: that takes less than its memory for every
        layer."""
        if weight not in self.tensors:
            return
        own, N = self.tensors[weight], inp.shape[0]
        adapter = own.adapter
        scaled_b, dscaled_b = self.scaled_b(own), self.view("lora.dwide", adapter.outputs, adapter.ranks)
        u, du = (self.view(name, N, adapter.ranks) for name in ("lora.u", "lora.du"))
        self.ops.linear_forward(u, inp, own.a, None, scratch=scratch)
        dscaled_b.zero_()
        self.ops.linear_backward(du, dscaled_b, None, dout, u, scaled_b, scratch=scratch)
        for part, columns, rows in adapter.places():
            own.db_acc[rows].add_(dscaled_b[part.outputs, columns], alpha=adapter.scale)
        self.add_linear_backward(dinp, own.da_acc, du, inp, own.a, scratch=scratch)

    def scaled_b(self, own: AdapterTensors) -> Tensor:
        """B' (O, R)"""
        adapter = own.adapter
        scaled_b = self.view("lora.wide", adapter.outputs, adapter.ranks)
        if adapter.parts[0].outputs != slice(0, adapter.outputs):  # else every number is written below
            scaled_b.zero_()
        for part, columns, rows in adapter.places():
            torch.mul(own.b[rows], adapter.scale, out=scaled_b[part.outputs, columns])
        return scaled_b

    def view(self, name: str, rows: int, columns: int) -> Tensor:
        """The beginning of a buffer as (rows, columns)."""
        return self.memory[name][: rows * columns].view(rows, columns)
