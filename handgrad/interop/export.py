"""Exports a checkpoint to a folder that transformers, PEFT or llm.c opens. Reads the folder back and compares it, bit for
bit, before it gets its name.

transformers    model.safetensors       the weights
                config.json, generation_config.json, the files of the tokenizer
                README.md, curve.png    the model card
                *_handgrad.py           for a modern network: its code for transformers
PEFT            adapter_model.safetensors, adapter_config.json      the adapters alone
llm.c           model.bin               the weights
                gpt2_tokenizer.bin      the tokens, for llm.c's sampling
                tokenizer.json          for a trained vocabulary, since llm.c's file cannot encode
"""

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from handgrad.data.chat_template import CHAT_TEMPLATE_FILE, plain_template, template_text
from handgrad.data.model_tokenizer import GENERATION_FILE, vocabulary_files
from handgrad.data.tokenizer import Tokenizer, tokenizer_files
from handgrad.errors import DataError, StorageError, UsageError
from handgrad.evaluation.load import (
    LoadedModel,
    Weights,
    checkpoint_config,
    is_taught_to_talk,
    load_model,
    trained_on_chats,
)
from handgrad.files import check_free, whole
from handgrad.generation.chat import Talk, listed_ends
from handgrad.generation.decode import decode_buffers, decode_tensors
from handgrad.interop import adapters, huggingface, modern
from handgrad.interop.llmc import LlmcModel, read_model, tokenizer_bytes, write_model
from handgrad.interop.model_card import CARD_FILE, CURVE_FILE, curve_png, model_card
from handgrad.interop.sources import weights_of
from handgrad.memory.rows import ParameterRow
from handgrad.models import architecture, parameter_table
from handgrad.ops import reference
from handgrad.settings.config import ModelShape
from handgrad.storage.checkpoint import Checkpoint, Stored, safetensors_bytes
from handgrad.storage.tensor_files import write_file

MODEL_FILE, TOKENS_FILE = "model.bin", "gpt2_tokenizer.bin"
CHECKED_TOKENS = 8  # random tokens, to measure how far rounding moves logits
EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Exported:
    """The result of an export: `rounding` is the largest change of a logit from rounding to `dtype` (0 in float32)."""

    folder: Path
    parameters_bytes: int
    tokens: int
    rounding: float


def export_model(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype = torch.float32) -> Exported:
    """`handgrad export --to hf`. Raises the errors of `export`."""

    def write(partial: Path, model: LoadedModel) -> None:
        write_weights(partial / huggingface.WEIGHTS_FILE, model.views["parameters"], model.shape, dtype)
        config = huggingface.their_config(model.shape, model.tokenizer, dtype, checkpoint_config(checkpoint).dropout)
        generation = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
        template = added_template(checkpoint, model.tokenizer)
        talks = is_taught_to_talk(model.tokenizer, checkpoint)
        files = {
            GENERATION_FILE: (json.dumps(generation, indent=2) + "\n").encode(),
            **vocabulary_files(model.tokenizer, model.shape.sequence_length),
            **({CHAT_TEMPLATE_FILE: template.encode()} if template else {}),
            **({} if checkpoint.manifest.get("imported") else ends_of_turns(model.tokenizer, generation)),
            huggingface.CONFIG_FILE: (json.dumps(config, indent=2) + "\n").encode(),
            CARD_FILE: model_card(checkpoint, model, dtype, config, talks=talks).encode(),
            CURVE_FILE: curve_png(checkpoint),
        }
        if model.shape.network.brings_code:
            files |= {path.name: path.read_bytes() for path in sorted(modern.CODE.glob("*.py"))}
        for name, content in files.items():
            if content is not None:
                write_file(partial / name, [content])

    return export(checkpoint, folder, dtype, huggingface.WEIGHTS_FILE, write, huggingface.read_folder)


def added_template(checkpoint: Checkpoint, tokenizer: Tokenizer) -> str:
    """The plain template in Jinja, if a run on conversations has a tokenizer without a template; else empty."""
    if template_text(tokenizer) is not None or not trained_on_chats(checkpoint):
        return ""
    return plain_template(tokenizer.token_bytes[tokenizer.end_of_text].decode(errors="replace"))


def ends_of_turns(tokenizer: Tokenizer, generation: dict[str, Any]) -> dict[str, bytes]:
    """`generation_config.json` with the token that ends a turn in the chat template, if a model's own file lacks it, as a
    base model's does: without it, a chat model would not end an answer in transformers. `generation`: the content for a
    model without the file."""
    listed = listed_ends(tokenizer)
    if template_text(tokenizer) is None or not (missing := Talk(tokenizer).ends - {tokenizer.end_of_text, *listed}):
        return {}
    if (content := tokenizer.settings(GENERATION_FILE)) is None:  # not an object: kept unchanged
        return {}
    content = content if GENERATION_FILE in tokenizer.others else generation
    ids = content.get("eos_token_id")
    ids = ids if isinstance(ids, list) else [tokenizer.end_of_text if ids is None else ids]
    return {GENERATION_FILE: (json.dumps(content | {"eos_token_id": [*ids, *sorted(missing)]}, indent=2) + "\n").encode()}


def write_weights(path: Path, flat: Tensor, shape: ModelShape, dtype: torch.dtype) -> None:
    """Writes the parameters as one safetensors file in transformers' format. Raises OSError."""

    def theirs(row: ParameterRow) -> Iterator[Stored]:
        for name, part in huggingface.parts(shape, row, row.stored(flat)):
            values = part.t() if huggingface.transposed(shape, row) else part
            yield Stored(shape.network.prefix + name, dtype, tuple(values.shape), functools.partial(values.to, dtype))

    write_file(path, safetensors_bytes([part for row in parameter_table(shape) for part in theirs(row)], {"format": "pt"}))


def export_peft(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype = torch.float32) -> Exported:
    """`handgrad export --to peft`. Raises the errors of `adapters.write_folder`."""
    return Exported(folder, adapters.write_folder(checkpoint, folder, dtype), 0, 0.0)


def export_llmc(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype = torch.float32) -> Exported:
    """`handgrad export --to llmc`. Raises the errors of `export`; `UsageError`: no GPT-2, or a token too long for llm.c."""
    if (network := checkpoint_config(checkpoint).architecture) != "gpt2":
        huggingface.format_of(network)  # refuses an autoencoder, which no other format takes either
        raise UsageError(
            f"llm.c has no network like {checkpoint.folder}'s ({network}), only GPT-2's; `export --to hf` writes it"
        )

    def write(partial: Path, model: LoadedModel) -> None:
        write_model(partial / MODEL_FILE, model.shape, lambda row: row.stored(model.views["parameters"]), dtype)
        for name, content in {TOKENS_FILE: tokenizer_bytes(model.tokenizer), **tokenizer_files(model.tokenizer)}.items():
            write_file(partial / name, [content])

    return export(checkpoint, folder, dtype, MODEL_FILE, write, lambda partial: read_model(partial / MODEL_FILE))


def export(
    checkpoint: Checkpoint,
    folder: Path,
    dtype: torch.dtype,
    weights_file: str,
    write: Callable[[Path, LoadedModel], None],
    read: Callable[[Path], huggingface.HuggingFaceFolder | LlmcModel],
) -> Exported:
    """Writes `folder` with the weights rounded to `dtype` and reads it back, or leaves nothing there. Raises
    `UsageError`: `folder` exists; `DataError`: the checkpoint is damaged; `StorageError`: the disk refuses, or returns
    other numbers than were written."""
    check_free(folder)
    model = load_to_check(weights_of(checkpoint))
    flat, table = model.views["parameters"], parameter_table(model.shape)
    before = logits(model)
    for row in table:
        row.stored(flat).copy_(row.stored(flat).to(dtype))
    with whole(folder) as partial:
        partial.mkdir(parents=True)
        write(partial, model)
        try:
            reread = read(partial)
            same = reread.shape == model.shape and reread.tokenizer.sha256 == model.tokenizer.sha256
            same = same and all(torch.equal(reread.weight(row), row.stored(flat)) for row in table)
        except DataError as error:
            raise StorageError(f"the written files do not read back: {error}") from None
        if not same:
            raise StorageError(f"reading back {folder} gave other numbers than {checkpoint.folder}; check the disk, retry")
    size = (folder / weights_file).stat().st_size
    return Exported(folder, size, len(before), float((before - logits(model)).abs().max()))


def load_to_check(source: Weights) -> LoadedModel:
    """The weights in float32, with the buffers for `logits`. Raises `DataError` if they are damaged."""
    # Contexts can be so long that their cache would not fit.
    shape = replace(source.shape, sequence_length=min(CHECKED_TOKENS, source.shape.sequence_length))
    buffers = decode_buffers(shape, 1, torch.float32, reference)
    return load_model(source, torch.device("cpu"), torch.float32, reference, buffers)


def logits(model: LoadedModel) -> Tensor:
    """The logits (tokens, V) of a few fixed random tokens, in float32."""
    tokens = min(CHECKED_TOKENS, model.shape.sequence_length)
    picks = torch.randint(model.shape.vocab_size, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    buffers = decode_tensors(model.shape, model.views)
    rows = []
    for position, token in enumerate(picks):
        buffers.tokens.fill_(token)
        buffers.positions.fill_(position)
        architecture(model.shape).decode_step(model.ops.decode, model.weights, buffers, model.shape)
        rows.append(buffers.logits[0, : model.shape.vocab_size].clone())
    return torch.stack(rows)
