"""Optimizer offload: master weights and moments stay in pinned host memory and visit the GPU for the update.

The update works piece by piece in two slots of device memory. While it runs on one piece, a copy stream brings the next one
in and another takes the previous one out. An element's update depends on no other element, so updating in pieces gives the
same bits.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from handgrad.errors import MemoryShort
from handgrad.format import human_bytes
from handgrad.memory.arena import Buffer
from handgrad.memory.rows import KIND
from handgrad.optimizers import Owned
from handgrad.training.design import Design
from handgrad.training.state import AT_UPDATE, OPTIMIZER_SCRATCH, TrainingState
from handgrad.training.step import Program

SLOTS = 2
PIECE_ELEMENTS = 1 << 22  # 16 MiB of float32: a third of a millisecond over PCIe 5, much longer than a launch


def divided(rows: dict[str, Buffer]) -> tuple[dict[str, Buffer], list[Buffer]]:
    """Splits the flat buffers into (device rows, host rows)."""
    host = [row for name, row in rows.items() if name == "master" or name.startswith("optimizer.")]
    return {name: row for name, row in rows.items() if row not in host}, host


def buffers(host: list[Buffer]) -> list[Buffer]:
    """The rows of the slots. They reuse activation memory, which is dead at the update."""
    return [
        Buffer(slot_name(slot, row.name), (min(PIECE_ELEMENTS, *row.shape),), row.dtype, KIND, AT_UPDATE)
        for slot in range(SLOTS)
        for row in host
    ]


def slot_name(slot: int, name: str) -> str:
    return f"slot.{slot}.{name}"


@dataclass(frozen=True)
class Piece:
    """A range of the state, on the host and in its device slot."""

    copies: list[tuple[Tensor, Tensor]]  # (on the host, on the device)
    staged: Owned

    def copy_in(self) -> None:
        for host, device in self.copies:
            device.copy_(host, non_blocking=True)

    def copy_out(self) -> None:
        for host, device in self.copies:
            host.copy_(device, non_blocking=True)


def pieces(state: TrainingState) -> Iterator[Piece]:
    """Cuts the ranges that this process updates into pieces, in alternating slots."""
    number = 0
    for part in state.owned:
        for start in range(0, part.weight.numel(), PIECE_ELEMENTS):
            yield piece(state.views, part, slice(start, min(start + PIECE_ELEMENTS, part.weight.numel())), number % SLOTS)
            number += 1


def piece(views: dict[str, Tensor], part: Owned, cut: slice, slot: int) -> Piece:
    """One piece. Without master weights, the weights themselves stay on the device."""
    elements, copies = cut.stop - cut.start, list[tuple[Tensor, Tensor]]()

    def staged(name: str, host: Tensor) -> Tensor:
        copies.append((host[cut], views[slot_name(slot, name)][:elements]))
        return copies[-1][1]

    moved = replace(
        part,
        published=part.published[cut],
        weight=part.weight[cut] if "master" not in views else staged("master", part.weight),
        gradient=part.gradient[cut],
        state={name: staged(f"optimizer.{name}", values) for name, values in part.state.items()},
        first_element=part.first_element + cut.start,
    )
    return Piece(copies, moved)


class OffloadedUpdate:
    """The optimizer's update of offloaded state, as one launch that a CUDA graph can capture."""

    def __init__(self, state: TrainingState):
        design = state.design
        self.pieces = list(pieces(state))
        tensors = state.controls, state.results, state.views.get(OPTIMIZER_SCRATCH)
        self.updates = [partial(design.optimizer.update, design.ops, [piece.staged], *tensors) for piece in self.pieces]
        self.streams = [torch.cuda.Stream() for _ in range(2)] if design.device.type == "cuda" else []
        self.emptied = [torch.cuda.Event() for _ in range(SLOTS)] if self.streams else []  # after copying the slot out

    def __call__(self) -> None:
        if not self.streams:
            for piece, update in zip(self.pieces, self.updates, strict=True):
                piece.copy_in()
                update()
                piece.copy_out()
            return
        main, (inward, outward) = torch.cuda.current_stream(), self.streams
        inward.wait_stream(main)
        for number, (piece, update) in enumerate(zip(self.pieces, self.updates, strict=True)):
            emptied = self.emptied[number % SLOTS]
            with torch.cuda.stream(inward):
                if number >= SLOTS:
                    inward.wait_event(emptied)
                piece.copy_in()
            main.wait_stream(inward)
            update()
            outward.wait_stream(main)
            with torch.cuda.stream(outward):
                piece.copy_out()
                emptied.record(outward)
        main.wait_stream(outward)  # the next forward overwrites the slots


def launches(program: Program, state: TrainingState) -> Program:
    """The plain program with the update of offloaded state."""
    verdict, _ = program.update
    return replace(program, update=[verdict, OffloadedUpdate(state)])


def host_state(design: Design) -> dict[str, Tensor]:
    """Allocates the host plan, zeroed and, for a GPU, pinned; returns its views by name."""
    plan = design.host_plan
    storage = {kind: torch.empty(size, dtype=torch.uint8).zero_() for kind, size in plan.size_bytes.items()}
    for kind, memory in storage.items() if design.device.type == "cuda" else ():
        pin(memory, f"the {kind}", "--offload false")
    # Views keep the memory alive but not its pinning, which ends with the whole tensor: so return that too.
    return plan.lay_over(storage) | {f"pinned {kind}": memory for kind, memory in storage.items()}


def pin(memory: Tensor, holds: str, remedy: str) -> None:
    """Pins a tensor's memory for the tensor's lifetime. Raises `MemoryShort`, which names its content (`holds`) and the
    setting that avoids it (`remedy`). torch's own pinned allocator rounds up to powers of two, up to twice as much."""
    driver: Any = torch.cuda.cudart()
    if error := int(driver.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
        raise MemoryShort(
            f"the driver does not pin {human_bytes(memory.nbytes)} of host memory for {holds} (CUDA error {error});"
            f" use {remedy}"
        )
    unpins: Any = weakref.finalize(memory, driver.cudaHostUnregister, memory.data_ptr())
    unpins.atexit = False  # process exit frees the memory anyway
