"""A checkpoint into a folder that llm.c reads, bit by bit held against what it came from; and such files into a checkpoint.

model.bin               the weights
gpt2_tokenizer.bin      the tokens, as llm.c's sampling wants them
tokenizer.json          if the vocabulary is trained: llm.c's file cannot encode
with the optimizer:
model_<step>.bin        model.bin, by the name under which llm.c looks for it to go on
state_<step>_00000.bin  moments and master weights
DONE_<step>             empty: all of them are there
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from handgrad.checkpoint import OPTIMIZER_FILE, WEIGHTS_FILE, Checkpoint, Stored, write_file
from handgrad.data.tokenizer import tokenizer_files
from handgrad.errors import DataError, StorageError, UsageError
from handgrad.files import file_sha256
from handgrad.interop.folders import check_free, whole_folder, write_imported
from handgrad.interop.hf_export import Exported, load_exact, logits
from handgrad.interop.huggingface import opened
from handgrad.interop.llmc_model import LlmcModel, Values, read_model, write_model
from handgrad.interop.llmc_state import PARTS, OptimizerState, read_state, write_state
from handgrad.interop.llmc_tokenizer import tokenizer_bytes
from handgrad.models import parameter_table
from handgrad.models.rows import ParameterRow

MODEL_FILE, TOKENS_FILE = "model.bin", "gpt2_tokenizer.bin"


def export_llmc(
    checkpoint: Checkpoint, folder: Path, dtype: torch.dtype = torch.float32, *, with_optimizer: bool = False
) -> Exported:
    """`handgrad export --to llmc`: writes `folder`, whole and read back, or leaves nothing there.

    Every number that comes back from the files is compared, bit for bit, with the checkpoint's in `dtype`. Raises
    `UsageError`: `folder` is taken, a token is too long, there are no moments; `DataError`: the checkpoint does not hold;
    `StorageError`: the disk refuses, or what it gives back is not what was written.
    """
    check_free(folder)
    if with_optimizer and not has_moments(checkpoint):
        raise UsageError(f"expected a run's moments in {checkpoint.folder}, found none: it was imported without them")
    model = load_exact(checkpoint)
    flat, shape, table = model.views["parameters"], model.shape, parameter_table(model.shape)
    weights = stored_tensors(checkpoint, WEIGHTS_FILE)
    moments = tuple(stored_tensors(checkpoint, OPTIMIZER_FILE, f"{part}.") for part in ("m", "v"))
    masters = weights if stored_dtype(checkpoint) == torch.float32 else None
    tokens = tokenizer_bytes(model.tokenizer)
    with whole_folder(folder) as partial:
        write_model(partial / MODEL_FILE, shape, weights, dtype)
        write_file(partial / TOKENS_FILE, [tokens])
        for name, content in tokenizer_files(model.tokenizer).items():
            write_file(partial / name, [content])
        state_file = partial / f"state_{checkpoint.step:08d}_00000.bin"
        if with_optimizer:
            write_state(state_file, shape, checkpoint.step, moments, masters)
            (partial / f"model_{checkpoint.step:08d}.bin").symlink_to(MODEL_FILE)
            write_file(partial / f"DONE_{checkpoint.step:08d}", [])
        try:
            found = read_model(partial / MODEL_FILE)
            same = found.shape == shape and found.tokenizer.sha256 == model.tokenizer.sha256
            same = same and all_equal(table, found.weight, lambda row: weights(row).to(dtype))
            if with_optimizer:
                state = read_state(state_file, found)
                same = same and state.step == checkpoint.step and state.has_master == (masters is not None)
                for part, wanted in zip(PARTS, (*moments, masters), strict=True):
                    same = same and (not wanted or all_equal(table, functools.partial(state.values, part), wanted))
        except DataError as error:
            raise StorageError(f"what was written does not read back: {error}") from None
        if not same:
            raise StorageError(
                f"reading back {folder} gave other numbers than {checkpoint.folder}; check the disk, try again"
            )
        before = logits(model)
        for row in table:
            row.stored(flat).copy_(found.weight(row))
        rounding = float((before - logits(model)).abs().max())
    return Exported(folder, (folder / MODEL_FILE).stat().st_size, len(before), rounding)


def stored_tensors(checkpoint: Checkpoint, file: str, prefix: str = "") -> Values:
    """A checkpoint's tensors by row, read when they are asked for. They raise `DataError`."""
    return lambda row: checkpoint.tensor(file, prefix + row.name, row.stored_shape)


def has_moments(checkpoint: Checkpoint) -> bool:
    with opened(checkpoint.folder / OPTIMIZER_FILE) as stored:
        return "m.wte" in stored.keys()  # noqa: SIM118


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """bf16 in a run without master weights, else float32."""
    with opened(checkpoint.folder / WEIGHTS_FILE) as stored:
        return torch.bfloat16 if stored.get_slice("wte").get_dtype() == "BF16" else torch.float32


def all_equal(table: Iterable[ParameterRow], found: Values, wanted: Values) -> bool:
    return all(torch.equal(found(row), wanted(row).float()) for row in table)


@dataclass(frozen=True)
class Imported:
    """What an import read; `state` if the optimizer's came with it."""

    model: LlmcModel
    state: OptimizerState | None


def import_llmc(source: Path, out: Path, tokenizer: str = "", optimizer: Path | None = None) -> Imported:
    """`handgrad import model.bin`: a model file into a run-like folder `out`, in float32, which holds bf16 exactly. With an
    `optimizer` state the weights are its masters, if it has any, and `train --out` can go on from its step.

    Raises as `read_model`, `read_state` and `write_imported`; nothing is left at `out` then.
    """
    check_free(out)
    model = read_model(source, tokenizer)
    state = read_state(optimizer, model) if optimizer else None
    table, words = parameter_table(model.shape), model.tokenizer

    def stored(name: str, row: ParameterRow, values: Values) -> Stored:
        return Stored(name, torch.float32, row.stored_shape, lambda: values(row).contiguous())

    def master(row: ParameterRow) -> Tensor:
        assert state is not None
        state.check_master(row)
        return state.values("master", row)

    tensors = [stored(row.name, row, master if state and state.has_master else model.weight) for row in table]
    files = [source]
    if state:
        for part in ("m", "v"):
            tensors += [stored(f"{part}.{row.name}", row, functools.partial(state.values, part)) for row in table]
        files += state.paths
    origin = {"from": "llm.c", "source": str(source), "sha256": {path.name: file_sha256(path) for path in files}}
    write_imported(out, model.shape, words, tensors, origin, resume_step=state.step if state else None)
    return Imported(model, state)
