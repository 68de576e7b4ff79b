"""The modern network's tensors as rows: parameters, activations, gradients of activations (models/modern.py has the
equations). A model may be without some of `config.TECHNIQUES`: their tensors then do not exist.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from handgrad.config import ModelShape
from handgrad.models.activations import ActivationRow, PassTensors, activation, rows_of_pass
from handgrad.models.lifetimes import Clock, at_head, backward_of, from_embedding, in_backward, kept
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

# The norm that follows makes the embedding's scale a matter of its learning rate alone; 0.5 is half the scale of an
# orthogonal matrix's numbers.
EMBEDDING, MATRIX = Init("normal", 0.02), Init("normal", 0.5, by_inputs=True)
RESIDUAL = Init("normal", 0.5, by_inputs=True, residual=True)  # instead of zeros
INPUT_SHARE = Init("constant", value=0.1)  # of the first stream in every block's

# Learning rates over the step's, at which the head learns: docs/modern.md has their sources.
INPUT_SCALAR_RATE, VALUE_TABLE_RATE = 100.0, 75.0
GATE_CHANNELS = 32  # of the stream: the gates of the value embeddings read these

# The tensors that a model has with one of these techniques alone.
OF_TECHNIQUE: dict[str, tuple[str, ...]] = {"head": ("untied_head",), "qk_rstd": ("qk_norm",)}
OF_TECHNIQUE |= dict.fromkeys(("normed_embedding", "embedding_rstd", "dembedded"), ("embedding_norm",))
OF_TECHNIQUE |= {"residual_scalar": ("residual_scalars",), "mixed": ("residual_scalars", "input_scalars")}
OF_TECHNIQUE |= dict.fromkeys(("input_scalar", "first", "dfirst"), ("input_scalars",))
VALUE_TENSORS = ("value_embedding", "value_gate", "gate")  # in every second layer
OF_TECHNIQUE |= dict.fromkeys(VALUE_TENSORS, ("value_embeddings",))


def dims(shape: ModelShape) -> dict[str, int]:
    """The sizes of the letters in the parameters' shapes."""
    C, F, H = shape.channels, shape.feed_forward, shape.num_heads
    sizes = {"C": C, "3C": 3 * C, "F": F, "H": H, "K": H, "2H": 2 * H, "D": C // H, "maxT": shape.sequence_length}
    sizes |= {"1": 1, "G": min(GATE_CHANNELS, C)}
    return sizes | {"V": shape.vocab_size, "Vp": shape.padded_vocab_size, "L": shape.num_layers}


def has(shape: ModelShape, name: str) -> bool:
    """True if the model has a tensor of this name."""
    techniques = OF_TECHNIQUE.get(name.rpartition(".")[2], ())
    return not techniques or any(map(shape.has, techniques))


def in_its_layer(shape: ModelShape, name: str) -> bool:
    """True if the layer of a block's tensor has it: value embeddings are in every second one, the last among them."""
    _, _, rest = name.partition("blocks.")
    layer, _, tensor = rest.partition(".")
    return tensor not in VALUE_TENSORS or (shape.num_layers - int(layer)) % 2 == 1


# Parameters.


@dataclass
class BlockWeights:
    value_embedding: Tensor = parameter("Vp C", MATRIX, "embedding", stored_rows="V", optional=True, rate=VALUE_TABLE_RATE)
    value_gate: Tensor = parameter("H G", ZEROS, "vector", optional=True)
    qkv_weight: Tensor = parameter("3C C", MATRIX, "matrix")
    proj_weight: Tensor = parameter("C C", ZEROS, "matrix")
    fc_weight: Tensor = parameter("F C", MATRIX, "matrix")
    fcproj_weight: Tensor = parameter("C F", ZEROS, "matrix")
    residual_scalar: Tensor = parameter("1", ONES, "vector", optional=True)
    input_scalar: Tensor = parameter("1", INPUT_SHARE, "vector", optional=True, rate=INPUT_SCALAR_RATE)


@dataclass
class Weights:
    """The weights, or their gradients."""

    wte: Tensor = parameter("Vp C", EMBEDDING, "embedding", bucket="embedding", stored_rows="V")
    blocks: list[BlockWeights] = repeated(BlockWeights)
    head: Tensor = parameter("Vp C", ZEROS, "embedding", bucket="head", stored_rows="V", fallback="wte")


def parameters(shape: ModelShape) -> Iterator[ParameterRow]:
    for row in parameter_rows(Weights, dims(shape), shape.num_layers, shape.forms):
        if has(shape, row.name) and in_its_layer(shape, row.name):
            if row.name.endswith(VALUE_TENSORS):
                # Buckets of their own: the blocks' stay equal, and a table arrives when its layer comes.
                row = replace(row, bucket=f"values.{row.name.split('.')[1]}")
            elif row.init == ZEROS and not shape.has("zero_init"):
                init = EMBEDDING if row.name == "head" else RESIDUAL
                row = replace(row, init=init, std=init.std_of(row.shape, shape.num_layers))
            yield row


# Activations. The backward's inputs are kept or, from a recompute level on, made again by the same operation: same bits.


@dataclass
class BlockActivations:
    # The stream as the scalars change it: attention's product adds to it, the backward makes it again.
    mixed: Tensor = activation("N C", lives=lambda clock: ((clock.tick(ATTENTION), clock.tick(ATTENTION)),), optional=True)
    norm1: Tensor = activation("N C", lives=kept(ATTENTION), recomputed_from=2)
    norm1_rstd: Tensor = activation("N", "statistics", lives=kept(ATTENTION))
    qkv: Tensor = activation("N 3C", lives=kept(ATTENTION))  # queries and keys normalised and rotated
    qk_rstd: Tensor = activation("N 2H", "statistics", lives=kept(ATTENTION), optional=True)
    gate: Tensor = activation("N H", "statistics", lives=kept(ATTENTION), optional=True)  # of the value embeddings
    atty: Tensor = activation("N C", lives=kept(ATTENTION))  # attention's output
    lse: Tensor = activation("B H T", "statistics", lives=kept(ATTENTION))  # log of the softmax's denominators
    residual_mid: Tensor = activation("N C", lives=kept(ATTENTION, until=FEED_FORWARD))  # the stream between the halves
    norm2: Tensor = activation("N C", lives=kept(FEED_FORWARD), recomputed_from=2)
    norm2_rstd: Tensor = activation("N", "statistics", lives=kept(FEED_FORWARD))
    hidden: Tensor = activation("N F", lives=kept(FEED_FORWARD), recomputed_from=1)  # after the squared ReLU
    residual_out: Tensor = activation("N C", lives=kept(FEED_FORWARD, until=NEXT_BLOCK))


@dataclass
class Activations(PassTensors):
    # The first block's input if there is no norm after it.
    embedded: Tensor = activation("N C", lives=lambda clock: ((0, max(clock.tick(ATTENTION), clock.mirrored(0))),))
    normed_embedding: Tensor = activation("N C", lives=from_embedding(ATTENTION), optional=True)
    embedding_rstd: Tensor = activation("N", "statistics", lives=lambda clock: ((0, clock.mirrored(0)),), optional=True)
    blocks: list[BlockActivations] = repeated(BlockActivations)
    lnf: Tensor = activation("N C", lives=at_head)
    lnf_rstd: Tensor = activation("N", "statistics", lives=at_head)
    logits: Tensor = activation("chunk Vp", lives=at_head)

    @property
    def first(self) -> Tensor:
        """The stream that enters the first block."""
        return self.embedded if self.normed_embedding is None else self.normed_embedding


@dataclass
class BlockGradients:
    """The gradients that the blocks make one after another in the same memory; in fp8 each block's have a scale."""

    dqkv: Tensor = shared()
    dvalues: Tensor = shared(of="datty")  # of the rows of the value embeddings, once attention's backward has read `datty`
    dresidual_mid: Tensor = shared(of="dresidual")
    dhidden: Tensor = shared()  # before the squared ReLU
    dresidual_out: Tensor = shared(of="dresidual")


@dataclass
class Gradients:
    """Gradients of activations. The residual stream's is changed in place: the stream's identity path leaves it as it
    is, and each norm adds its own path."""

    dlnf: Tensor = activation("N C", lives=at_head)
    dresidual: Tensor = activation("N C", lives=in_backward)
    dnorm: Tensor = activation("N C", lives=backward_of(ATTENTION, FEED_FORWARD))  # of a norm's output
    datty: Tensor = activation("N C", lives=backward_of(ATTENTION))
    dqkv: Tensor = activation("N 3C", lives=backward_of(ATTENTION))
    dhidden: Tensor = activation("N F", lives=backward_of(FEED_FORWARD))
    # The stream's gradient is written a tick before the GEMM that reads it.
    dresidual_mid: Tensor = activation("N C", lives=backward_of(FEED_FORWARD, last=1), of="dresidual")
    dresidual_out: Tensor = activation("N C", lives=backward_of(FEED_FORWARD, first=1), of="dresidual")
    dfirst: Tensor = activation("N C", lives=in_backward, optional=True)  # of `first`
    dembedded: Tensor = activation("N C", lives=lambda clock: ((2 * clock.head, 2 * clock.head),), optional=True)
    attention_scratch: Tensor = activation("attention_scratch", torch.uint8, lives=backward_of(ATTENTION))
    blocks: list[BlockGradients] = repeated(BlockGradients)


def activations(
    shape: ModelShape, batch: int, length: int, dtype: torch.dtype, ops: ModuleType, *, chunk: int, training: bool
) -> Iterator[ActivationRow]:
    """The rows of a pass, as in `rows_of_pass`."""
    sizes, clock = dims(shape), Clock(shape.num_layers, stages=2, training=training)
    tables = Activations, Gradients
    rows = rows_of_pass(tables, sizes, batch, length, dtype, ops, clock, chunk=chunk, widest=sizes["F"], forms=shape.forms)
    return (as_read(shape, clock, row) for row in rows if has(shape, row.name) and in_its_layer(shape, row.name))


def as_read(shape: ModelShape, clock: Clock, row: ActivationRow) -> ActivationRow:
    """The row as the model's techniques read it: the first block's input lives as long as a block reads it."""
    if shape.has("input_scalars") and row.name == ("normed_embedding" if shape.has("embedding_norm") else "embedded"):
        return replace(row, ticks=((0, max(clock.head, clock.mirrored(0))),))
    return row


@dataclass
class DecodingBlock(BlockActivations):
    """A block of generation, which the layers use in turn."""

    first: Tensor = activation("N C", lives=lambda clock: ((clock.tick(0), clock.tick(1)),), optional=True)
