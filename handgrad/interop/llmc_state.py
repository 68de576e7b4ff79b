"""llm.c's optimizer state: moments and, if there are any, float32 master weights, in the order of the model file.

    header    [0] 20240527  [1] 1  [2] processes P  [3] rank  [4] has master weights  [5] shuffles  [10] steps done
              [20] 64 bits: the generator of stochastic rounding  [30], [32] 64 bits each: shard and batch of the data
    m, v, (master)    float32 each
    if it shuffles    the data's: 64 bits: shards S; S int32; 64 bits: batches of a shard N; N int32; a Mersenne twister

Every process writes one, `state_<step>_<rank>.bin`. Without ZeRO each of them is whole. With it (stage 1) a process holds
1/P of every tensor of every layer, its rank's part, and these parts lie one after another in the same order.

Source: llm.c, train_gpt2.cu (`save_state`, `gpt2_update`), llmc/zero.cuh (`multi_gpu_get_shard_offset`), llmc/rand.h.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from handgrad.checkpoint import write_file
from handgrad.config import ModelShape
from handgrad.data.llmc_header import HEADER_BYTES, OPTIMIZER, check_size, make_header, read_header
from handgrad.errors import DataError
from handgrad.interop.llmc_model import LlmcModel, Values, all_bytes, count_elements, read_numbers, without_padding
from handgrad.models.rows import ParameterRow

PARTS = ("m", "v", "master")
ROUNDING_SEED = 13371337  # what llm.c starts its generator of stochastic rounding from
TWISTER_BYTES = 8 + 4 + 4 + 624 * 4 + 2 * 4
NO_BATCH_YET = 0xFFFFFFFF  # each half of the 64-bit -1 that llm.c's loader counts from
PROCESSES, RANK, HAS_MASTER, SHUFFLES, STEP, ROUNDING, BATCH = 2, 3, 4, 5, 10, 20, 32


@dataclass(frozen=True)
class OptimizerState:
    """The state of all processes: one file that is whole, or a file of each rank with its part of every tensor."""

    model: LlmcModel
    paths: tuple[Path, ...]  # by rank
    step: int  # optimizer steps done
    has_master: bool

    def values(self, part: str, row: ParameterRow) -> Tensor:
        """m, v or master of a parameter in float32, (`row.stored_shape`). Raises `DataError`: not finite, padding that is
        not zero, a second moment below zero."""
        place, parts = self.model.places[row.name], len(self.paths)
        before = PARTS.index(part) * count_elements(tuple(self.model.places.values())) + place.offset
        start = HEADER_BYTES + 4 * (before // parts)  # whole: `read_state` saw that every tensor can be cut so
        read = [read_numbers(path, torch.float32, start, place.elements // parts) for path in self.paths]
        where = f"{part}.{row.name} of {self.paths[0]}"
        values = without_padding(torch.cat(read) if parts > 1 else read[0], row, where)
        if part == "v" and (values < 0).any():
            raise DataError(f"expected second moments of 0 or more in {where}, found {float(values.min()):.3g}")
        return values

    def check_master(self, row: ParameterRow) -> None:
        """Raises `DataError` if a master weight is not one that the model's weight was rounded from: they are equal in
        float32, and less than one bf16 step apart after stochastic rounding."""
        weight, master = self.model.weight(row), self.values("master", row)
        step = torch.zeros(()) if self.model.dtype == torch.float32 else 2.0**-7 * master.abs() + 2.0**-133
        if bad := int(((weight - master).abs() > step).sum()):
            raise DataError(
                f"expected the master weights of {self.model.path} in {self.paths[0]}, found {bad} others in {row.name};"
                " they are of different steps or runs"
            )


def read_state(path: Path, model: LlmcModel) -> OptimizerState:
    """The state that `path`, the file of any rank, belongs to; those of the other ranks lie beside it.

    Raises `DataError` in one line: not such a file, cut, of another model, or a rank's file that is missing.
    """
    words, size = read_header(path, OPTIMIZER, (1,))
    processes, rank, has_master, step = (words[place] for place in (PROCESSES, RANK, HAS_MASTER, STEP))
    if not 0 <= rank < processes or has_master not in (0, 1) or step < 0:
        raise DataError(
            f"expected a rank below the processes, master weights 0 or 1 and a step of 0 or more in {path}, found {rank} of"
            f" {processes}, {has_master} and {step}; the file is damaged"
        )
    whole = count_elements(tuple(model.places.values()))
    numbers, tail = (2 + has_master) * 4, data_state_bytes(path, size) if words[SHUFFLES] else lambda _: 0
    sizes = f"the {'moments and master weights' if has_master else 'moments'} of {model.path.name}"
    if processes == 1 or size == HEADER_BYTES + numbers * whole + tail(HEADER_BYTES + numbers * whole):
        expected = HEADER_BYTES + numbers * whole
        check_size(path, expected + tail(expected), size, sizes)
        return OptimizerState(model, (path,), step, bool(has_master))
    if any(place.elements % processes for place in model.places.values()):
        raise DataError(f"expected tensors that {processes} processes can share in {path}, found {model.path.name}'s")
    expected = HEADER_BYTES + numbers * whole // processes
    check_size(path, expected + tail(expected), size, f"1/{processes} of {sizes}")
    match = re.fullmatch(r"(.+_)\d{5}(\.bin)", path.name)
    if match is None:
        raise DataError(f"expected a name like state_00001000_00000.bin for one file of {processes}, found {path.name}")
    paths = tuple(path.with_name(f"{match[1]}{each:05d}{match[2]}") for each in range(processes))
    for each, other in enumerate(paths):
        theirs, size = read_header(other, OPTIMIZER, (1,))
        for place, name, wanted in ((RANK, "rank", each), *((p, n, words[p]) for p, n in SHARED)):
            if theirs[place] != wanted:
                raise DataError(f"expected {name} {wanted} in {other}, found {theirs[place]}; it is of another checkpoint")
        tail = data_state_bytes(other, size) if theirs[SHUFFLES] else lambda _: 0
        check_size(other, expected + tail(expected), size, f"1/{processes} of {sizes}")
    return OptimizerState(model, paths, step, bool(has_master))


SHARED = ((PROCESSES, "processes"), (HAS_MASTER, "has master weights"), (STEP, "step"))


def data_state_bytes(path: Path, size: int) -> Callable[[int], int]:
    """How many bytes the data's state takes if it begins at a byte of the file; what is beyond the end counts as zeros."""

    def count_at(start: int) -> int:
        with path.open("rb") as file:
            file.seek(min(start, size))
            return int.from_bytes(file.read(8), "little")

    def length(start: int) -> int:
        shards = count_at(start)
        batches = count_at(start + 8 + 4 * shards)
        return 16 + 4 * (shards + batches) + TWISTER_BYTES

    return length


def write_state(path: Path, shape: ModelShape, step: int, moments: tuple[Values, ...], master: Values | None) -> None:
    """Writes and fsyncs the state of one process: first and second moments, and float32 weights if the model's are rounded
    or llm.c is to keep masters. The data starts from its beginning. Raises OSError."""
    words = {0: OPTIMIZER, 1: 1, PROCESSES: 1, RANK: 0, HAS_MASTER: int(master is not None), SHUFFLES: 0, STEP: step}
    halves = np.array([NO_BATCH_YET, NO_BATCH_YET], "<u4").view("<i4").tolist()
    words |= {ROUNDING: ROUNDING_SEED, BATCH: halves[0], BATCH + 1: halves[1]}

    def content() -> Iterator[memoryview | bytes]:
        yield make_header(words)
        for values in (*moments, *([master] if master else [])):
            yield from all_bytes(shape, values, torch.float32)

    write_file(path, content())
