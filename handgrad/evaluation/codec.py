"""Pictures to codes and back, by the weights of a run with `--architecture vqvae`."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from handgrad.errors import UsageError
from handgrad.evaluation.load import LoadedModel, Weights, load_model, machine
from handgrad.machine.devices import resolve_device
from handgrad.models import forward_buffers, named_activations, vqvae
from handgrad.networks.vqvae import family_of, sides_of

AT_ONCE = 16  # pictures


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


def open_codec(weights: Weights, device: str = "cpu") -> Codec:
    """Loads the weights. Raises `UsageError` for weights of another network, and the errors of `load_model`."""
    shape = weights.shape
    if not shape.network.pictures:
        raise UsageError(f"codes need a run with --architecture vqvae, found {shape.architecture}")
    on = machine(resolve_device(device), "fp32", "auto")
    buffers = forward_buffers(shape, AT_ONCE, shape.sequence_length, on.dtype, on.ops)
    model = load_model(weights, on.device, on.dtype, on.ops, buffers)
    family = family_of(shape)
    grid = sides_of(shape, shape.num_layers)
    return Codec(model, named_activations(shape, model.views), family.sides, grid, family.codes)
