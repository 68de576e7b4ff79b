"""A convolutional autoencoder of pictures with a discrete middle. models/vqvae.py computes it.

It reads and predicts bytes: a sample is one picture, row by row, red, green and blue in turn, and the loss of a byte is a
squared error. `num_layers` is the number of halvings, `VqvaeShape` the rest, as a text: `size=32x32,codebook=1000`.
"""

import functools
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from handgrad.errors import UsageError
from handgrad.names import named_text, named_values
from handgrad.networks.network import Network

if TYPE_CHECKING:
    from handgrad.networks import ModelShape

BYTES = 257  # of the vocabulary: end-of-text begins a picture
MOST_CODES = 1 << 15


@dataclass(frozen=True)
class VqvaeShape:
    """The sizes of a vqvae beside its halvings and channels."""

    size: str = "32x32"  # rows x columns of a picture
    levels: str = "8.5.5.5"  # of FSQ: the values of each latent channel; their product is the number of codes
    codebook: int = 0  # vectors of a learned codebook; 0: FSQ
    latent: int = 8  # Z: latent channels beside a codebook; FSQ has one for each of the levels
    commitment: float = 0.25  # beta of equation 3, beside a codebook
    groups: int = 8  # Q: of each norm's channels

    def __str__(self) -> str:
        return named_text(self)

    @property
    def sides(self) -> tuple[int, int]:
        """(Y, X); zeros for a `size` that is none."""
        match = re.fullmatch(r"(\d{1,4})x(\d{1,4})", self.size)
        return (int(match[1]), int(match[2])) if match else (0, 0)

    @property
    def fsq_levels(self) -> tuple[int, ...]:
        """The levels of FSQ; none for a text of anything but numbers."""
        return tuple(map(int, self.levels.split("."))) if re.fullmatch(r"\d{1,4}(\.\d{1,4})*", self.levels) else ()

    @property
    def codes(self) -> int:
        """The number of different codes."""
        return self.codebook or math.prod(self.fsq_levels)

    @property
    def latent_channels(self) -> int:
        """Z"""
        return self.latent if self.codebook else len(self.fsq_levels)


@functools.lru_cache(maxsize=64)
def parse_vqvae(text: str) -> VqvaeShape:
    """Parses the text of a configuration. Raises `UsageError` for an unknown name or an invalid value."""
    return named_values(VqvaeShape, "vqvae", text, "size=32x32,levels=8.5.5.5")


def check(config: Any) -> None:
    """Raises `UsageError` for invalid sizes, and for settings that a vqvae does not support."""
    family = parse_vqvae(config.vqvae)
    (rows, columns), halved = family.sides, 1 << min(config.num_layers, 12)
    rules: tuple[tuple[bool, str], ...] = (
        (rows > 0 and columns > 0, "a size of ROWSxCOLUMNS"),
        (
            rows % halved == 0 and columns % halved == 0,
            f"a size in multiples of {halved} for {config.num_layers} num_layers",
        ),
        (family.codebook > 0 or all(n > 1 for n in family.fsq_levels or (0,)), "levels of 2 or more, like 8.5.5.5"),
        (0 < family.codes <= MOST_CODES, f"1 to {MOST_CODES} codes"),
        (family.latent > 0 and 0 <= family.commitment < math.inf, "latent of 1 or more, a finite commitment of 0 or more"),
        (family.groups > 0 and config.channels % family.groups == 0, f"groups that divide channels {config.channels}"),
    )
    for holds, wanted in rules:
        if not holds:
            raise UsageError(f"vqvae must have {wanted}, found {str(family)!r}")
    wanted = 3 * rows * columns
    if config.sequence_length != wanted:
        raise UsageError(
            f"sequence_length must be the 3 * {rows} * {columns} = {wanted} bytes of a picture, found"
            f" {config.sequence_length}; try --sequence-length {wanted}"
        )
    supported = {
        "num_heads": (1,),
        "precision": ("auto", "fp32"),
        "optimizer": ("adamw",),
        "objective": ("auto", "tokens"),
        "packing": ("auto", "whole"),
        "recompute": (0,),
        "offload": (False,),
        "eval_tasks": ("",),
        "eval_stride": (0,),
    }
    for name, values in supported.items():
        if (value := getattr(config, name)) not in values:
            raise UsageError(f"vqvae supports {name} {' or '.join(map(repr, values))} so far, found {value!r}")


def psnr(mean_squared_error: float) -> float:
    """The peak signal-to-noise ratio in dB of an error on the scale from -1 to 1: 10 log10(2^2 / error)."""
    return 10 * math.log10(4 / max(mean_squared_error, 1e-30))


def family_of(shape: "ModelShape") -> VqvaeShape:
    return parse_vqvae(shape.vqvae)


def sides_of(shape: "ModelShape", halvings: int) -> tuple[int, int]:
    """Rows and columns after this many halvings."""
    rows, columns = family_of(shape).sides
    return rows >> halvings, columns >> halvings


def letters(shape: "ModelShape") -> dict[str, int]:
    """J J C of 3 x 3 and 4 x 4 kernels, and the rows and columns of pictures (Y, X) and of codes (Yc, Xc)."""
    family, C, (Yc, Xc) = family_of(shape), shape.channels, sides_of(shape, shape.num_layers)
    Y, X, Z = *family.sides, family.latent_channels
    channels = {"3": 3, "27": 27, "9C": 9 * C, "16C": 16 * C, "9Z": 9 * Z, "Z": Z, "Z1": Z + 1, "Q": family.groups}
    return {**channels, "E": family.codebook, "Y": Y, "X": X, "Yc": Yc, "Xc": Xc, "YcXc": Yc * Xc}


def flops_per_token(shape: "ModelShape") -> float:
    """FLOPs of forward and backward per byte: 6 for each weight at each place that a convolution computes."""
    C, Z, L = shape.channels, family_of(shape).latent_channels, shape.num_layers
    areas = [rows * columns for rows, columns in (sides_of(shape, level) for level in range(L + 1))]
    ends = areas[0] * 2 * 27 * C + areas[-1] * 2 * 9 * C * Z
    levels = sum(2 * (9 * C * C * areas[level] + 16 * C * C * areas[level + 1]) for level in range(L))
    return 6.0 * (ends + levels) / shape.sequence_length


VQVAE = Network(
    title="VQ-VAE",
    gemms=lambda shape: (),
    models={"vqvae": (2, 1, 64)},
    head_width=lambda shape: 8,  # of no heads: one that every backend takes
    letters=letters,
    setting="vqvae",
    settle=lambda shape: str(family_of(shape)),
    check=check,
    variant=lambda shape: f"vqvae of {family_of(shape).codes} codes, ",
    adapters=False,
    pictures=True,
    flops=flops_per_token,
)
