"""A checkpoint into a folder that transformers opens, read back and held against the model it came from."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from handgrad.checkpoint import Checkpoint, Stored, safetensors_bytes, write_file
from handgrad.errors import DataError, StorageError
from handgrad.evaluation.load import LoadedModel, load_model
from handgrad.generation.decode import decode_buffers, decode_tensors
from handgrad.interop.folders import check_free, whole_folder, write_text
from handgrad.interop.huggingface import (
    CONFIG_FILE,
    GENERATION_FILE,
    PREFIX,
    WEIGHTS_FILE,
    read_folder,
    their_config,
    their_name,
    their_shape,
    transposed,
)
from handgrad.interop.model_card import CARD_FILE, CURVE_FILE, curve_png, model_card
from handgrad.interop.vocabulary import vocabulary_files
from handgrad.models import architecture, parameter_table
from handgrad.models.rows import ParameterRow
from handgrad.ops import reference

CHECKED_TOKENS = 8  # random tokens whose logits are compared
EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Exported:
    """What an export did: `rounding` is the largest change of a logit by the rounding to `dtype` (0 in float32)."""

    folder: Path
    parameters_bytes: int
    tokens: int
    rounding: float


def export_model(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype = torch.float32) -> Exported:
    """`handgrad export --to hf`: writes `folder`, whole and read back, or leaves nothing there.

    The folder's weights must give bit for bit the logits of the checkpoint's weights in `dtype` on a few random tokens,
    in float32 by the reference operations. Raises `UsageError`: `folder` is taken; `DataError`: the checkpoint does not
    hold; `StorageError`: the disk refuses, or what it gives back is not what was written.
    """
    check_free(folder)
    model = load_exact(checkpoint)
    flat = model.views["parameters"]
    table = parameter_table(model.shape)
    before = logits(model)
    if dtype != torch.float32:
        for row in table:
            row.stored(flat).copy_(row.stored(flat).to(dtype))
    expected = logits(model)
    with whole_folder(folder) as partial:
        write_weights(partial / WEIGHTS_FILE, table, flat, dtype)
        config = their_config(model.shape, model.tokenizer, dtype, model.config.dropout)
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
        write_text(partial / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
        write_text(partial / GENERATION_FILE, json.dumps(ids, indent=2) + "\n")
        for name, content in vocabulary_files(model.tokenizer, model.shape.sequence_length).items():
            write_file(partial / name, [content])
        write_text(partial / CARD_FILE, model_card(checkpoint, model, dtype))
        if curve := curve_png(checkpoint):
            write_file(partial / CURVE_FILE, [curve])
        read_back(partial, model, table)
        if not torch.equal(logits(model), expected):
            raise StorageError(
                f"reading back {folder} gave other logits than {checkpoint.folder}; check the disk, try again"
            )
    size = (folder / WEIGHTS_FILE).stat().st_size
    return Exported(folder, size, len(before), float((before - expected).abs().max()))


def write_weights(path: Path, table: tuple[ParameterRow, ...], flat: Tensor, dtype: torch.dtype) -> None:
    """The parameters as one safetensors file of theirs. Raises OSError."""

    def theirs(row: ParameterRow) -> Tensor:
        stored = row.stored(flat)
        return (stored.t() if transposed(row) else stored).to(dtype).contiguous()

    tensors = [Stored(PREFIX + their_name(row.name), dtype, their_shape(row), lambda row=row: theirs(row)) for row in table]
    write_file(path, safetensors_bytes(tensors, {"format": "pt"}))


def read_back(folder: Path, model: LoadedModel, table: tuple[ParameterRow, ...]) -> None:
    """Fills the model's weights from the folder; raises `StorageError` if it is not the model that was written."""
    try:
        found = read_folder(folder)
        if found.shape != model.shape or found.tokenizer.sha256 != model.tokenizer.sha256:
            raise DataError(f"expected the sizes and the tokenizer of the checkpoint in {folder}, found others")
        model.views["parameters"].fill_(float("nan"))
        for row in table:
            row.view(model.views["parameters"])[row.stored_rows :] = 0
            row.stored(model.views["parameters"]).copy_(found.weight(row))
    except DataError as error:
        raise StorageError(f"what was written does not read back: {error}") from None


def load_exact(checkpoint: Checkpoint) -> LoadedModel:
    """The model in float32 on the CPU, with the buffers that `logits` needs."""
    return load_model(
        checkpoint,
        torch.device("cpu"),
        torch.float32,
        reference,
        lambda config, shape: decode_buffers(shape, 1, torch.float32, reference),
    )


def logits(model: LoadedModel) -> Tensor:
    """The logits (tokens, V) of a few random tokens, always the same ones, in float32."""
    tokens = min(CHECKED_TOKENS, model.shape.sequence_length)
    picks = torch.randint(model.shape.vocab_size, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    buffers = decode_tensors(model.shape, model.views)
    rows = []
    for position, token in enumerate(picks):
        buffers.tokens.fill_(token)
        buffers.positions.fill_(position)
        architecture(model.shape).decode_step(model.ops.decode, model.weights, buffers)
        rows.append(buffers.logits[0, : model.shape.vocab_size].clone())
    return torch.stack(rows)


def push(folder: Path, name: str) -> str:
    """Uploads an exported folder to the Hub as model `name`, private if it is new; returns its address.

    Raises `StorageError` in one line if the Hub does not take it; the folder stays.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    failures: tuple[type[BaseException], ...] = (HfHubHTTPError, HfHubHTTPError.__bases__[0], HFValidationError, OSError)
    try:
        api = huggingface_hub.HfApi()
        address = api.create_repo(name, repo_type="model", private=True, exist_ok=True)
        api.upload_folder(repo_id=name, repo_type="model", folder_path=folder, commit_message="Exported by handgrad")
    except failures as error:
        raise StorageError(
            f"pushing {folder} to {name} failed: {error!s:.200}; check the name, the connection and `hf auth login`;"
            " the folder itself is complete"
        ) from None
    return str(address)
