"""Architectures, a file each: rows, forward, backward, generation.

passes       a pass as a list of stages, attention with its output projection, the loss head
gpt2         GPT-2
modern       the network of docs/modern.md
llama        Llama, Qwen2, Qwen3 and their relatives
gemma3       Gemma 3
olmo         OLMo 2 and OLMo 3
vqvae        an autoencoder of pictures with discrete codes
decoding     the buffers of generation
overlay      operations with some of them replaced

An architecture computes with the operations and tensors that its caller passes. It knows nothing of memory planning,
optimizers or ranks. A new one takes a file here and one in `handgrad.networks`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.memory.activations import ActivationRow
from handgrad.memory.arena import Buffer
from handgrad.memory.rows import KIND, ParameterRow, Table, lay_out, named
from handgrad.models.passes import head_losses, run
from handgrad.networks import ModelShape

# Of logits, and of tokens up to 1/4 of the micro-batch: each chunk reads and writes the head's whole weight gradient.
HEAD_CHUNK_BYTES, HEAD_CHUNK_TOKENS = 512 << 20, 4096


def architecture(shape: ModelShape) -> ModuleType:
    """The module that computes models of this shape."""
    return import_module(f"handgrad.models.{shape.architecture}")


def parameter_table(shape: ModelShape, lanes: int = 1, whole: Callable[[ParameterRow], bool] = lambda row: False) -> Table:
    """The parameters with their offsets in the flat buffers; `whole(row)`: the optimizer updates the row in one call."""
    return lay_out(architecture(shape).parameters(shape), lanes, whole)


def named_weights(shape: ModelShape, flat: Tensor, table: Table) -> Any:
    """The architecture's `Weights` over a flat buffer."""
    return named(architecture(shape).Weights, {row.name: row.view(flat) for row in table}, shape.num_layers)


def forward_buffers(
    shape: ModelShape, batch: int, length: int, dtype: torch.dtype, ops: ModuleType, *, chunk: int = 0, packed: bool = False
) -> list[Buffer]:
    """The activations of a forward pass over `batch` samples of `length` tokens; `chunk`: as in `head_chunk_tokens`.
    `packed`: a sample holds several documents, which do not see each other."""
    documents = document_buffers(architecture(shape), batch, length) if packed else []
    return [*(row.buffer(recompute=0) for row in forward_rows(shape, batch, length, dtype, ops, chunk=chunk)), *documents]


def document_buffers(model: ModuleType, batch: int, length: int) -> list[Buffer]:
    """The document inputs (see `joins.documents`) that the architecture has."""
    sizes = (batch, length)
    rows = {
        "document_starts": (sizes, torch.int32),
        "positions": (sizes, torch.int64),
        "sorted_by_position": ((batch * length,), torch.int32),
    }
    known = {field.name for field in fields(model.Activations)}
    return [Buffer(name, shape, dtype, KIND) for name, (shape, dtype) in rows.items() if name in known]


def forward_rows(
    shape: ModelShape, batch: int, length: int, dtype: torch.dtype, ops: ModuleType, *, chunk: int
) -> Iterator[ActivationRow]:
    """The rows of a forward pass, for `forward_buffers`."""
    chunk = head_chunk_tokens(chunk, batch * length, shape.padded_vocab_size, dtype)
    return architecture(shape).activations(shape, batch, length, dtype, ops, chunk=chunk, training=False)


def compute_losses(ops: Any, weights: Any, act: Any, shape: ModelShape) -> None:
    """act.tokens, act.targets (B, T) -> act.losses (N): cross-entropies in nats, or of pictures squared errors."""
    model = architecture(shape)
    run(model.forward(ops, weights, act, shape))
    losses = model.squared_errors if shape.network.pictures else head_losses
    losses(ops, weights, act, shape)


def named_activations(shape: ModelShape, views: Mapping[str, Any]) -> Any:
    """The architecture's `Activations` over views of `forward_buffers`."""
    return named(architecture(shape).Activations, views, shape.num_layers)


def head_chunk_tokens(requested: int, tokens: int, padded_vocab_size: int, dtype: torch.dtype) -> int:
    """Tokens per chunk of the loss head: `requested`, or a power of two, at least 128."""
    if requested:
        return min(requested, tokens)
    fitting = max(HEAD_CHUNK_BYTES // (padded_vocab_size * dtype.itemsize), min(tokens // 4, HEAD_CHUNK_TOKENS))
    return min(tokens, max(128, 1 << (fitting.bit_length() - 1)))
