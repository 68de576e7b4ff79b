"""The table of what is quantised in an fp8 run: one row per tensor, with the product that reads it and its number format.

Products go to fp8 in parts of a block: `qkv`, `proj` and `mlp` (fc and fcproj, whose GELU kernels serve both), each with
its forward, input gradient and weight gradient. Of the loss head, forward and input gradient are switched one by one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from handgrad.arena import Buffer
from handgrad.config import TUNED, ModelShape, RunConfig
from handgrad.errors import UsageError
from handgrad.fp8.formats import FORMATS, SCALING_PLACES, STATISTICS_PLACES, Form, Quantized

PARTS = ("qkv", "proj", "mlp")
HEAD_PRODUCTS = ("forward", "dgrad")

# Of each part of a block: its quantised activations, gradients and weights.
BLOCK_TENSORS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "qkv": (("ln1",), ("dqkv",), ("qkv_weight",)),
    "proj": (("atty",), ("dresidual_mid",), ("proj_weight",)),
    "mlp": (("ln2", "gelu"), ("dhidden", "dresidual_out"), ("fc_weight", "fcproj_weight")),
}
ACTIVATION, GRADIENT, WEIGHT = "activation", "gradient", "weight"


@dataclass(frozen=True)
class Fp8Products:
    """Which products run in fp8: (layer, part) of the blocks, and those of the head."""

    blocks: frozenset[tuple[int, str]] = frozenset()
    head: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.blocks or self.head)

    def describe(self, num_layers: int) -> str:
        """'qkv, mlp (but 0.mlp), head.forward' for the header."""
        words = []
        for part in PARTS:
            without = [layer for layer in range(num_layers) if (layer, part) not in self.blocks]
            if len(without) < num_layers:
                but = ", ".join(f"{layer}.{part}" for layer in without)
                words.append(part + f" (but {but})" * bool(without))
        return ", ".join([*words, *(f"head.{name}" for name in HEAD_PRODUCTS if name in self.head)]) or "none"


def fp8_products(config: RunConfig) -> Fp8Products:
    """The products that `config` wants in fp8; raises `UsageError` for names that are none."""
    if config.precision != "fp8":
        return Fp8Products()
    kept = set()
    for name in words(config.fp8_keep_bf16.replace(TUNED, "")):
        layer, _, part = name.rpartition(".")
        if part not in PARTS or (layer and not (layer.isdecimal() and int(layer) < config.num_layers)):
            raise UsageError(
                f"fp8_keep_bf16 takes {', '.join(PARTS)} or one of a layer like 3.mlp (layers 0 to"
                f" {config.num_layers - 1}), found {name!r}"
            )
        kept |= {(int(layer), part)} if layer else {(n, part) for n in range(config.num_layers)}
    head = words(config.fp8_head)
    unknown = [name for name in head if name not in HEAD_PRODUCTS]
    if unknown:
        raise UsageError(f"fp8_head takes {', '.join(HEAD_PRODUCTS)}, found {unknown[0]!r}")
    every = {(layer, part) for layer in range(config.num_layers) for part in PARTS}
    return Fp8Products(frozenset(every - kept), frozenset(head))


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


@dataclass(frozen=True)
class QuantizedRow:
    """A quantised tensor: its name, what kind of tensor it is, its format."""

    name: str
    kind: str
    format: torch.dtype


def quantized_table(config: RunConfig) -> tuple[QuantizedRow, ...]:
    """All quantised tensors whose scales follow from what the steps before have seen, weights last."""
    products = fp8_products(config)
    gradients = FORMATS[config.fp8_gradients]
    rows, weights = [], []
    for layer in range(config.num_layers):
        for part in PARTS:
            if (layer, part) not in products.blocks:
                continue
            for names, kind, chosen in zip(
                BLOCK_TENSORS[part],
                (ACTIVATION, GRADIENT, WEIGHT),
                (FORMATS["e4m3"], gradients, FORMATS["e4m3"]),
                strict=True,
            ):
                into = weights if kind == WEIGHT else rows
                into += [QuantizedRow(f"blocks.{layer}.{name}", kind, chosen) for name in names]
    if products.head:
        rows.append(QuantizedRow("lnf", ACTIVATION, FORMATS["e4m3"]))
        weights.append(QuantizedRow("wte", WEIGHT, FORMATS["e4m3"]))
    return (*rows, *weights)


def part_of(name: str) -> str:
    """The part of a block that reads a quantised tensor: '3.mlp' of 'blocks.3.gelu', 'head' of what the head reads."""
    if not name.startswith("blocks."):
        return "head"
    _, layer, tensor = name.split(".")
    return next(f"{layer}.{part}" for part, names in BLOCK_TENSORS.items() if tensor in sum(names, ()))


def weight_buffers(config: RunConfig, shape: ModelShape) -> list[Buffer]:
    """The fp8 forms of the weights. The head's forward reads `wte.rows`, its dgrad `wte.columns`."""
    C, F = shape.channels, shape.feed_forward
    dims = {"qkv_weight": (3 * C, C), "proj_weight": (C, C), "fc_weight": (F, C), "fcproj_weight": (C, F)}
    head = fp8_products(config).head
    buffers = []
    for row in quantized_table(config):
        if row.kind != WEIGHT:
            continue
        rows, columns = dims.get(row.name.rpartition(".")[2], (shape.padded_vocab_size, C))
        if row.name != "wte" or "forward" in head:
            buffers.append(Buffer(f"{row.name}.rows", (rows, columns), row.format, "fp8 weights"))
        if row.name != "wte" or "dgrad" in head:
            buffers.append(Buffer(f"{row.name}.columns", (columns, rows), row.format, "fp8 weights"))
    return buffers


def scaling_buffers(config: RunConfig, statistics_parts: int) -> list[Buffer]:
    """What the quantised tensors' scales are kept in and made from; the last row is the static one of the logits."""
    count = len(quantized_table(config))
    if not count:
        return []
    float32, kind = torch.float32, "fp8 scales"
    return [
        Buffer("fp8.scaling", (count + 1, SCALING_PLACES), float32, kind),
        Buffer("fp8.statistics", (count + 1, STATISTICS_PLACES, statistics_parts), float32, kind),
    ]


class Forms:
    """Makes the `Quantized` tensors out of the arena's views."""

    def __init__(self, table: tuple[QuantizedRow, ...], views: Mapping[str, Tensor], *, current: bool = False):
        """`current`: their scales are made from the tensors themselves."""
        self.places = {row.name: place for place, row in enumerate(table)}
        self.views, self.current = views, current

    def __call__(self, name: str, *, stored_as: str = "", plain: Tensor | None = None) -> Form:
        """The tensor `name` if it is quantised, else its `plain` form. Its fp8 forms are the views `stored_as`."""
        if name in self.places:
            return self.quantized(self.places[name], stored_as or name, plain, self.current)
        assert plain is not None, f"{name} has no form"
        return plain

    def dlogits(self) -> Quantized | None:
        """The logits' gradient, if a product reads it in fp8: its scale is static, in the row after the table's."""
        if "dlogits.rows" not in self.views:
            return None
        return self.quantized(len(self.places), "dlogits", None, False)

    def quantized(self, place: int, stored_as: str, plain: Tensor | None, current: bool) -> Quantized:
        rows, columns = (self.views.get(f"{stored_as}.{form}") for form in ("rows", "columns"))
        return Quantized(
            rows, columns, self.views["fp8.scaling"][place], self.views["fp8.statistics"][place], plain, current
        )
