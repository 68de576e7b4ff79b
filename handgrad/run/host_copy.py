"""The state of a run in host memory, planned like all memory: a copy from which a save is written while training goes on,
and, with offload, the optimizer's state itself."""

import math
import weakref
from typing import Any

import torch
from torch import Tensor

from handgrad.errors import MemoryShort
from handgrad.format import human_bytes
from handgrad.joins.parallel.ranks import Ranks
from handgrad.machine import devices
from handgrad.memory.arena import Buffer, Plan, make_plan
from handgrad.settings.config import RunConfig
from handgrad.storage import checkpoint
from handgrad.storage.checkpoint import Stored
from handgrad.training.design import Design

KIND = "copy for saves"
REST_BYTES = 1 << 30  # of a GPU's process beside the copy: libraries, batches, pages on their way to the disk


def checkpoint_rows(design: Design) -> list[Buffer]:
    """The tensors of a checkpoint, whole, in the order in which it holds them."""
    dtypes = {buffer.name: buffer.dtype for buffer in design.buffers}
    tables = [(design.parameters, dtypes.get("master", dtypes["parameters"]))]
    tables += [(layout.rows, dtypes[f"optimizer.{name}"]) for name, layout in design.optimizer_state.items()]
    return [Buffer(row.name, row.stored_shape, dtype, KIND) for table, dtype in tables for row in table]


def copy_plans(design: Design, ranks: int) -> list[Plan]:
    """The memory for the tensors that each rank writes."""
    shares = checkpoint.split_among_writers(checkpoint_rows(design), ranks)
    return [make_plan(buffer for buffers in files.values() for buffer in buffers) for files in shares]


def host_memory(design: Design, ranks: Ranks) -> tuple[float, float]:
    """(bytes that a machine's ranks need for their copies and the rest, bytes that are free), the same on all ranks."""
    rest = design.host_plan.total_bytes + (design.plan.total_bytes if design.device.type == "cpu" else REST_BYTES)
    free = devices.available_bytes(torch.device("cpu"))
    mine = copy_plans(design, ranks.size)[ranks.rank].total_bytes + rest, math.inf if free is None else free
    needed, free = zip(*ranks.all_gather_numbers(mine, "host memory"), strict=True)
    return max(needed) * (ranks.size // ranks.nodes), min(free)


class HostCopy:
    """One rank's share of a checkpoint in host memory. Pinned, it takes a CUDA device's state at the speed of the link; a
    state that lies on the host already needs no second stretch of pinned pages."""

    def __init__(self, design: Design, ranks: Ranks):
        plan = copy_plans(design, ranks.size)[ranks.rank]
        self.size_bytes, self.pinned = plan.total_bytes, design.device.type == "cuda" and not design.host_plan.buffers
        self.storage = {kind: torch.empty(size, dtype=torch.uint8) for kind, size in plan.size_bytes.items()}
        for memory in self.storage.values():
            memory.zero_()  # the system gives the pages now, not in the first save
        self.views = plan.lay_over(self.storage)
        self.files = {
            file: [Stored.of(row.name, self.views[row.name]) for row in rows]
            for file, rows in checkpoint.split_among_writers(checkpoint_rows(design), ranks.size)[ranks.rank].items()
        }
        for memory in self.storage.values() if self.pinned else ():
            pin(memory, "the copy from which saves are written", "--async-save false")

    def copy_state(self, tensors: list[Stored]) -> None:
        """Copies the rank's share. All ranks fetch all tensors: their shards are gathered."""
        for tensor in tensors:
            value = tensor.fetch()
            if tensor.name in self.views:
                self.views[tensor.name].copy_(value, non_blocking=self.pinned)
        if self.pinned:
            torch.cuda.current_stream().synchronize()


def host_state(design: Design) -> dict[str, Tensor]:
    """The views of the host's plan, zeroed: of the optimizer's state that a GPU's run keeps here, pinned."""
    plan = design.host_plan
    storage = {kind: torch.empty(size, dtype=torch.uint8).zero_() for kind, size in plan.size_bytes.items()}
    for kind, memory in storage.items() if design.device.type == "cuda" else ():
        pin(memory, f"the {kind}", "--offload false")
    # A view keeps the memory, but not its pinning: that ends with the tensor of the whole.
    return plan.lay_over(storage) | {f"pinned {kind}": memory for kind, memory in storage.items()}


def pin(memory: Tensor, holds: str, remedy: str) -> None:
    """Pins the memory of a tensor for as long as the tensor lives; raises `MemoryShort`, which says what it `holds` and the
    setting that does without. torch's own pinned memory comes in powers of two, up to twice as much."""
    driver: Any = torch.cuda.cudart()
    if error := int(driver.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
        raise MemoryShort(
            f"the driver does not pin {human_bytes(memory.nbytes)} of host memory for {holds} (CUDA error {error});"
            f" use {remedy}"
        )
    unpins: Any = weakref.finalize(memory, driver.cudaHostUnregister, memory.data_ptr())
    unpins.atexit = False  # the process takes its memory along


def host_copy(config: RunConfig, design: Design, ranks: Ranks) -> tuple[HostCopy | None, list[str]]:
    """The run's copy, allocated, and a line about it for the header. None if it does not fit, or with `async_save` off."""
    if not config.async_save:
        return None, []
    needed, free = host_memory(design, ranks)
    if needed > free:
        return None, [
            f"saves      training waits for them: with a copy in host memory the run needs {human_bytes(needed)},"
            f" {human_bytes(free)} are free"
        ]
    copy = HostCopy(design, ranks)
    each = " a rank" if ranks.size > 1 else ""
    memory = f"{'pinned ' if copy.pinned else ''}host memory"
    return copy, [f"saves      behind training, from a copy of {human_bytes(copy.size_bytes)}{each} in {memory}"]
