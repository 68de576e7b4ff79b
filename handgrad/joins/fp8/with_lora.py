"""Frozen weights in fp8 with adapters: their forward and input-gradient GEMMs run in fp8.

The run quantises each frozen weight once, at a current scale (a delayed one would be equal, because the values never
change), and keeps only its fp8 `rows`, one byte per number. It follows that:

- An input gradient reads columns. Before its GEMM, a transpose writes them to memory that all weights share.
- Sampling reads 16 bits; dequantising writes them to the same memory.
- Frozen weights have no gradient, so activations and gradients need no columns.
- Adapters read activations and gradients in 16 bits. So operations write 16 bits, and each GEMM quantises its operand.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.joins.fp8.formats import COUNTING, E4M3, Form, Quantized, on_plain, plain
from handgrad.joins.fp8.scaling import Fp8Design, Scaling
from handgrad.joins.fp8.tables import WEIGHT, Forms, without_columns
from handgrad.joins.lora.bind import WithAdapters
from handgrad.joins.lora.tables import KIND as ADAPTER_KIND
from handgrad.memory.arena import Buffer
from handgrad.memory.rows import KIND, Table, lay_out
from handgrad.ops.compose import Overlay

OPERAND = "fp8.operand"
DEQUANT_SCRATCH = "fp8.dequant_scratch"  # for one frozen weight: its columns, or its 16-bit form


def with_16_bits(forms: Forms) -> Forms:
    """Adds a 16-bit form to each activation and gradient."""
    return {name: replace(tag, keeps_16bit=True, workspace="") for name, tag in forms.items()}


def with_shared_operand(buffers: Iterable[Buffer]) -> list[Buffer]:
    """Removes columns from the buffers of an fp8 run, and makes all activations and gradients share one buffer for rows:
    each GEMM quantises its operand just before reading it."""
    shared, others = list[Buffer](), list[Buffer]()
    for buffer in without_columns(buffers):
        (shared if buffer.kind == KIND and buffer.name.endswith(".rows") else others).append(buffer)
    ticks = sorted({tick for buffer in shared for interval in buffer.lifetimes for tick in interval})
    elements = max(math.prod(buffer.shape) for buffer in shared)
    return [*others, Buffer(OPERAND, (elements,), E4M3, KIND, tuple((tick, tick) for tick in ticks))]


def shared_operand_views(fp8: Fp8Design, views: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views of the shared buffer as the rows of each activation and gradient, by name."""
    operands = {}
    for row in fp8.table:
        if row.kind != WEIGHT:
            wide = views[row.plain]
            operands[f"{row.stored_as}.rows"] = views[OPERAND][: wide.numel()].view(row.format).view(wide.shape)
    return operands


def fp8_only(fp8: Fp8Design) -> frozenset[str]:
    """The names of weights that exist only in fp8."""
    return frozenset(row.name for row in fp8.table if row.kind == WEIGHT)


def split_by_precision(frozen: Table, fp8_only: frozenset[str]) -> tuple[Table, Table]:
    """(all frozen rows in their order, the rows in the 16-bit flat buffer)."""
    stored = {row.name: row for row in lay_out(row for row in frozen if row.name not in fp8_only)}
    return tuple(stored.get(row.name, row) for row in frozen), tuple(stored.values())


def dequant_scratch(frozen: Table, fp8_only: frozenset[str], dtype: torch.dtype) -> Buffer:
    return Buffer(DEQUANT_SCRATCH, (max(row.elements for row in frozen if row.name in fp8_only),), dtype, ADAPTER_KIND)


def quantize_frozen(scaling: Scaling, views: Mapping[str, Tensor], name: str, values: Tensor) -> None:
    """Quantises a frozen weight (O, I), once for the run, and counts its clipped and vanished numbers."""
    weight = scaling.tensors[name]
    wide = scratch_view(views[DEQUANT_SCRATCH], weight)
    wide.copy_(values)
    weight.scaling[COUNTING] = 1.0
    scaling.ops.quantize(replace(weight, current=True), wide)


def scratch_view(memory: Tensor, weight: Quantized) -> Tensor:
    """The scratch memory, viewed as a 16-bit weight (O, I)."""
    return memory[: weight.shape.numel()].view(weight.shape)


class WithFp8FrozenProducts(Overlay):
    """The plain operations `ops`, which read 16-bit forms, with fp8 GEMMs for quantised weights."""

    def __init__(self, ops: ModuleType, fp8: Any, memory: Tensor):
        """`fp8`: operations on quantised tensors; `memory`: the view of `dequant_scratch`."""
        super().__init__(ops)
        self.fp8, self.memory = fp8, memory

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.ops, name)
        return on_plain(attribute) if callable(attribute) else attribute

    def linear_forward(self, out: Tensor, inp: Form, weight: Form, bias: Tensor | None, *, scratch: Tensor) -> None:
        if isinstance(weight, Tensor):
            self.ops.linear_forward(out, plain(inp), weight, bias, scratch=scratch)
        else:
            self.fp8.linear_forward(out, self.quantize_operand(inp), weight, bias, scratch=scratch)

    def linear_residual_forward(
        self, out: Tensor, residual: Tensor, inp: Form, weight: Form, bias: Tensor | None, *, scratch: Tensor
    ) -> None:
        if isinstance(weight, Tensor):
            self.ops.linear_residual_forward(out, residual, plain(inp), weight, bias, scratch=scratch)
        else:
            self.fp8.linear_residual_forward(out, residual, self.quantize_operand(inp), weight, bias, scratch=scratch)

    def linear_backward(
        self,
        dinp: Form,
        dweight_acc: Tensor | None,
        dbias_acc: Tensor | None,
        dout: Form,
        inp: Form,
        weight: Form,
        *,
        scratch: Tensor,
    ) -> None:
        if isinstance(weight, Tensor):
            gradients = plain(dinp), dweight_acc, dbias_acc
            self.ops.linear_backward(*gradients, plain(dout), plain(inp), weight, scratch=scratch)
            return
        columns = self.memory.view(E4M3)[: weight.shape.numel()].view(weight.shape[::-1])
        self.fp8.transpose(columns, weight.rows)
        frozen = replace(weight, columns=columns)
        self.fp8.linear_backward(plain(dinp), None, None, self.quantize_operand(dout), inp, frozen, scratch=scratch)

    def quantize_operand(self, tensor: Form) -> Quantized:
        """Writes the fp8 rows of an activation or a gradient from its 16-bit form; returns the tensor."""
        assert isinstance(tensor, Quantized)
        self.fp8.quantize(tensor, plain(tensor))
        return tensor


class WithFp8Adapters(WithAdapters):
    """`WithAdapters` for operations on tensors that may be quantised."""

    def add_forward(self, out: Form, inp: Form, weight: Any, scratch: Tensor) -> None:
        super().add_forward(plain(out), plain(inp), weight, scratch)

    def add_backward(self, dinp: Form, dout: Form, inp: Form, weight: Any, scratch: Tensor) -> None:
        super().add_backward(plain(dinp), plain(dout), plain(inp), weight, scratch)

    def composed_or_fused(self, name: str, *tensors: Form | None, **options: Any) -> None:
        """Always runs the composed form: no fused operation has an fp8 GEMM."""
        self.composed[name](*tensors, **options)


class WithDequantizedWeights(Overlay):
    """The plain operations `ops` for sampling and tasks. Dequantises a frozen fp8 weight before each use."""

    def __init__(self, ops: ModuleType, memory: Tensor):
        """`memory`: the view of `dequant_scratch`."""
        super().__init__(ops)
        self.memory = memory

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.ops, name)
        if name == "decode":
            return WithDequantizedWeights(attribute, self.memory)
        return on_plain(attribute, self.in_16_bits) if callable(attribute) else attribute

    def in_16_bits(self, weight: Form) -> Tensor:
        """Dequantises exactly, because the scale is a power of two."""
        assert isinstance(weight, Quantized) and weight.rows is not None
        return scratch_view(self.memory, weight).copy_(weight.rows).mul_(weight.inverse_scale)
