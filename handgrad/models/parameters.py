"""The parameter table: one row per tensor. Allocation, initialisation, decay, checkpoints and formats derive from it.

All parameters lie in one flat buffer, and so do their gradients, master weights and moments, at the same element
offsets: an optimizer step walks flat memory, and names are views.
"""

import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from handgrad.config import ModelShape
from handgrad.fp8.formats import Form
from handgrad.fp8.tables import Forms

# Every tensor starts at a multiple of this many elements (512 bytes of float32, 256 of bf16).
ALIGN_ELEMENTS = 128
# The unit of the global norm's partial sums.
BLOCK_ELEMENTS = 1 << 16


@dataclass
class BlockTensors:
    """One tensor per parameter of a block: the weights themselves, their gradients or their moments. Matrices that
    products read in fp8 have those forms, too.

    Matrices come first, then vectors, so that what decays is contiguous.
    """

    qkv_weight: Form  # (3C, C)
    proj_weight: Form  # (C, C)
    fc_weight: Form  # (F, C)
    fcproj_weight: Form  # (C, F)
    ln1_weight: Tensor  # (C)
    ln1_bias: Tensor  # (C)
    qkv_bias: Tensor  # (3C)
    proj_bias: Tensor  # (C)
    ln2_weight: Tensor  # (C)
    ln2_bias: Tensor  # (C)
    fc_bias: Tensor  # (F)
    fcproj_bias: Tensor  # (C)


@dataclass
class ModelTensors:
    """One tensor per parameter of the model."""

    wte: Tensor  # (Vp, C) token embedding
    head: Form  # (Vp, C) the same, as the loss head reads it
    wpe: Tensor  # (maxT, C) position embedding
    blocks: list[BlockTensors]
    lnf_weight: Tensor  # (C)
    lnf_bias: Tensor  # (C)


@dataclass(frozen=True)
class ParameterRow:
    """A parameter: `shape` as allocated, `stored_rows` as saved (the embedding without its padding)."""

    name: str
    shape: tuple[int, ...]
    stored_rows: int
    init: str  # "normal", "zeros" or "ones"
    std: float
    decays: bool
    offset: int  # elements from the start of a flat buffer
    frozen: bool = False  # not trained: see `freezing`

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return (self.stored_rows, *self.shape[1:])

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.offset + self.elements].view(self.shape)

    def stored(self, flat: Tensor) -> Tensor:
        """The part that is saved and exchanged: no padding rows."""
        return self.view(flat)[: self.stored_rows]


def block_name(layer: int, name: str) -> str:
    return f"blocks.{layer}.{name}"


def bucket_name(name: str) -> str:
    """The bucket of a parameter: what is complete at the same moment of a backward pass."""
    return "embedding" if name in ("wte", "wpe") else "lnf" if name.startswith("lnf") else name.rpartition(".")[0]


def parameter_table(shape: ModelShape, lanes: int = 1) -> tuple[ParameterRow, ...]:
    """All parameters in memory order. Initialisation as GPT-2's: N(0, 0.02), the projections into the residual stream
    scaled by 1/sqrt(2L), biases 0, layer norms 1. Matrices and embeddings decay, vectors do not.

    With several `lanes` every bucket can be cut into as many aligned parts of equal length (see `buckets`)."""
    C, F, Vp = shape.channels, shape.feed_forward, shape.padded_vocab_size
    std, residual_std = 0.02, 0.02 / math.sqrt(2 * shape.num_layers)
    block: dict[str, tuple[tuple[int, ...], float | str]] = {
        "qkv_weight": ((3 * C, C), std),
        "proj_weight": ((C, C), residual_std),
        "fc_weight": ((F, C), std),
        "fcproj_weight": ((C, F), residual_std),
        "ln1_weight": ((C,), "ones"),
        "ln1_bias": ((C,), "zeros"),
        "qkv_bias": ((3 * C,), "zeros"),
        "proj_bias": ((C,), "zeros"),
        "ln2_weight": ((C,), "ones"),
        "ln2_bias": ((C,), "zeros"),
        "fc_bias": ((F,), "zeros"),
        "fcproj_bias": ((C,), "zeros"),
    }
    assert list(block) == [f.name for f in fields(BlockTensors)]
    entries: dict[str, tuple[tuple[int, ...], float | str]] = {
        "wte": ((Vp, C), std),
        "wpe": ((shape.sequence_length, C), std),
    }
    for layer in range(shape.num_layers):
        entries |= {block_name(layer, name): entry for name, entry in block.items()}
    entries |= {"lnf_weight": ((C,), "ones"), "lnf_bias": ((C,), "zeros")}

    rows, offset = [], 0
    for name, (dims, init) in entries.items():
        stored_rows = shape.vocab_size if name == "wte" else dims[0]
        normal = isinstance(init, float)
        kind, deviation = ("normal", init) if normal else (init, 0.0)
        if rows and lanes > 1 and bucket_name(name) != bucket_name(rows[-1].name):
            offset = rounded_up(offset, ALIGN_ELEMENTS * lanes)
        rows.append(ParameterRow(name, dims, stored_rows, str(kind), float(deviation), len(dims) == 2, offset))
        offset += rounded_up(math.prod(dims), ALIGN_ELEMENTS)
    return tuple(rows)


def rounded_up(elements: int, multiple: int) -> int:
    return -(-elements // multiple) * multiple


def flat_elements(table: tuple[ParameterRow, ...], lanes: int = 1) -> int:
    """Length of a flat buffer: the table's end, rounded up to whole blocks, or to a part for every lane."""
    end = table[-1].offset + table[-1].elements
    return rounded_up(end, BLOCK_ELEMENTS if lanes == 1 else ALIGN_ELEMENTS * lanes)


def count_parameters(table: Iterable[ParameterRow]) -> int:
    """Without the padding."""
    return sum(math.prod(row.stored_shape) for row in table)


def flops_per_token(shape: ModelShape) -> float:
    """Forward and backward, as llm.c counts: 6 per parameter, and 6 L C T for attention's two causal products."""
    parameters = count_parameters(parameter_table(shape))
    return 6.0 * parameters + 6.0 * shape.num_layers * shape.channels * shape.sequence_length


def model_tensors(flat: Tensor, table: tuple[ParameterRow, ...], forms: Forms | None = None) -> ModelTensors:
    """Views of a flat buffer under the parameters' names; `forms` knows what is quantised."""
    forms = forms or Forms((), {})
    views = {row.name: row.view(flat) for row in table}
    head = forms("wte", plain=views["wte"])
    layers = sum(name.endswith(".qkv_weight") for name in views)
    names = [f.name for f in fields(BlockTensors)]
    quantized: dict[str, Any] = {name: forms(name, plain=view) for name, view in views.items()}
    blocks = [BlockTensors(**{n: quantized[block_name(layer, n)] for n in names}) for layer in range(layers)]
    return ModelTensors(views["wte"], head, views["wpe"], blocks, views["lnf_weight"], views["lnf_bias"])


def initialize(table: tuple[ParameterRow, ...], seed: int, put: Callable[[ParameterRow, Tensor], None]) -> None:
    """Gives GPT-2's initial weights to `put`, the stored part of each parameter in float32 on the CPU, from several
    threads; those that are zero are left out.

    Each tensor has a generator of its own, keyed by (seed, its place in the table), so that every device, precision and
    number of ranks starts from the same numbers.
    """

    def draw(index: int) -> None:
        row = table[index]
        values = torch.ones(row.stored_shape)
        if row.init == "normal":
            values.normal_(0.0, row.std, generator=torch.Generator().manual_seed(seed * 1_000_003 + index))
        put(row, values)

    # A thread per processor: the draws of a tensor are one sequence, those of different tensors are not.
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        list(threads.map(draw, [index for index, row in enumerate(table) if row.init != "zeros"]))
