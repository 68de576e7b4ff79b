"""Pictures to codes and back, by an autoencoder: a run of it (`with_codec`), or its weights in a vocabulary (`view_of`)."""

import base64
import contextlib
import functools
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from handgrad.data.codes import GREY, MISSING, RGB, VOCABULARY, Codes, View, codes_of
from handgrad.data.palette import plain_view
from handgrad.data.recipe import PrepareOptions, sides
from handgrad.data.tokenizer_loading import load_tokenizer
from handgrad.errors import DataError, HandgradError, UsageError
from handgrad.evaluation.load import SHAPE, LoadedModel, Weights, load_model, machine
from handgrad.machine.devices import resolve_device
from handgrad.models import forward_buffers, named_activations, parameter_table, vqvae
from handgrad.networks.vqvae import BYTES, family_of, sides_of
from handgrad.parsing import parse_json
from handgrad.settings.config import WHOLE, RunConfig, check

AT_ONCE = 64  # pictures


@dataclass(frozen=True)
class Codec:
    """`size`: rows and columns of a picture; `grid`: of its codes, each below `codes`."""

    model: LoadedModel
    act: Any
    size: tuple[int, int]
    grid: tuple[int, int]
    codes: int

    def encode(self, pictures: np.ndarray) -> np.ndarray:
        """The codes (B, *grid), int64, of pictures (B, *size, 3), uint8."""
        return self.each(vqvae.encode, pictures)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """The pictures (B, *size, 3), uint8, of codes (B, *grid), int64."""
        return self.each(vqvae.decode, codes)

    def each(self, turn: Any, inputs: np.ndarray) -> np.ndarray:
        about = self.model.ops, self.model.weights, self.act, self.model.shape
        parts = torch.from_numpy(np.ascontiguousarray(inputs)).split(AT_ONCE)
        return torch.cat([turn(*about, part) for part in parts]).cpu().numpy()

    def paint(self, codes: np.ndarray) -> np.ndarray:
        """The picture of codes (*grid), of which the places that miss theirs are grey."""
        missing = codes == MISSING
        (picture,) = self.decode(np.where(missing, 0, codes)[None])
        sizes = [side // codes for side, codes in zip(self.size, self.grid, strict=True)]
        picture[np.kron(missing, np.ones(sizes, bool))] = GREY
        return picture


def open_codec(weights: Weights, device: str = "cpu") -> Codec:
    """Loads the weights. Raises `UsageError` for weights of another network, and the errors of `load_model`."""
    shape = weights.shape
    if not shape.network.pictures:
        raise UsageError(f"codes need a run with --architecture vqvae, found {shape.architecture}")
    on = machine(resolve_device(device), "fp32", "auto")
    buffers = forward_buffers(shape, AT_ONCE, shape.sequence_length, on.dtype, on.ops)
    model = load_model(weights, on.device, on.dtype, on.ops, buffers)
    family, grid = family_of(shape), sides_of(shape, shape.num_layers)
    return Codec(model, named_activations(shape, model.views), family.sides, grid, family.codes)


def with_codec(options: PrepareOptions, open_weights: Callable[[str], Weights]) -> PrepareOptions:
    """The options to prepare pictures as an autoencoder's codes, or in the vocabulary of a model or shards of pictures.
    `UsageError`: another network's weights, another size. Also raises the errors of `open_weights`."""
    tokenizer = coded = None
    with contextlib.suppress(HandgradError):  # `open_weights` says what is wrong
        tokenizer = load_tokenizer(options.codes)
        coded = codes_of(tokenizer)
    if tokenizer is not None and coded is not None and coded.decoder != RGB:
        view = view_of(coded)
        known = {"codes": f"{VOCABULARY}{tokenizer.sha256}", "coded": coded, "view": view if coded.decoder else None}
        return replace(sized(options, view.size), **known)
    weights = open_weights(options.codes)
    codec = open_codec(weights, "auto")
    options = sized(options, codec.size)
    flat = codec.decode(np.broadcast_to(np.arange(codec.codes)[:, None, None], (codec.codes, *codec.grid)))
    coded = Codes(*codec.grid, tuple((int(r), int(g), int(b)) for r, g, b in flat.mean((1, 2))), decoder=stored(weights))
    view = View(codec.size, codec.encode, codec.paint)
    identity = hashlib.sha256(coded.decoder.encode()).hexdigest()
    return replace(options, codes=f"autoencoder {identity}", coded=coded, view=view)


def sized(options: PrepareOptions, size: tuple[int, int]) -> PrepareOptions:
    """The options with the size of the pictures that `codes` names. Raises `UsageError` if they have another."""
    text = "x".join(map(str, size))
    if options.size != PrepareOptions.size and sides(options.size) != size:
        raise UsageError(f"--size must be {text}, of the pictures that {options.codes} codes, found {options.size}")
    return replace(options, size=text)


@functools.lru_cache(4)
def view_of(codes: Codes) -> View:
    """The view of a vocabulary's codes. Raises `DataError` for damaged weights of an autoencoder."""
    if codes.decoder in ("", RGB):
        return plain_view(codes)
    codec = open_codec(restored(codes.decoder))
    if codec.grid != (codes.rows, codes.columns) or codec.codes != len(codes.colours):
        raise damaged()
    return View(codec.size, codec.encode, codec.paint)


def stored(weights: Weights) -> str:
    """The autoencoder's sizes and weights as a text: JSON, with the float32 numbers of all rows in base64."""
    numbers = b"".join(weights.weight(row).numpy().tobytes() for row in parameter_table(weights.shape))
    return json.dumps([{name: getattr(weights.shape, name) for name in SHAPE}, base64.b64encode(numbers).decode()])


def restored(text: str) -> Weights:
    """The autoencoder of a text of `stored`. Raises `DataError` if it is damaged."""
    try:
        sizes, numbers = parse_json(text)
        config = RunConfig(**sizes, tokens_per_step=sizes["sequence_length"], micro_batch=1, lanes=1, packing=WHOLE)
        shape = check(config).shape(BYTES)
        flat = torch.frombuffer(bytearray(base64.b64decode(numbers)), dtype=torch.float32)
        parts = flat.split([math.prod(row.stored_shape) for row in parameter_table(shape)])
    except (UsageError, ValueError, TypeError, KeyError, RuntimeError):
        raise damaged() from None
    rows = {row.name: part.view(row.stored_shape) for row, part in zip(parameter_table(shape), parts, strict=True)}
    return Weights(shape, load_tokenizer("bytes"), lambda row: rows[row.name], {"source": "the autoencoder"}, config)


def damaged() -> DataError:
    return DataError("expected an autoencoder's weights in the vocabulary, found others; prepare the pictures again")
