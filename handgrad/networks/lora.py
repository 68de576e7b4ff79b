"""The adapters of a run (docs/lora.md), and their text in a configuration: `rank=16,alpha=32,on=q+v`."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from handgrad.errors import UsageError
from handgrad.names import check_choice, named_values
from handgrad.networks import NETWORKS, ModelShape

EXAMPLE = "rank=16,alpha=32,on=q+v"
MOST_SCALE = 3.4e38  # the float32 maximum
REASONS = {"optimizer": "; muon's step is one of a whole matrix, not of two factors"}  # reasons for refused settings


@dataclass(frozen=True)
class LoraShape:
    """Adapters of one rank, on the products that `on` names."""

    rank: int = 16  # r
    alpha: float = 0.0  # alpha / r scales the adapter's output; 0: twice the rank
    on: str = ""  # products, joined by plus signs; empty: all

    @property
    def scale(self) -> float:
        """s = alpha / r"""
        return self.alpha / self.rank if self.alpha else 2.0

    def products(self, shape: ModelShape) -> tuple[str, ...]:
        """The products with adapters, in block order."""
        return tuple(name for name in products(shape) if not self.on or name in self.on.split("+"))


def products(shape: ModelShape) -> tuple[str, ...]:
    """The products of a block that can have an adapter."""
    return tuple(name for gemm in shape.gemms for name in gemm.outputs)


@functools.lru_cache(maxsize=64)
def parse_lora(text: str) -> LoraShape:
    """Parses the text of a configuration. Raises `UsageError` for an unknown name or an invalid value."""
    lora = named_values(LoraShape, "lora", text, EXAMPLE)
    if lora.rank < 1 or not 0 <= lora.alpha <= MOST_SCALE * lora.rank:
        raise UsageError(
            f"lora must have a rank of 1 or more and an alpha of 0 (twice that) to {MOST_SCALE} times it, found {text!r};"
            f" try {EXAMPLE!r}"
        )
    return lora


def check_lora(text: str, shape: ModelShape, init_from: str, refused: Iterable[tuple[str, object, object]]) -> None:
    """Raises `UsageError` for adapters that model or settings lack. `refused`: (setting, its value, the one needed)."""
    lora = parse_lora(text)
    if not shape.network.adapters:
        able = (name for name, network in NETWORKS.items() if network.adapters)
        raise UsageError(f"lora is for architecture {' or '.join(able)}, found {shape.architecture}")
    for name in filter(None, lora.on.split("+")):
        check_choice(f"a product of {shape.architecture} in lora", name, products(shape))
    if not init_from:
        raise UsageError(f"lora {text!r} adapts weights, found none; name them with --init-from")
    for name, value, needed in refused:
        if value != needed:
            wanted = "empty" if needed == "" else needed
            raise UsageError(f"lora trains with {name} {wanted}, found {value}{REASONS.get(name, '')}")
