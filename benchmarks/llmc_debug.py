"""llm.c's debug state: a batch with PyTorch's logits, loss and gradients, computed here and compared.

    python -m benchmarks.llmc_debug debug_state.bin model.bin

It computes in float32 with the operations that training uses on this machine, and exits with 1 if a tensor differs by more
than twice the error of float32 itself.

    header    [0] 20240327  [1] 2  [2] B  [3] T
    inputs (B, T) int32 · targets (B, T) int32 · logits (B, T, V) float32 · loss float32
    gradients of the mean loss, float32, in the order of the model file, the vocabulary padded

Source: llm.c, train_gpt2.py (`write_state`) and test_gpt2.c.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from handgrad.data.llmc_header import DEBUG_STATE, HEADER_BYTES, check_size, read_header
from handgrad.errors import DataError, user_error
from handgrad.interop.llmc import ORDER, LlmcModel, count_elements, read_model, read_numbers, without_padding
from handgrad.machine import devices
from handgrad.machine.backend import choose_backend
from handgrad.memory.arena import Buffer, make_plan
from handgrad.memory.rows import ParameterRow, flat_elements, named
from handgrad.models import architecture, named_weights, parameter_table
from handgrad.models.passes import run
from handgrad.ops import reference


@dataclass(frozen=True)
class DebugState:
    """A batch of a model, with its writer's results for it."""

    model: LlmcModel
    path: Path
    tokens: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64
    loss: float  # the mean over the batch, in nats

    @property
    def logits_offset(self) -> int:
        return HEADER_BYTES + 8 * self.tokens.numel()

    def logits(self) -> Tensor:
        """(B T, V) float32, from the mapped file."""
        rows, width = self.tokens.numel(), self.model.shape.vocab_size
        return read_numbers(self.path, torch.float32, self.logits_offset, rows * width).view(rows, width)

    def gradient(self, row: ParameterRow) -> Tensor:
        """Of a parameter, (`row.stored_shape`) float32. Raises `DataError`: non-finite, or padding that is not zero."""
        span = self.model.spans[row.name]
        before = self.logits_offset + 4 * (self.tokens.numel() * self.model.shape.vocab_size + 1)
        values = read_numbers(self.path, torch.float32, before + 4 * span.offset, span.elements)
        return without_padding(values, row, f"the gradient of {row.name} in {self.path}")


def read_debug_state(path: Path, model: LlmcModel) -> DebugState:
    """Opens a debug state of `model`; `DataError` if it is none, not whole, or of another model."""
    words, size = read_header(path, DEBUG_STATE, (2,))
    batch, length = words[2:4]
    shape = model.shape
    if batch < 1 or not 1 <= length <= shape.sequence_length:
        raise DataError(
            f"expected a batch of 1 or more texts of 1 to {shape.sequence_length} tokens in {path}, found {batch} of"
            f" {length}; it is not {model.path.name}'s"
        )
    tokens = batch * length
    expected = HEADER_BYTES + 4 * (2 * tokens + tokens * shape.vocab_size + 1 + count_elements(model.spans))
    check_size(path, expected, size, f"{batch} texts of {length} tokens through {model.path.name}")
    ids = torch.from_numpy(np.fromfile(path, "<i4", 2 * tokens, offset=HEADER_BYTES)).long().view(2, batch, length)
    if not ((ids >= 0) & (ids < shape.vocab_size)).all():
        raise DataError(f"expected token ids from 0 to {shape.vocab_size - 1} in {path}, found others; it is damaged")
    loss = float(read_numbers(path, torch.float32, HEADER_BYTES + 4 * (2 + shape.vocab_size) * tokens, 1))
    return DebugState(model, path, ids[0], ids[1], loss)


@dataclass(frozen=True)
class Compared:
    """A tensor of the debug state against ours, over all layers: ||here - file|| / ||file||."""

    name: str
    error: float
    tolerance: float  # twice the error of float32 itself: ||float32 - float64|| / ||float64||, of the reference operations

    @property
    def fine(self) -> bool:
        return self.error <= self.tolerance


def compare(state: DebugState, device: torch.device, ops: ModuleType) -> Iterator[Compared]:
    """Runs forward and backward of the state's batch in float32 by `ops` on `device` and compares the logits, the loss and
    the gradient of each parameter with the state.

    The tolerance is measured, not chosen: the reference operations compute the same batch on the CPU, once in float64 and
    once in float32. Both sides of the comparison are float32 and may err that much.
    """
    cpu = torch.device("cpu")
    exact = compute(state, torch.float64, cpu, reference)
    rounded = compute(state, torch.float32, cpu, reference)
    here = rounded if ops is reference and device == cpu else compute(state, torch.float32, device, ops)
    table = parameter_table(state.model.shape)
    # A mean errs at most as its terms do (root mean square), plus its rounding; the error of a single number is chance.
    yield Compared(
        "loss",
        distance([here["losses"][0].mean()], [torch.tensor(state.loss)]),
        2 * (distance(rounded["losses"], exact["losses"]) + 2.0**-24),
    )
    file = {"logits": [state.logits()]}
    for name in ORDER:
        file[name] = [state.gradient(row) for row in table if row.name.rpartition(".")[2] == name]
    for name, theirs in file.items():
        yield Compared(name, distance(here[name], theirs), 2 * distance(rounded[name], exact[name]))


def distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    """||found - wanted|| / ||wanted|| over all tensors, in float64."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, wanted, strict=True)]
    difference = sum(float((a - b).square().sum()) for a, b in pairs)
    size = sum(float(b.square().sum()) for _, b in pairs)
    return (difference / size) ** 0.5 if size else float(difference > 0)


def compute(state: DebugState, dtype: torch.dtype, device: torch.device, ops: ModuleType) -> dict[str, list[Tensor]]:
    """The logits (N, V), the losses (N), and the gradients of their mean by name, a tensor per layer, on the CPU."""
    shape, (batch, length) = state.model.shape, state.tokens.shape
    table, tokens = parameter_table(shape), state.tokens.numel()
    model, layers = architecture(shape), shape.num_layers
    rows = model.activations(shape, batch, length, dtype, ops, chunk=tokens, training=True)
    ops.check_sizes(length=length, num_heads=shape.num_heads, channels=shape.channels)
    flats = [Buffer(name, (flat_elements(table),), dtype, name) for name in ("parameters", "gradients")]
    views = make_plan([*flats, *(row.buffer(recompute=0) for row in rows if not row.of)]).allocate(device)
    act, d = named(model.Activations, views, layers), named(model.Gradients, views, layers)
    flat, flat_gradients = views["parameters"], views["gradients"]
    for row in table:
        row.stored(flat).copy_(state.model.weight(row))
    act.tokens.copy_(state.tokens)
    act.targets.copy_(state.targets)
    act.sorted_positions.copy_(torch.argsort(state.tokens.flatten(), stable=True))
    weights, gradients = named_weights(shape, flat, table), named_weights(shape, flat_gradients, table)
    forward = model.forward(ops, weights, act, shape)
    run(forward)
    ops.linear_forward(act.logits, act.lnf, weights.head, None, scratch=act.scratch)
    found = {"logits": [act.logits[:, : shape.vocab_size].cpu().clone()]}
    scale = torch.full((1,), 1 / tokens, dtype=act.losses.dtype, device=device)
    run(forward)
    run(model.backward(ops, weights, gradients, act, d, scale, shape, recompute=0))
    found["losses"] = [act.losses.cpu()]
    for row in table:
        found.setdefault(row.name.rpartition(".")[2], []).append(row.stored(flat_gradients).cpu())
    return found


def examine_gradients(state_file: Path, model_file: Path) -> Iterator[tuple[bool, str]]:
    """(True if it agrees, line) for the logits, the loss and each gradient, by the operations that training uses here."""
    device = devices.resolve_device("auto")
    devices.set_arithmetic(device, "fp32")
    ops = choose_backend("auto", device)
    state = read_debug_state(state_file, read_model(model_file))
    batch, length = state.tokens.shape
    yield True, f"{batch} texts of {length} tokens on {devices.describe(device)}, by the {ops.__name__.rpartition('.')[2]}"
    for found in compare(state, device, ops):
        name = found.name if found.name in ("logits", "loss") else f"gradient of {found.name}"
        yield found.fine, f"{name}: relative error {found.error:.2g}, at most {found.tolerance:.2g}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="This machine's logits, loss and gradients beside llm.c's debug state.")
    parser.add_argument("state", type=Path, help="gpt2_124M_debug_state.bin, of llm.c's train_gpt2.py")
    parser.add_argument("model", type=Path, help="the model file that it was written with")
    parsed = parser.parse_args(arguments)
    agrees = True
    try:
        for ok, line in examine_gradients(parsed.state, parsed.model):
            agrees = agrees and ok
            print(f"{'ok  ' if ok else 'FAIL'}  {line}", flush=True)
    except DataError as error:
        print(user_error(error), file=sys.stderr)
        return error.exit_code
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
