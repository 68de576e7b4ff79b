"""The tensors of a Llama as rows: parameters, activations, gradients of activations (models/llama.py has the equations). A
member of the family may be without some of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from handgrad.config import ModelShape
from handgrad.models.activations import ActivationRow, PassTensors, activation, rows_of_pass
from handgrad.models.lifetimes import NEVER, Clock, at_head, backward_of, from_embedding, in_backward, kept
from handgrad.models.rows import (
    ONES,
    ZEROS,
    Init,
    ParameterRow,
    parameter,
    parameter_rows,
    repeated,
    shared,
)

ATTENTION, FEED_FORWARD, NEXT_BLOCK = range(3)  # the stages of a block, and the one that follows

NORMAL = Init("normal", 0.02)
RESIDUAL = Init("normal", 0.02, residual=True)


def dims(shape: ModelShape) -> dict[str, int]:
    """The sizes of the letters in the parameters' shapes; HD and such are the columns of so many heads."""
    C, F, H, K, D = shape.channels, shape.feed_forward, shape.num_heads, shape.kv_heads, shape.head_width
    sizes = {"C": C, "F": F, "2F": 2 * F, "H": H, "K": K, "D": D, "HD": H * D, "QKV": (H + 2 * K) * D, "H+K": H + K}
    sizes |= {"V": shape.vocab_size, "Vp": shape.padded_vocab_size, "L": shape.num_layers}
    return sizes | {"maxT": shape.sequence_length}


def has(shape: ModelShape, name: str) -> bool:
    """True if the model has the tensor of this name."""
    family, last = shape.family, name.rpartition(".")[2]
    if last in ("q_gain", "k_gain", "heads", "heads_rstd"):
        return family.qk_norm
    if last == "qkv_bias":
        return family.qkv_bias
    return last != "head" or not family.tied


# Parameters. Matrices come first, then vectors: the optimizer decays the former, in one range.


@dataclass
class BlockWeights:
    qkv_weight: Tensor = parameter("QKV C", NORMAL, "matrix")
    proj_weight: Tensor = parameter("C HD", RESIDUAL, "matrix")
    # The rows of the gates g, then of the numbers u.
    gate_up_weight: Tensor = parameter("2F C", NORMAL, "matrix")
    down_weight: Tensor = parameter("C F", RESIDUAL, "matrix")
    qkv_bias: Tensor = parameter("QKV", ZEROS, "vector", optional=True)
    norm1_gain: Tensor = parameter("C", ONES, "vector")
    norm2_gain: Tensor = parameter("C", ONES, "vector")
    q_gain: Tensor = parameter("D", ONES, "vector", optional=True)
    k_gain: Tensor = parameter("D", ONES, "vector", optional=True)


@dataclass
class Weights:
    """The weights, or their gradients."""

    wte: Tensor = parameter("Vp C", NORMAL, "embedding", bucket="embedding", stored_rows="V")
    blocks: list[BlockWeights] = repeated(BlockWeights)
    head: Tensor = parameter("Vp C", NORMAL, "embedding", bucket="head", stored_rows="V", fallback="wte")
    lnf_gain: Tensor = parameter("C", ONES, "vector", bucket="head")


def parameters(shape: ModelShape) -> Iterator[ParameterRow]:
    for row in parameter_rows(Weights, dims(shape), shape.num_layers, shape.forms):
        if has(shape, row.name):
            yield row


# Activations. The backward's inputs are kept or, from a recompute level on, made again by the same operation: same bits.


@dataclass
class BlockActivations:
    norm1: Tensor = activation("N C", lives=kept(ATTENTION), recomputed_from=2)
    norm1_rstd: Tensor = activation("N", "statistics", lives=kept(ATTENTION))
    heads: Tensor = activation("N QKV", lives=kept(ATTENTION), optional=True)  # before the norm of queries and keys
    heads_rstd: Tensor = activation("N H+K", "statistics", lives=kept(ATTENTION), optional=True)
    qkv: Tensor = activation(
        "N QKV", lives=kept(ATTENTION), recomputed_from=2
    )  # queries and keys rotated; see `activations`
    atty: Tensor = activation("N HD", lives=kept(ATTENTION))  # attention's output
    lse: Tensor = activation("B H T", "statistics", lives=kept(ATTENTION))  # log of the softmax's denominators
    residual_mid: Tensor = activation("N C", lives=kept(ATTENTION, until=FEED_FORWARD))  # the stream between the halves
    norm2: Tensor = activation("N C", lives=kept(FEED_FORWARD), recomputed_from=2)
    norm2_rstd: Tensor = activation("N", "statistics", lives=kept(FEED_FORWARD))
    hidden: Tensor = activation("N 2F", lives=kept(FEED_FORWARD), recomputed_from=1)  # gates g, then the numbers u
    swiglu: Tensor = activation("N F", lives=kept(FEED_FORWARD), recomputed_from=1)
    residual_out: Tensor = activation("N C", lives=kept(FEED_FORWARD, until=NEXT_BLOCK))


@dataclass
class Activations(PassTensors):
    embedded: Tensor = activation("N C", lives=from_embedding(ATTENTION))
    blocks: list[BlockActivations] = repeated(BlockActivations)
    lnf: Tensor = activation("N C", lives=at_head)
    lnf_rstd: Tensor = activation("N", "statistics", lives=at_head)
    logits: Tensor = activation("chunk Vp", lives=at_head)


@dataclass
class BlockGradients:
    """The gradients that the blocks make one after another in the same memory; in fp8 each block's have a scale."""

    dqkv: Tensor = shared()
    dresidual_mid: Tensor = shared(of="dresidual")
    dhidden: Tensor = shared()
    dswiglu: Tensor = shared()
    dresidual_out: Tensor = shared(of="dresidual")


@dataclass
class Gradients:
    """Gradients of activations. The residual stream's is changed in place: the stream's identity path leaves it as it
    is, and each norm adds its own path."""

    dlnf: Tensor = activation("N C", lives=at_head)
    dresidual: Tensor = activation("N C", lives=in_backward)
    dnorm: Tensor = activation("N C", lives=backward_of(ATTENTION, FEED_FORWARD))  # of a norm's output
    datty: Tensor = activation("N HD", lives=backward_of(ATTENTION))
    dqkv: Tensor = activation("N QKV", lives=backward_of(ATTENTION))
    dhidden: Tensor = activation("N 2F", lives=backward_of(FEED_FORWARD))
    dswiglu: Tensor = activation("N F", lives=backward_of(FEED_FORWARD))
    # The stream's gradient is written a tick before the GEMM that reads it.
    dresidual_mid: Tensor = activation("N C", lives=backward_of(FEED_FORWARD, last=1), of="dresidual")
    dresidual_out: Tensor = activation("N C", lives=backward_of(FEED_FORWARD, first=1), of="dresidual")
    attention_scratch: Tensor = activation("attention_scratch", torch.uint8, lives=backward_of(ATTENTION))
    blocks: list[BlockGradients] = repeated(BlockGradients)


def activations(
    shape: ModelShape, batch: int, length: int, dtype: torch.dtype, ops: ModuleType, *, chunk: int, training: bool
) -> Iterator[ActivationRow]:
    """The rows of a pass, as in `rows_of_pass`. Without a norm of queries and keys, qkv is the output of their product,
    rotated in place, and is kept."""
    sizes, clock = dims(shape), Clock(shape.num_layers, stages=2, training=training)
    tables, widest = (Activations, Gradients), max(sizes["2F"], sizes["QKV"])
    for row in rows_of_pass(tables, sizes, batch, length, dtype, ops, clock, chunk=chunk, widest=widest, forms=shape.forms):
        if has(shape, row.name):
            is_kept = row.name.endswith(".qkv") and not shape.family.qk_norm
            yield replace(row, recomputed_from=NEVER) if is_kept else row
