"""A convolutional autoencoder with a discrete middle (VQ-VAE, van den Oord et al. 2017; FSQ, Mentzer et al. 2023): its
tensors as rows, forward, backward, pictures to codes and back.

A picture (Y, X, 3) has bytes as numbers from -1 to 1. The encoder halves it L times, the decoder mirrors it:

    x = Conv3x3(picture)                          encoder: x = Conv4x4, stride 2 (R(x))      L times
    R(x) = x + Conv3x3(SiLU(GroupNorm(x)))        decoder: x = R(Transposed4x4, stride 2 (x))      L times
    z = Conv3x3(x),  q = FSQ(z) or the nearest of a codebook,  x = Conv3x3(q)
    prediction = Conv3x3(SiLU(GroupNorm(x)))

The loss of a byte is the squared error of its number, so the mean loss is the mean squared error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.memory.activations import ActivationRow, activation, activation_rows, dtypes_of
from handgrad.memory.arena import Clock, Lives, at_head, kept
from handgrad.memory.rows import ONES, ZEROS, Init, ParameterRow, parameter, parameter_rows, repeated
from handgrad.models.passes import Stage, run
from handgrad.networks import ModelShape
from handgrad.networks.vqvae import family_of, sides_of

# Forward. A stage is the section of the pass that first reads one bucket's weights.


def forward(ops: ModuleType, w: Weights, act: Activations, shape: ModelShape) -> list[Stage]:
    """act.targets (B, T) -> act.prediction (B, Y, X, 3)."""
    return [*encoder_stages(ops, w, act, shape), *decoder_stages(ops, w, act, shape)]


def encoder_stages(ops: ModuleType, w: Weights, act: Activations, shape: ModelShape) -> list[Stage]:
    """act.targets -> act.codes (B, Yc Xc), and act.quantized (B, Yc, Xc, Z)."""
    stages = [Stage("stem", partial(stem_forward, ops, w, act))]
    after = [*(block.before for block in act.encoder[1:]), act.encoded]
    for level, (weights, block, out) in enumerate(zip(w.encoder, act.encoder, after, strict=True)):
        stages.append(Stage(f"encoder.{level}", partial(encoder_forward, ops, weights, block, out)))
    return [*stages, Stage("codes", partial(codes_forward, ops, w, act, shape))]


def decoder_stages(ops: ModuleType, w: Weights, act: Activations, shape: ModelShape) -> list[Stage]:
    """act.quantized -> act.prediction."""
    stages = [Stage("decoding", partial(ops.conv_forward, act.decoded, act.quantized, w.decode_weight, w.decode_bias))]
    before = [act.decoded, *(block.after for block in act.decoder)]
    for level, (weights, block) in enumerate(zip(w.decoder, act.decoder, strict=True)):
        stages.append(Stage(f"decoder.{level}", partial(decoder_forward, ops, weights, block, before[level])))
    return [*stages, Stage("head", partial(head_forward, ops, w, act, before[-1]))]


def stem_forward(ops: ModuleType, w: Weights, act: Activations) -> None:
    ops.pixels_forward(act.picture, act.targets)
    ops.conv_forward(act.encoder[0].before, act.picture, w.stem_weight, w.stem_bias)


def branch_forward(ops: ModuleType, w: LevelWeights, act: LevelActivations) -> None:
    """act.after = R(act.before)."""
    ops.groupnorm_forward(act.norm, act.norm_mean, act.norm_rstd, act.before, w.norm_weight, w.norm_bias)
    ops.silu_forward(act.silu, act.norm)
    ops.conv_forward(act.after, act.silu, w.conv_weight, w.conv_bias)
    ops.residual_forward(act.after, act.after, act.before)


def encoder_forward(ops: ModuleType, w: LevelWeights, act: LevelActivations, out: Tensor) -> None:
    """act.before (B, Y, X, C) -> out (B, Y / 2, X / 2, C)."""
    branch_forward(ops, w, act)
    ops.conv_forward(out, act.after, w.resize_weight, w.resize_bias, stride=2)


def decoder_forward(ops: ModuleType, w: LevelWeights, act: LevelActivations, inp: Tensor) -> None:
    """inp (B, Y / 2, X / 2, C) -> act.after (B, Y, X, C)."""
    ops.transposed_conv_forward(act.before, inp, w.resize_weight, w.resize_bias, stride=2)
    branch_forward(ops, w, act)


def codes_forward(ops: ModuleType, w: Weights, act: Activations, shape: ModelShape) -> None:
    """act.encoded (B, Yc, Xc, C) -> act.quantized (B, Yc, Xc, Z)."""
    ops.conv_forward(act.latent, act.encoded, w.code_weight, w.code_bias)
    if w.codebook is None:
        levels = family_of(shape).fsq_levels
        ops.fsq_forward(act.quantized, act.latent, levels=levels)
        ops.fsq_round(act.quantized, act.codes, act.quantized, levels=levels)
    else:
        ops.vq_forward(act.quantized, act.codes, act.code_errors, act.latent, w.codebook)


def head_forward(ops: ModuleType, w: Weights, act: Activations, x: Tensor) -> None:
    """x (B, Y, X, C) -> act.prediction (B, Y, X, 3)."""
    ops.groupnorm_forward(act.norm, act.norm_mean, act.norm_rstd, x, w.norm_weight, w.norm_bias)
    ops.silu_forward(act.silu, act.norm)
    ops.conv_forward(act.prediction, act.silu, w.head_weight, w.head_bias)


def squared_errors(ops: ModuleType, w: Weights, act: Activations, shape: ModelShape) -> None:
    """After `forward`: act.losses (N), without a backward."""
    ops.squared_error_forward(act.losses, act.prediction, act.targets)


# Backward: the forward mirrored, last line first. A stage is the section that completes one bucket's gradients.


def backward(
    ops: ModuleType,
    w: Weights,
    g: Weights,
    act: Activations,
    d: Gradients,
    scale: Tensor,
    shape: ModelShape,
    *,
    recompute: int,
) -> list[Stage]:
    """Runs after `forward`. Computes act.losses (N), and adds scale (1) * the gradient of their sum to `g`; a codebook adds
    the third term of equation 3, which the losses leave out, and `g.codebook` receives its step's sums."""
    below = [act.decoded, *(block.after for block in act.decoder)]
    dbelow = [d.ddecoded, *(block.dstream for block in d.decoder)]
    stages = [Stage("head", partial(head_backward, ops, w, g, act, d, scale, below[-1], dbelow[-1]), done=True)]
    for level in reversed(range(shape.num_layers)):
        block = w.decoder[level], g.decoder[level], act.decoder[level], d.decoder[level], below[level], dbelow[level]
        stages.append(Stage(f"decoder.{level}", partial(decoder_backward, ops, *block), done=True))
    decoding = d.dlatent, g.decode_weight, g.decode_bias, d.ddecoded, act.quantized, w.decode_weight
    stages.append(Stage("decoding", partial(ops.conv_backward, *decoding), done=True))
    stages.append(Stage("codes", partial(codes_backward, ops, w, g, act, d, scale, shape), done=True))
    dafter = [*(block.dstream for block in d.encoder[1:]), d.dencoded]
    for level in reversed(range(shape.num_layers)):
        block = w.encoder[level], g.encoder[level], act.encoder[level], d.encoder[level]
        stages.append(Stage(f"encoder.{level}", partial(encoder_backward, ops, *block, dafter[level]), done=True))
    stem = None, g.stem_weight, g.stem_bias, d.encoder[0].dstream, act.picture, w.stem_weight
    return [*stages, Stage("stem", partial(ops.conv_backward, *stem), done=True)]


def head_backward(
    ops: ModuleType, w: Weights, g: Weights, act: Activations, d: Gradients, scale: Tensor, x: Tensor, dx: Tensor
) -> None:
    """act.prediction becomes its gradient -> dx (B, Y, X, C)."""
    ops.squared_error_forward_backward(act.losses, act.prediction, act.targets, scale)
    ops.conv_backward(d.dhidden, g.head_weight, g.head_bias, act.prediction, act.silu, w.head_weight)
    ops.silu_backward(d.dhidden, act.norm)
    dx.zero_()
    ops.groupnorm_backward(dx, g.norm_weight, g.norm_bias, d.dhidden, x, act.norm_mean, act.norm_rstd, w.norm_weight)


def branch_backward(ops: ModuleType, w: LevelWeights, g: LevelWeights, act: LevelActivations, d: LevelGradients) -> None:
    """d.dstream (B, Y, X, C): the gradient of act.after -> of act.before, in place."""
    ops.conv_backward(d.dhidden, g.conv_weight, g.conv_bias, d.dstream, act.silu, w.conv_weight)
    ops.silu_backward(d.dhidden, act.norm)
    norm = act.before, act.norm_mean, act.norm_rstd, w.norm_weight
    ops.groupnorm_backward(d.dstream, g.norm_weight, g.norm_bias, d.dhidden, *norm)


def decoder_backward(
    ops: ModuleType, w: LevelWeights, g: LevelWeights, act: LevelActivations, d: LevelGradients, inp: Tensor, dinp: Tensor
) -> None:
    """d.dstream, of act.after -> dinp (B, Y / 2, X / 2, C)."""
    branch_backward(ops, w, g, act, d)
    ops.transposed_conv_backward(dinp, g.resize_weight, g.resize_bias, d.dstream, inp, w.resize_weight, stride=2)


def codes_backward(
    ops: ModuleType, w: Weights, g: Weights, act: Activations, d: Gradients, scale: Tensor, shape: ModelShape
) -> None:
    """d.dlatent, of act.quantized and straight through -> d.dencoded (B, Yc, Xc, C)."""
    family = family_of(shape)
    if w.codebook is None:
        ops.fsq_backward(d.dlatent, act.latent, levels=family.fsq_levels)
    else:
        # A byte's loss has weight `scale`. So has the mean over all latent numbers, which are fewer, in all.
        weight = act.targets.numel() / act.latent.numel()
        code = act.latent, act.codes, w.codebook, scale
        ops.vq_backward(d.dlatent, g.codebook, *code, commitment=family.commitment, weight=weight)
    ops.conv_backward(d.dencoded, g.code_weight, g.code_bias, d.dlatent, act.encoded, w.code_weight)


def encoder_backward(
    ops: ModuleType, w: LevelWeights, g: LevelWeights, act: LevelActivations, d: LevelGradients, dout: Tensor
) -> None:
    """dout (B, Y / 2, X / 2, C) -> d.dstream, of act.before."""
    ops.conv_backward(d.dstream, g.resize_weight, g.resize_bias, dout, act.after, w.resize_weight, stride=2)
    branch_backward(ops, w, g, act, d)


# Pictures to codes and back.


def encode(ops: ModuleType, w: Weights, act: Activations, shape: ModelShape, pictures: Tensor) -> Tensor:
    """The codes (B, Yc, Xc), int64, of pictures (B, Y, X, 3), uint8; B at most the batch of `act`, buffers of a forward."""
    act.targets.view(-1, *pictures.shape[1:])[: len(pictures)] = pictures
    run(encoder_stages(ops, w, act, shape))
    return act.codes.view(-1, *sides_of(shape, shape.num_layers))[: len(pictures)].clone()


def decode(ops: ModuleType, w: Weights, act: Activations, shape: ModelShape, codes: Tensor) -> Tensor:
    """The pictures (B, Y, X, 3), uint8, of codes (B, Yc, Xc), each from 0 to the number of codes - 1."""
    act.codes.zero_()  # a smaller batch leaves some, and this memory may hold other numbers
    act.codes.view(-1, *codes.shape[1:])[: len(codes)] = codes
    if w.codebook is None:
        ops.fsq_values(act.quantized, act.codes, levels=family_of(shape).fsq_levels)
    else:
        ops.vq_values(act.quantized, act.codes, w.codebook)
    run(decoder_stages(ops, w, act, shape))
    return bytes_of(act.prediction[: len(codes)])


def bytes_of(prediction: Tensor) -> Tensor:
    """The bytes nearest to numbers from -1 to 1."""
    return ((prediction + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


# Tables.

CONV = Init("normal", 1.0, by_inputs=True)
TRANSPOSED = Init("normal", 2.0, by_inputs=True)  # with a stride of 2 an output has fewer terms
RESIDUAL = Init("normal", 1.0, residual=True, by_inputs=True)
CODEBOOK = Init("normal", 1.0, end=-1)  # no vector has been used


@dataclass
class LevelWeights:
    """A halving of the encoder, or a doubling of the decoder."""

    conv_weight: Tensor = parameter("C 9C", RESIDUAL, "matrix")
    resize_weight: Tensor = parameter("C 16C", CONV, "matrix")  # of 4 x 4 kernels with stride 2
    norm_weight: Tensor = parameter("C", ONES, "vector")
    norm_bias: Tensor = parameter("C", ZEROS, "vector")
    conv_bias: Tensor = parameter("C", ZEROS, "vector")
    resize_bias: Tensor = parameter("C", ZEROS, "vector")


@dataclass
class DecoderWeights(LevelWeights):
    resize_weight: Tensor = parameter("C 16C", TRANSPOSED, "matrix")


@dataclass
class Weights:
    """The weights, or their gradients."""

    stem_weight: Tensor = parameter("C 27", CONV, "matrix", bucket="stem")
    stem_bias: Tensor = parameter("C", ZEROS, "vector", bucket="stem")
    encoder: list[LevelWeights] = repeated(LevelWeights)
    code_weight: Tensor = parameter("Z 9C", CONV, "matrix", bucket="codes")
    code_bias: Tensor = parameter("Z", ZEROS, "vector", bucket="codes")
    codebook: Tensor | None = parameter("E Z1", CODEBOOK, "codebook", bucket="codes", optional=True)
    decode_weight: Tensor = parameter("C 9Z", CONV, "matrix", bucket="decoding")
    decode_bias: Tensor = parameter("C", ZEROS, "vector", bucket="decoding")
    decoder: list[DecoderWeights] = repeated(DecoderWeights)
    head_weight: Tensor = parameter("3 9C", CONV, "matrix", bucket="head")
    norm_weight: Tensor = parameter("C", ONES, "vector", bucket="head")
    norm_bias: Tensor = parameter("C", ZEROS, "vector", bucket="head")
    head_bias: Tensor = parameter("3", ZEROS, "vector", bucket="head")


def parameters(shape: ModelShape) -> Iterator[ParameterRow]:
    learned = family_of(shape).codebook > 0
    return (row for row in parameter_rows(Weights, shape) if learned or row.name != "codebook")


# Lifetimes. The clock has a layer of one stage for each halving, for the codes, and for each doubling.


def at_codes(lives: Lives) -> Lives:
    """`lives` of the layer of the codes."""
    return lambda clock: lives(replace(clock, layer=clock.layers // 2))


FROM_BELOW = kept(-1, until=0)  # from the stage before, which writes it, to this stage's backward


def by_side(encoder: Lives, decoder: Lives) -> Lives:
    """`encoder`'s in the layers before the codes', `decoder`'s in those after it."""
    return lambda clock: (encoder if clock.layer < clock.layers // 2 else decoder)(clock)


def backward_from(first: int, last: int) -> Lives:
    """From `first` ticks after this stage's backward to `last` ticks after it."""
    return lambda clock: ((clock.mirrored(clock.tick(0)) + first, clock.mirrored(clock.tick(0)) + last),)


# Activations: all are kept for the backward.


@dataclass
class LevelActivations:
    """A level's. Yl, Xl: rows and columns at its larger end."""

    norm: Tensor = activation("B Yl Xl C", lives=kept(0))
    norm_mean: Tensor = activation("B Q", "statistics", lives=kept(0))
    norm_rstd: Tensor = activation("B Q", "statistics", lives=kept(0))
    silu: Tensor = activation("B Yl Xl C", lives=kept(0))
    before: Tensor = activation("B Yl Xl C", lives=by_side(FROM_BELOW, kept(0)))
    after: Tensor = activation("B Yl Xl C", lives=by_side(kept(0), kept(0, until=1)))


@dataclass
class OuterActivations:
    """Outside of the levels."""

    tokens: Tensor = activation("B T", torch.int64)  # only the feed writes it
    targets: Tensor = activation("B T", torch.int64)  # the picture's bytes
    losses: Tensor = activation("N", "statistics")
    picture: Tensor = activation("B Y X 3", lives=lambda clock: ((0, clock.mirrored(0)),))
    encoded: Tensor = activation("B Yc Xc C", lives=at_codes(FROM_BELOW))
    latent: Tensor = activation("B Yc Xc Z", lives=at_codes(kept(0)))
    quantized: Tensor = activation("B Yc Xc Z", lives=at_codes(kept(0)))
    codes: Tensor = activation("B YcXc", torch.int64)
    code_errors: Tensor = activation("B YcXc", "statistics", lives=at_codes(kept(0)))  # of a codebook
    decoded: Tensor = activation("B Yc Xc C", lives=at_codes(kept(0, until=1)))
    norm: Tensor = activation("B Y X C", lives=at_head)
    norm_mean: Tensor = activation("B Q", "statistics", lives=at_head)
    norm_rstd: Tensor = activation("B Q", "statistics", lives=at_head)
    silu: Tensor = activation("B Y X C", lives=at_head)
    prediction: Tensor = activation("B Y X 3", lives=at_head)


@dataclass
class Activations(OuterActivations):
    encoder: list[LevelActivations] = repeated(LevelActivations)
    decoder: list[LevelActivations] = repeated(LevelActivations)
    document_starts = None  # no field: a picture fills its row


@dataclass
class LevelGradients:
    dstream: Tensor = activation("B Yl Xl C", lives=by_side(backward_from(0, 1), backward_from(-1, 0)))
    dhidden: Tensor = activation("B Yl Xl C", lives=backward_from(0, 0))


@dataclass
class OuterGradients:
    dhidden: Tensor = activation("B Y X C", lives=at_head)
    ddecoded: Tensor = activation("B Yc Xc C", lives=at_codes(backward_from(-1, 0)))
    dlatent: Tensor = activation("B Yc Xc Z", lives=at_codes(backward_from(0, 0)))
    dencoded: Tensor = activation("B Yc Xc C", lives=at_codes(backward_from(0, 1)))


@dataclass
class Gradients(OuterGradients):
    encoder: list[LevelGradients] = repeated(LevelGradients)
    decoder: list[LevelGradients] = repeated(LevelGradients)


def activations(
    shape: ModelShape, batch: int, length: int, dtype: torch.dtype, ops: Any, *, chunk: int, training: bool
) -> Iterator[ActivationRow]:
    """The rows of a pass over `batch` pictures of `length` bytes. `ops` and `chunk`: for other networks."""
    L = shape.num_layers
    clock = Clock(2 * L + 1, stages=1, training=training)
    dims, dtypes = {**shape.letters, "B": batch, "T": length, "N": batch * length}, dtypes_of(dtype)
    tables = (OuterActivations, LevelActivations), (OuterGradients, LevelGradients)
    for outer, inner in tables if training else tables[:1]:
        yield from activation_rows(outer, dims, dtypes, clock)
        for level in range(L):
            for name, layer, halvings in (("encoder", level, level), ("decoder", L + 1 + level, L - 1 - level)):
                sides = dict(zip(("Yl", "Xl"), sides_of(shape, halvings), strict=True))
                yield from activation_rows(inner, dims | sides, dtypes, replace(clock, layer=layer), f"{name}.{level}.")
