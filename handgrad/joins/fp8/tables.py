"""The quantised tensors of an fp8 run: their table, their buffers, and the forms that GEMMs read.

A network names the tensors that may be in fp8, and the part of a block's GEMMs that reads each (`networks.network`).
A part switches to fp8 with its forward, input gradient and weight gradient together; the loss head's three switch
separately.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from handgrad.errors import UsageError
from handgrad.joins.fp8.formats import E4M3, E5M2, SCALING_PLACES, STATISTICS_PLACES, GradientFormats, Quantized
from handgrad.memory.activations import ActivationRow
from handgrad.memory.arena import WHOLE_BLOCKS, Buffer, Interval
from handgrad.memory.rows import KIND, ParameterRow, Table
from handgrad.networks.fp8 import HEAD_GEMMS
from handgrad.networks.network import Fp8

Intervals = tuple[Interval, ...]  # lifetimes of a buffer
Forms = Mapping[str, Fp8]  # `ModelShape.forms`

HEAD = "head"
ACTIVATION, GRADIENT, WEIGHT = "activation", "gradient", "weight"


@dataclass(frozen=True)
class Fp8Gemms:
    """The GEMMs that run in fp8: (layer, part) in the blocks, and the head's by name."""

    blocks: frozenset[tuple[int, str]] = frozenset()
    head: frozenset[str] = frozenset()

    def describe(self, layers: int, parts: Sequence[str]) -> str:
        """'qkv, mlp (but 0.mlp), head' for the header; 'head.forward' if not all of the head."""
        names = []
        for part in parts:
            if len(without := [layer for layer in range(layers) if (layer, part) not in self.blocks]) < layers:
                names.append(part + f" (but {', '.join(f'{layer}.{part}' for layer in without)})" * bool(without))
        head = [f"{HEAD}.{name}" for name in HEAD_GEMMS if name in self.head]
        return ", ".join([*names, *([HEAD] if len(head) == len(HEAD_GEMMS) else head)]) or "none"


def fp8_gemms(keep_bf16: str, head: str, layers: int, parts: Sequence[str]) -> Fp8Gemms:
    """All GEMMs of the blocks except `keep_bf16`, and the head's in `head`; raises `UsageError` for an unknown name."""
    in_bf16 = set()
    for name in names_in(keep_bf16):
        layer, _, part = name.rpartition(".")
        if part not in parts or (layer and not (layer.isdecimal() and int(layer) < layers)):
            known = (
                f"{', '.join(parts)} or one of a layer like 3.mlp (layers 0 to {layers - 1})" if parts else "nothing here"
            )
            raise UsageError(f"fp8_keep_bf16 takes {known}, found {name!r}")
        in_bf16 |= {(int(layer), part)} if layer else {(n, part) for n in range(layers)}
    chosen = names_in(head)
    if unknown := [name for name in chosen if name not in HEAD_GEMMS]:
        raise UsageError(f"fp8_head takes auto, none, {', '.join(HEAD_GEMMS)}, found {unknown[0]!r}")
    if "wgrad" in chosen and "dgrad" not in chosen:  # the logits' gradient exists in 16 bits or in fp8, not in both
        raise UsageError(f"fp8_head wgrad needs dgrad, found {head!r}; try --fp8-head {','.join(['dgrad', *chosen])}")
    return Fp8Gemms(frozenset({(layer, part) for layer in range(layers) for part in parts} - in_bf16), frozenset(chosen))


def names_in(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def tag_of(row: ParameterRow | ActivationRow, forms: Forms) -> Fp8 | None:
    """The fp8 forms of a row's tensor, or None."""
    return forms.get(row.name.rpartition(".")[2])


@dataclass(frozen=True)
class QuantizedRow:
    """A quantised tensor. `stored_as`: the buffers of its forms, which gradients share across blocks."""

    name: str
    kind: str
    format: torch.dtype
    part: str  # "3.mlp", "head"
    stored_as: str
    plain: str  # name of the 16-bit tensor, or ""
    workspace: str = ""


def quantized_table(
    parameters: Table, rows: Sequence[ActivationRow], forms: Forms, gemms: Fp8Gemms, gradients: GradientFormats
) -> tuple[QuantizedRow, ...]:
    """All quantised tensors with scales from earlier steps, by layer and part, weights last."""
    layers = 1 + max((layer for layer, _ in gemms.blocks), default=-1)
    others, weights = list[QuantizedRow](), list[QuantizedRow]()
    tagged = [(row, tag) for row in rows if (tag := tag_of(row, forms))]
    tagged_weights = [(row, tag) for row in parameters if (tag := tag_of(row, forms))]
    for layer, part in product(range(layers), dict.fromkeys(tag.part for tag in forms.values())):
        if (layer, part) not in gemms.blocks:
            continue
        label, prefix = f"{layer}.{part}", f"blocks.{layer}."
        read = [(row, tag) for row, tag in tagged if tag.part == part]
        for row, tag in read:
            if row.name.startswith(prefix):
                plain = row.name if tag.keeps_16bit else ""
                others.append(QuantizedRow(row.name, ACTIVATION, E4M3, label, row.name, plain))
        for row, tag in read:
            if tag.gradient:
                stored = row.name, (row.of or row.name) if tag.keeps_16bit else "", tag.workspace
                others.append(QuantizedRow(prefix + row.name, GRADIENT, gradients[0], label, *stored))
        for weight, tag in tagged_weights:
            if tag.part == part and weight.name.startswith(prefix):
                weights.append(QuantizedRow(weight.name, WEIGHT, E4M3, label, weight.name, weight.name))
    if gemms.head:
        norm = next(row for row, tag in tagged if tag.part == HEAD and not tag.gradient)
        others.append(QuantizedRow(norm.name, ACTIVATION, E4M3, HEAD, norm.name, norm.name))
        table = next(row for row, tag in tagged_weights if tag.part == HEAD)
        weights.append(QuantizedRow(table.name, WEIGHT, E4M3, HEAD, table.name, table.name))
    return (*others, *weights)


def longest_side(parameters: Table) -> int:
    """The longest side of the blocks' matrices."""
    return max(max(row.shape) for row in parameters if row.group == "matrix")


def activation_buffers(
    rows: Iterable[ActivationRow], forms: Forms, gemms: Fp8Gemms, gradients: GradientFormats, recompute: int
) -> Iterator[Buffer]:
    """The activations' buffers: `.rows` and `.columns` of each quantised tensor, in addition to its 16-bit form or instead.

    Only the forward reads `rows`, unless the backward reruns that GEMM; the weight gradient reads `columns`."""
    for row in rows:
        if (tag := tag_of(row, forms)) is None:
            if not row.of:
                yield row.buffer(recompute)
        elif tag.part == HEAD:
            yield from head_buffers(row, tag, gemms, recompute)
        elif tag.gradient:
            yield from gradient_buffers(row, tag, gemms, gradients)
        elif (int(row.name.split(".")[1]), tag.part) not in gemms.blocks:
            yield row.buffer(recompute)
        else:
            yield from block_buffers(row, tag, recompute)


def head_buffers(row: ActivationRow, tag: Fp8, gemms: Fp8Gemms, recompute: int) -> Iterator[Buffer]:
    """Buffers of the head's input, or of the logits, which their gradient overwrites."""
    kind = E5M2 if tag.gradient else E4M3
    yield row.buffer(recompute)
    if (gemms.head and not tag.gradient) or "dgrad" in gemms.head:
        yield Buffer(f"{row.name}.rows", row.shape, kind, KIND, row.ticks)
    if "wgrad" in gemms.head:
        yield Buffer(f"{row.name}.columns", row.shape[::-1], kind, KIND, row.ticks)


def gradient_buffers(row: ActivationRow, tag: Fp8, gemms: Fp8Gemms, gradients: GradientFormats) -> Iterator[Buffer]:
    """Buffers of a gradient that all blocks write in turn, some in 16 bits, others in fp8."""
    in_fp8 = tuple(ticks for layer, ticks in enumerate(row.ticks) if (layer, tag.part) in gemms.blocks)
    in_16_bits = row.ticks if tag.keeps_16bit else tuple(ticks for ticks in row.ticks if ticks not in in_fp8)
    if in_16_bits and not row.of:
        yield Buffer(row.name, row.shape, row.dtype, KIND, in_16_bits)
    if in_fp8:
        usual, wide = gradients
        yield from forms(row.name, row.shape, (usual, wide if tag.wide else usual), in_fp8, in_fp8)
    if in_fp8 and tag.workspace:
        yield Buffer(tag.workspace, row.shape, row.dtype, KIND, in_fp8)


def block_buffers(row: ActivationRow, tag: Fp8, recompute: int) -> Iterator[Buffer]:
    """Buffers of a block's activation in fp8."""
    if tag.keeps_16bit:
        yield row.buffer(recompute)
    ((first, last),) = row.ticks
    lifetimes = row.lifetimes(recompute)
    redone = tag.rerun_from <= recompute < row.recomputed_from
    in_forward = lifetimes if redone or recompute >= row.recomputed_from else ((first, first),)
    if recompute >= WHOLE_BLOCKS:
        in_forward = (first, first), (lifetimes[-1][0],) * 2
    yield from forms(row.name, row.shape, (E4M3, E4M3), in_forward, ((last, last),) if tag.late_columns else lifetimes)


def forms(
    name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype], rows: Intervals, columns: Intervals
) -> Iterator[Buffer]:
    yield Buffer(f"{name}.rows", shape, dtypes[0], KIND, rows)
    yield Buffer(f"{name}.columns", shape[::-1], dtypes[1], KIND, columns)


def weight_buffers(table: Iterable[QuantizedRow], parameters: Table, gemms: Fp8Gemms) -> Iterator[Buffer]:
    """The fp8 forms of the weights. The head's forward reads `rows`, its dgrad `columns`."""
    shapes = {row.name: row.shape for row in parameters}
    for row in table:
        if row.kind != WEIGHT:
            continue
        if row.part != HEAD or "forward" in gemms.head:
            yield Buffer(f"{row.name}.rows", shapes[row.name], row.format, "fp8 weights")
        if row.part != HEAD or "dgrad" in gemms.head:
            yield Buffer(f"{row.name}.columns", shapes[row.name][::-1], row.format, "fp8 weights")


def without_columns(buffers: Iterable[Buffer]) -> list[Buffer]:
    """Drops `columns`, which only weight and input gradients read."""
    return [buffer for buffer in buffers if not buffer.name.endswith(".columns")]


def scaling_buffers(count: int, statistics_parts: int) -> list[Buffer]:
    """Buffers of the tensors' scales and statistics. The last row is the static scale of the logits' gradient."""
    kind = "fp8 scales"
    return [
        Buffer("fp8.scaling", (count + 1, SCALING_PLACES), torch.float32, kind),
        Buffer("fp8.statistics", (count + 1, STATISTICS_PLACES, statistics_parts), torch.float32, kind),
    ]


def quantized_tensors(
    table: Sequence[QuantizedRow], views: Mapping[str, Tensor], weights: Mapping[str, Tensor], *, current: bool
) -> dict[str, Any]:
    """The `Quantized` tensors, under the names that the model's dataclasses look up. `weights`: 16-bit views of the
    parameters; `current`: use current scaling. A gradient that exists only in fp8 in all blocks is None outside
    them."""
    only_fp8 = (row.stored_as for row in table if row.kind == GRADIENT and not row.plain)
    tensors: dict[str, Any] = {name: None for name in only_fp8 if name not in views}
    for index, row in enumerate(table):
        plain = (weights if row.kind == WEIGHT else views).get(row.plain)
        name = HEAD if row.kind == WEIGHT and row.part == HEAD else row.name
        tensors[name] = quantized(views, row.stored_as, index, plain, current, views.get(row.workspace))
    if "logits.rows" in views:  # its static scale is in the row after the table's
        tensors["logits"] = quantized(views, "logits", len(table), views["logits"], False, None)
    return tensors


def quantized(
    views: Mapping[str, Tensor], stored_as: str, index: int, plain: Tensor | None, current: bool, workspace: Tensor | None
) -> Quantized:
    rows, columns = (views.get(f"{stored_as}.{form}") for form in ("rows", "columns"))
    scaling, statistics = views["fp8.scaling"][index], views["fp8.statistics"][index]
    return Quantized(rows, columns, scaling, statistics, plain, current, workspace)
