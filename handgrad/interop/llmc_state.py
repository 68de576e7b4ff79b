"""llm.c's optimizer state: moments and optionally float32 master weights, in the order of the model file.

    header    [0] 20240527  [1] 1  [2] processes P  [3] rank  [4] has master weights  [5] shuffles  [10] steps done
              [20] 64 bits: the generator of stochastic rounding  [30], [32] 64 bits each: shard and batch of the data
    m, v, (master)    float32 each
    if it shuffles    the data's: 64 bits: shards S; S int32; 64 bits: batches of a shard N; N int32; a Mersenne twister

Every process writes one, `state_<step>_<rank>.bin`. Without ZeRO each of them is whole. With it (stage 1) a process writes
its 1/P of every tensor of every layer, one after another in the same order.

Source: llm.c, train_gpt2.cu (`save_state`, `gpt2_update`), llmc/zero.cuh (`multi_gpu_get_shard_offset`), llmc/rand.h.
"""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from handgrad.data.llmc_header import HEADER_BYTES, OPTIMIZER, check_size, make_header, read_header
from handgrad.errors import DataError
from handgrad.interop.llmc_model import LlmcModel, Values, all_bytes, count_elements, read_numbers, without_padding
from handgrad.memory.rows import ParameterRow
from handgrad.settings.config import ModelShape
from handgrad.storage.tensor_files import write_file

TENSORS = ("m", "v", "master")  # of each parameter, in the file's order
ROUNDING_SEED = 13371337  # llm.c's first state of its generator of stochastic rounding
TWISTER_BYTES = 8 + 4 + 4 + 624 * 4 + 2 * 4
PROCESSES, RANK, HAS_MASTER, SHUFFLES, STEP, ROUNDING, BATCH = 2, 3, 4, 5, 10, 20, 32
CHECKED = {RANK: "rank", PROCESSES: "processes", HAS_MASTER: "has master weights", STEP: "step"}  # in every rank's file


@dataclass(frozen=True)
class OptimizerState:
    """The state of all processes: one whole file, or a file of each rank with its share of every tensor."""

    model: LlmcModel
    paths: tuple[Path, ...]  # by rank
    step: int  # optimizer steps done
    has_master: bool

    def values(self, name: str, row: ParameterRow) -> Tensor:
        """m, v or master of a parameter in float32, (`row.stored_shape`). Raises `DataError`: non-finite, padding that is
        not zero, a second moment below zero."""
        span, files = self.model.spans[row.name], len(self.paths)
        before = TENSORS.index(name) * count_elements(self.model.spans) + span.offset
        start = HEADER_BYTES + 4 * (before // files)  # exact: `read_state` checked that every tensor divides so
        shares = [read_numbers(path, torch.float32, start, span.elements // files) for path in self.paths]
        where = f"{name}.{row.name} of {self.paths[0]}"
        values = without_padding(torch.cat(shares) if files > 1 else shares[0], row, where)
        if name == "v" and (values < 0).any():
            raise DataError(f"expected second moments of 0 or more in {where}, found {float(values.min()):.3g}")
        return values

    def master(self, row: ParameterRow) -> Tensor:
        """The master weight of a parameter. Raises `DataError` if the model's weight cannot be its rounding: they are equal
        in float32, and less than one bf16 step apart after stochastic rounding."""
        weight, master = self.model.weight(row), self.values("master", row)
        step = torch.zeros(()) if self.model.dtype == torch.float32 else 2.0**-7 * master.abs() + 2.0**-133
        if bad := int(((weight - master).abs() > step).sum()):
            raise DataError(
                f"expected the master weights of {self.model.path} in {self.paths[0]}, found {bad} others in {row.name};"
                " they are of different steps or runs"
            )
        return master


def read_state(path: Path, model: LlmcModel) -> OptimizerState:
    """Opens the optimizer's state by `path`, the file of any rank; the other ranks' files lie beside it.

    Raises `DataError`: not such a file, cut, of another model, or a rank's file that is missing.
    """
    words, size = read_header(path, OPTIMIZER, (1,))
    processes, rank, has_master, step = (words[index] for index in (PROCESSES, RANK, HAS_MASTER, STEP))
    if not 0 <= rank < processes or has_master not in (0, 1) or step < 0:
        raise DataError(
            f"expected a rank below the processes, master weights 0 or 1 and a step of 0 or more in {path}, found {rank} of"
            f" {processes}, {has_master} and {step}; the file is damaged"
        )
    tensors_bytes = (2 + has_master) * 4 * count_elements(model.spans)
    contents = f"the {'moments and master weights' if has_master else 'moments'} of {model.path.name}"
    whole_bytes = with_data_state(path, size, HEADER_BYTES + tensors_bytes, words)
    if processes == 1 or size == whole_bytes:
        check_size(path, whole_bytes, size, contents)
        return OptimizerState(model, (path,), step, bool(has_master))
    if any(span.elements % processes for span in model.spans.values()):
        raise DataError(f"expected tensors that {processes} processes can share in {path}, found {model.path.name}'s")
    match = re.fullmatch(r"(.+_)\d{5}(\.bin)", path.name)
    if match is None:
        raise DataError(f"expected a name like state_00001000_00000.bin for one file of {processes}, found {path.name}")
    paths = tuple(path.with_name(f"{match[1]}{each:05d}{match[2]}") for each in range(processes))
    for each, other in enumerate(paths):
        theirs, size = read_header(other, OPTIMIZER, (1,))
        for index, name in CHECKED.items():
            value = each if index == RANK else words[index]
            if theirs[index] != value:
                raise DataError(f"expected {name} {value} in {other}, found {theirs[index]}; it is of another checkpoint")
        share_bytes = with_data_state(other, size, HEADER_BYTES + tensors_bytes // processes, theirs)
        check_size(other, share_bytes, size, f"1/{processes} of {contents}")
    return OptimizerState(model, paths, step, bool(has_master))


def with_data_state(path: Path, size: int, start: int, words: list[int]) -> int:
    """The end of a file of `size` bytes whose data state, if it shuffles, begins at `start`; beyond the end stand zeros."""
    if not words[SHUFFLES]:
        return start
    end = start
    with path.open("rb") as file:
        for _ in ("shards", "batches of a shard"):  # their number, then an int32 for each
            file.seek(min(end, size))
            end += 8 + 4 * int.from_bytes(file.read(8), "little")
    return end + TWISTER_BYTES


def write_state(path: Path, shape: ModelShape, step: int, tensors: Mapping[str, Values]) -> None:
    """Writes and fsyncs the state of one process: m, v, and master if llm.c is to keep master weights. The data starts from
    its beginning. Raises OSError."""
    has_master = int("master" in tensors)
    words = {0: OPTIMIZER, 1: 1, PROCESSES: 1, RANK: 0, HAS_MASTER: has_master, SHUFFLES: 0, STEP: step}
    words |= {ROUNDING: ROUNDING_SEED, BATCH: -1, BATCH + 1: -1}  # the 64-bit -1 that llm.c's loader counts from
    contents = (all_bytes(shape, tensors[name], torch.float32) for name in TENSORS if name in tensors)
    write_file(path, itertools.chain([make_header(words)], *contents))
