"""Bytes that one block of a training step moves per token, in bf16 and in fp8, by operation.

In units of C bytes: a tensor (N, C) is 2 of them in 16 bits and 1 in fp8. Each operation reads its inputs once and writes
its outputs once, without weights, their gradients and tensors of one number per row. Nothing is recomputed.
"""

from dataclasses import dataclass
from math import prod

import torch

from handgrad.joins.fp8.formats import E5M2
from handgrad.joins.fp8.tables import Fp8Gemms, activation_buffers
from handgrad.memory.arena import Buffer
from handgrad.models import architecture
from handgrad.ops import reference
from handgrad.settings.config import ModelShape

Units = tuple[int, int]  # read and written


@dataclass(frozen=True)
class Row:
    """An operation: the tensors that it reads and writes, with their units, in bf16 and in fp8; "" where there is none."""

    name: str
    bf16: str
    bf16_units: Units
    fp8: str
    fp8_units: Units


# Tensors have their names in the activation table. A block's stream comes from `embedded`, as the first block's does; its
# last gradient counts like that of the other blocks, which write it in fp8 for the block below.
STREAM, STREAM8 = "dresidual dln residual_mid -> dresidual", "dresidual_mid.rows -> dresidual_mid.columns"
BELOW, BELOW8 = "dresidual dln embedded -> dresidual", "dresidual_out.rows -> dresidual_out.columns"
ROWS = (
    Row("layer norm 1", "embedded -> ln1", (2, 2), "embedded -> ln1.rows", (2, 1)),
    Row("layer norm 1, transposed", "", (0, 0), "ln1.rows -> ln1.columns", (1, 1)),
    Row("qkv", "ln1 -> qkv", (2, 6), "ln1.rows -> qkv", (1, 6)),
    Row("attention", "qkv -> atty", (6, 2), "qkv -> atty atty.rows atty.columns", (6, 4)),
    Row("proj, residual", "atty embedded -> residual_mid", (4, 2), "atty.rows embedded -> residual_mid", (3, 2)),
    Row("layer norm 2", "residual_mid -> ln2", (2, 2), "residual_mid -> ln2.rows", (2, 1)),
    Row("layer norm 2, transposed", "", (0, 0), "ln2.rows -> ln2.columns", (1, 1)),
    Row("fc (bf16: with GELU)", "ln2 -> fc gelu", (2, 16), "ln2.rows -> fc", (1, 8)),
    Row("GELU", "", (0, 0), "fc -> gelu.rows", (8, 4)),
    Row("fcproj, residual", "gelu residual_mid -> residual_out", (10, 2), "gelu.rows residual_mid -> residual_out", (6, 2)),
    Row("fcproj dgrad (bf16: with GELU')", "dresidual fc -> dhidden", (10, 8), "dresidual_out.rows -> dgelu", (1, 8)),
    Row("GELU'", "", (0, 0), "dgelu fc -> dhidden.rows dhidden.columns gelu.columns", (16, 12)),
    Row("fcproj wgrad", "dresidual gelu ->", (10, 0), "dresidual_out.columns gelu.columns ->", (5, 0)),
    Row("fc dgrad", "dhidden -> dln", (8, 2), "dhidden.rows -> dln", (4, 2)),
    Row("fc wgrad", "dhidden ln2 ->", (10, 0), "dhidden.columns ln2.columns ->", (5, 0)),
    Row("fc bias", "dhidden ->", (8, 0), "dhidden.columns ->", (4, 0)),
    Row("layer norm 2'", STREAM, (6, 2), f"{STREAM} dresidual_mid.rows", (6, 3)),
    Row("layer norm 2', transposed", "", (0, 0), STREAM8, (1, 1)),
    Row("proj dgrad", "dresidual -> datty", (2, 2), "dresidual_mid.rows -> datty", (1, 2)),
    Row("proj wgrad", "dresidual atty ->", (4, 0), "dresidual_mid.columns atty.columns ->", (2, 0)),
    Row("attention'", "datty atty qkv -> dqkv", (10, 6), "datty atty qkv -> dqkv.rows dqkv.columns", (10, 6)),
    Row("qkv dgrad", "dqkv -> dln", (6, 2), "dqkv.rows -> dln", (3, 2)),
    Row("qkv wgrad", "dqkv ln1 ->", (8, 0), "dqkv.columns ln1.columns ->", (4, 0)),
    Row("qkv bias", "dqkv ->", (6, 0), "dqkv.columns ->", (3, 0)),
    Row("layer norm 1'", BELOW, (6, 2), f"{BELOW} dresidual_out.rows", (6, 3)),
    Row("layer norm 1', transposed", "", (0, 0), BELOW8, (1, 1)),
)

# No block's: the loss head's.
HEAD = {"lnf", "dlnf", "logits"}


def block_buffers(shape: ModelShape, batch: int, *, fp8: bool) -> dict[str, Buffer]:
    """The activations of a model's first block and the shared ones, of (N, C) elements or more."""
    model = architecture(shape)
    every = frozenset((layer, part) for layer in range(shape.num_layers) for part in shape.fp8_parts)
    N, gemms = batch * shape.sequence_length, Fp8Gemms(every if fp8 else frozenset())
    rows = model.activations(shape, batch, shape.sequence_length, torch.bfloat16, reference, chunk=N, training=True)
    rows = activation_buffers(rows, shape.forms, gemms, (E5M2, E5M2), recompute=0)
    named = {row.name.removeprefix("blocks.0."): row for row in rows}
    others = {name for name in named if name.startswith("blocks.")} | HEAD
    return {name: row for name, row in named.items() if name not in others and prod(row.shape) >= N * shape.channels}


def units_of(operands: str, buffers: dict[str, Buffer], unit_bytes: int) -> Units:
    """(units read, units written) by the tensors of "read ... -> written ..."."""
    read, written = (side.split() for side in (operands or "->").split("->"))
    size_bytes = [sum(buffers[name].size_bytes for name in names) for names in (read, written)]
    assert all(size % unit_bytes == 0 for size in size_bytes), operands
    return size_bytes[0] // unit_bytes, size_bytes[1] // unit_bytes


def check(shape: ModelShape, batch: int) -> None:
    """Checks every row against the tensors of a model of this shape, and that each tensor of a block has an operation."""
    unit_bytes = batch * shape.sequence_length * shape.channels
    for fp8 in (False, True):
        buffers, named = block_buffers(shape, batch, fp8=fp8), set()
        for row in ROWS:
            operands, units = (row.fp8, row.fp8_units) if fp8 else (row.bf16, row.bf16_units)
            found = units_of(operands, buffers, unit_bytes)
            assert found == units, f"{row.name}: {operands} is {found}, the table says {units}"
            named |= set(operands.split()) - {"->"}
        assert named == set(buffers), f"in the table or in the model alone: {sorted(named ^ set(buffers))}"


def totals() -> tuple[Units, Units]:
    """(read, written) in bf16 and in fp8."""
    kinds = [row.bf16_units for row in ROWS], [row.fp8_units for row in ROWS]
    bf16, fp8 = ((sum(u[0] for u in units), sum(u[1] for u in units)) for units in kinds)
    return bf16, fp8


def table() -> list[str]:
    lines = [f"{'per token and block, units of C bytes':<40}{'bf16 read':>10}{'written':>9}{'fp8 read':>10}{'written':>9}"]
    bf16, fp8 = totals()
    for name, before, after in (*((r.name, r.bf16_units, r.fp8_units) for r in ROWS), ("total", bf16, fp8)):
        lines.append(f"{name:<40}{before[0]:>10}{before[1]:>9}{after[0]:>10}{after[1]:>9}")
    return [*lines, f"all: bf16 {sum(bf16)}, fp8 {sum(fp8)}, {sum(fp8) / sum(bf16):.3f} of it"]


def record() -> dict[str, object]:
    """The table for a results file."""
    rows = [
        {
            "operation": row.name,
            "bf16": row.bf16,
            "bf16_read_written": row.bf16_units,
            "fp8": row.fp8,
            "fp8_read_written": row.fp8_units,
        }
        for row in ROWS
    ]
    bf16, fp8 = totals()
    return {"unit": "C bytes per token and block", "rows": rows, "bf16_read_written": bf16, "fp8_read_written": fp8}
