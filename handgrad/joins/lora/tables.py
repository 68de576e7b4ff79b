"""The products with adapters, the adapters' rows, and their working memory.

A block's matrix stacks the outputs of one or more products. Each product has its own A (r, I), drawn at random, and B
(outputs, r), initially zero. A matrix's adapter is two parameter rows: the stacked A's of its products, and their
stacked B's.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from handgrad.errors import UsageError
from handgrad.machine.devices import accumulation_dtype
from handgrad.memory.arena import Buffer
from handgrad.memory.rows import ZEROS, Init, ParameterRow, Table, lay_out
from handgrad.models import architecture
from handgrad.networks import ModelShape
from handgrad.networks.lora import LoraShape
from handgrad.training.state import TrainingState

RANK_MULTIPLE = 8
KIND = "adapters at work"  # the arena's allocation for their activations

DRAWN = Init("normal", 3**-0.5, by_inputs=True)  # the variance of PEFT's uniform distribution up to 1 / sqrt(I)


@dataclass(frozen=True)
class Part:
    """A product with an adapter: a range of its matrix's outputs."""

    name: str
    outputs: slice


@dataclass(frozen=True)
class Adapter:
    """The adapter of one matrix."""

    weight: str  # name of the matrix, like blocks.0.qkv_weight
    parts: tuple[Part, ...]
    outputs: int  # O, of the matrix
    inputs: int  # I
    rank: int  # r
    scale: float  # s

    @property
    def a(self) -> str:
        """The name of the A row."""
        return self.weight.removesuffix("_weight") + "_A"

    @property
    def b(self) -> str:
        """The name of the B row."""
        return self.weight.removesuffix("_weight") + "_B"

    @property
    def ranks(self) -> int:
        """R: the sum of the parts' ranks."""
        return len(self.parts) * self.rank

    def places(self) -> Iterator[tuple[Part, slice, slice]]:
        """(part, its rows of the A's, its rows of the B's)."""
        first = 0
        for number, part in enumerate(self.parts):
            size = part.outputs.stop - part.outputs.start
            yield part, slice(number * self.rank, (number + 1) * self.rank), slice(first, first + size)
            first += size

    def rows(self) -> Iterator[ParameterRow]:
        bucket = self.weight.rpartition(".")[0]
        outputs = sum(part.outputs.stop - part.outputs.start for part in self.parts)
        for name, shape, init in ((self.a, (self.ranks, self.inputs), DRAWN), (self.b, (outputs, self.rank), ZEROS)):
            yield ParameterRow(name, shape, shape[0], init, init.std_of(shape, 1), "matrix", bucket)


@dataclass(frozen=True)
class LoraDesign:
    """The adapters of a run, in the model's matrix order."""

    adapters: tuple[Adapter, ...]

    def table(self, lanes: int) -> Table:
        """The trained rows, with offsets."""
        return lay_out((row for adapter in self.adapters for row in adapter.rows()), lanes)

    def flops_per_token(self, flops: float, frozen: Table, shape: ModelShape) -> float:
        """FLOPs of forward and backward. `flops`: of the model with all weights trained. Subtracts the weight gradients
        of the blocks' matrices and the head; adds the adapters' products, with x A^T computed twice."""
        untrained = sum(row.elements for row in frozen if row.group == "matrix") + shape.vocab_size * shape.channels
        a, b = (sum(math.prod(row.shape) for row in self.table(1) if row.name.endswith(end)) for end in ("_A", "_B"))
        return flops - 2.0 * untrained + 8.0 * a + 6.0 * b


def check(lora: LoraShape, ops: Any) -> None:
    """Raises `UsageError` for a rank that these operations do not support: tensor cores need rows of 16-byte multiples."""
    if ops.BACKEND.name == "cuda" and lora.rank % RANK_MULTIPLE:
        raise UsageError(
            f"the kernels take ranks of lora that are multiples of {RANK_MULTIPLE}, found {lora.rank};"
            " --backend reference takes any"
        )


def adapters_of(shape: ModelShape, lora: LoraShape) -> Iterator[Adapter]:
    """The adapters of a model."""
    chosen, gemms = lora.products(shape), {gemm.weight: gemm for gemm in shape.gemms}
    for row in architecture(shape).parameters(shape):
        gemm = gemms.get(row.name.rpartition(".")[2])
        parts, first = list[Part](), 0
        for product, size in gemm.outputs.items() if gemm else ():
            if product in chosen:
                parts.append(Part(product, slice(first, first + size)))
            first += size
        if parts:
            outputs, inputs = row.shape
            yield Adapter(row.name, tuple(parts), outputs, inputs, lora.rank, lora.scale)


def buffers(design: LoraDesign, frozen: Table, tokens: int, dtype: torch.dtype) -> list[Buffer]:
    """The rows of the adapters' own activations for `tokens` tokens, which all layers reuse. They share no memory with the
    model's activations, because tasks overwrite these while they read the adapters."""
    exact = accumulation_dtype(dtype)
    ranks = max(adapter.ranks for adapter in design.adapters)
    wide = max(adapter.outputs * adapter.ranks for adapter in design.adapters)
    return [
        Buffer("lora.u", (tokens * ranks,), dtype, KIND),
        Buffer("lora.du", (tokens * ranks,), dtype, KIND),
        Buffer("lora.wide", (wide,), dtype, KIND),
        Buffer("lora.dwide", (wide,), exact, KIND),
        Buffer("lora.unread", (2, max(row.elements for row in frozen if len(row.shape) == 1)), exact, KIND),
    ]


# Merged weights.


def merged(weight: Tensor, adapter: Adapter, tensor: Callable[[str], Tensor]) -> Tensor:
    """W (O, I) + s B A in float32, each part in its rows. `tensor`: row name -> A or B."""
    result = weight.to(torch.float32, copy=True)
    a, b = (tensor(name).to(result) for name in (adapter.a, adapter.b))
    for part, ranks, rows in adapter.places():
        result[part.outputs].addmm_(b[rows], a[ranks], alpha=adapter.scale)
    return result


def saved(state: TrainingState) -> dict[str, Tensor]:
    """The weights of a single-rank run, by name, with adapters merged; other frozen ones as the run reads them."""
    trained = {row.name: row.view(state.master) for row in state.design.parameters}
    tensors = {row.name: state.named_weights[row.name][: row.stored_rows] for row in state.design.frozen}
    tensors |= {name: tensors[name].rows.float() * tensors[name].inverse_scale for name in state.design.fp8_only}
    for adapter in state.design.lora.adapters:
        tensors[adapter.weight] = merged(tensors[adapter.weight], adapter, trained.__getitem__)
    return tensors
