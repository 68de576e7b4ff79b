"""A model in transformers' format: a folder with config.json, safetensors and a tokenizer.

`handgrad.networks` has the names of a network's tensors there; the file of its name in this package reads and writes its
part of config.json. `Config` checks the values of such a file, and of PEFT's, as it reads them.
"""

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import safetensors
import torch
from torch import Tensor

from handgrad.data.hub import hub_failures
from handgrad.data.model_tokenizer import GENERATION_FILE, MODEL_FILE, of_transformers, read_object
from handgrad.data.tokenizer import Tokenizer
from handgrad.data.tokenizer_loading import load_tokenizer
from handgrad.errors import DataError, UsageError, print_message
from handgrad.evaluation.load import imported_config
from handgrad.memory.rows import ParameterRow
from handgrad.models import parameter_table
from handgrad.networks import NETWORKS
from handgrad.settings.config import ModelShape

CONFIG_FILE = "config.json"
WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
HEAD = "lm_head.weight"
# Buffers of old versions: the causal mask, and the angles of positions.
BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
# A model with images: its text model's tensors have another prefix, by version; these are of its other parts.
IMAGES = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
# Other networks of the families that handgrad knows: the part that it lacks.
LACKING = {
    "gemma2": "cap of attention's scores",
    "gemma3n": "embeddings in every layer",
    "gemma4": "layers that share keys and values",
    "qwen3_5": "linear attention",
    "gpt_oss": "experts and attention sinks",
}
DTYPES = ("F32", "BF16", "F16")
SMALL_FILES = ("*.json", "merges.txt", "*.jinja")  # without the weights
MODEL_FILES = (*SMALL_FILES, "model*.safetensors")


def format_of(architecture: str) -> ModuleType:
    """The module with a network's `read_shape`, `their_config`, `gguf_name` and `gguf_numbers`. Raises `UsageError` for a
    network of pictures."""
    if NETWORKS[architecture].pictures:
        raise UsageError(
            f"{architecture} has no form elsewhere; data that `handgrad prepare --codes RUN` wrote carry its weights"
        )
    return import_module(f"handgrad.interop.{architecture}")


def their_tensors(shape: ModelShape, row: ParameterRow) -> dict[str, tuple[int, ...]]:
    """The tensors of transformers in a row of the parameter table: name without the prefix -> shape. Our row stacks several
    along its first dimension."""
    block, _, name = row.name.rpartition(".")
    ours, kind = name.rsplit("_", 1) if name.endswith(("_weight", "_bias", "_gain")) else (name, "")
    modules = shape.network.modules.get(ours, (ours,))
    at = block.replace("blocks", shape.network.blocks) + "." if block else ""
    rows = [row.stored_rows]
    if len(modules) > 1:
        rows = next([*gemm.outputs.values()] for gemm in shape.gemms if gemm.weight == f"{ours}_weight")
    return {
        f"{at}{module}.{'bias' if kind == 'bias' else 'weight'}": dims[::-1] if transposed(shape, row) else dims
        for module, dims in zip(modules, ((size, *row.shape[1:]) for size in rows), strict=True)
    }


def parts(shape: ModelShape, row: ParameterRow, stored: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(transformers' name without the prefix, its part of the values of a row), not transposed."""
    theirs = their_tensors(shape, row)
    sizes = [dims[0] for dims in theirs.values()] if len(theirs) > 1 else [len(stored)]
    return zip(theirs, stored.split(sizes), strict=True)


def transposed(shape: ModelShape, row: ParameterRow) -> bool:
    """True for a matrix that transformers stores transposed: a block's, never an embedding."""
    return shape.network.transposed and row.group == "matrix"


def their_config(shape: ModelShape, tokenizer: Tokenizer, dtype: torch.dtype, dropout: float) -> dict[str, Any]:
    """The content of config.json, with the dropout of the run."""
    kind = str(dtype).removeprefix("torch.")
    pad = own_token(tokenizer, MODEL_FILE, "pad_token_id")
    return {
        **format_of(shape.architecture).their_config(shape, dropout),
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": begin_token(tokenizer),
        "eos_token_id": tokenizer.end_of_text,
        **({} if pad is None else {"pad_token_id": pad}),
        "torch_dtype": kind,
        "dtype": kind,
    }


def begin_token(tokenizer: Tokenizer) -> int:
    """The token that begins a text: the one that a model from elsewhere names, or end-of-text."""
    begin = own_token(tokenizer, GENERATION_FILE, "bos_token_id")
    return tokenizer.end_of_text if begin is None else begin


def own_token(tokenizer: Tokenizer, file: str, key: str) -> int | None:
    """The token that a file of a model from elsewhere names under `key`, or None."""
    token = (tokenizer.settings(file) or {}).get(key)
    return token if type(token) is int and 0 <= token < tokenizer.vocab_size else None


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A folder with every tensor in the shape that its config.json implies, and a tokenizer that handgrad supports."""

    shape: ModelShape
    tokenizer: Tokenizer
    tensors: dict[str, tuple[Path, str]]  # name without prefix -> file, name in it

    def weight(self, row: ParameterRow) -> Tensor:
        """A parameter in float32 with our shape. Raises `DataError` for an unreadable file or non-finite numbers."""
        parts = [self.part(theirs) for theirs in their_tensors(self.shape, row)]
        values = parts[0] if len(parts) == 1 else torch.cat(parts)
        return values.t() if transposed(self.shape, row) else values

    def part(self, theirs: str) -> Tensor:
        path, name = self.tensors[theirs]
        values = load_tensor(path, name).to(torch.float32)
        if bad := int((~torch.isfinite(values)).sum()):
            raise DataError(f"expected finite numbers in {name} of {path}, found {bad} that are not; the weights diverged")
        return values


def read_folder(folder: Path, tokenizer: str = "") -> HuggingFaceFolder:
    """Opens a transformers folder; `tokenizer` (gpt2, bytes or a file) replaces the folder's own. Raises `DataError` if
    a file is missing or damaged, or if handgrad has no such model. Reads the weights on request."""
    shape, words = read_shape_and_words(folder, tokenizer)
    return HuggingFaceFolder(shape, words, find_tensors(folder, shape))


def read_shape_and_words(folder: Path, tokenizer: str) -> tuple[ModelShape, Tokenizer]:
    """The sizes and the tokenizer of `read_folder`, without the weights; raises `DataError` as it does."""
    shape = read_shape(folder / CONFIG_FILE)
    words = load_tokenizer(tokenizer) if tokenizer else of_transformers(folder, shape.vocab_size)
    if words.vocab_size != shape.vocab_size:
        raise DataError(
            f"expected a tokenizer of {shape.vocab_size} tokens as {folder / CONFIG_FILE} says, found one of"
            f" {words.vocab_size} ({words.kind}); name the model's own with `handgrad import --tokenizer gpt2|bytes|FILE`"
        )
    return shape, words


def read_shape(path: Path) -> ModelShape:
    """Reads the model's sizes from config.json. Raises `DataError` for one that handgrad does not compute."""
    content = read_object(path)
    kind = content.get("model_type")
    for name, network in NETWORKS.items():
        if kind in network.model_types:
            shape = format_of(name).read_shape(content, path)
            imported_config(shape, str(path))
            return shape
    types = ", ".join(json.dumps(known) for network in NETWORKS.values() for known in network.model_types)
    part = next((f"lacks its {part}" for name, part in LACKING.items() if str(kind).startswith(name)), "has no such model")
    raise DataError(f"expected model_type {types} in {path}, found {kind!r:.80}; handgrad {part}")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Opens a safetensors file. Raises `DataError` for another kind of file and for a cut one."""
    if path.exists() and not path.is_file():
        raise DataError(f"expected a plain file at {path}, found a folder, pipe or device; fetch or export it again")
    try:
        with safetensors.safe_open(path, framework="pt") as stored:
            yield stored
    except (safetensors.SafetensorError, OSError) as error:
        raise DataError(f"expected a whole safetensors file at {path}, found: {error}; fetch or export it again") from None


def find_tensors(folder: Path, shape: ModelShape) -> dict[str, tuple[Path, str]]:
    """Name without prefix -> (file, name in it) for each tensor of a folder, except the masks of old versions. Raises
    `DataError` for a tensor that is missing, unknown, duplicate, or of another shape or type, and for an untied head."""
    wanted: dict[str, tuple[int, ...]] = {}
    prefix, embedding = shape.network.prefix, ""
    for row in parameter_table(shape):
        theirs = their_tensors(shape, row)
        wanted |= theirs
        embedding = next(iter(theirs)) if row.name == "wte" else embedding
    tensors: dict[str, tuple[Path, str]] = {}
    aside = 0
    for path in weight_files(folder):
        with opened(path) as stored:
            for name in stored.keys():  # noqa: SIM118
                plain = name.removeprefix(prefix).replace("model.language_model.", "model.").removeprefix("language_model.")
                if IMAGES.match(name):
                    aside += 1
                    continue
                if BUFFERS.fullmatch(plain):
                    continue
                if plain in tensors:
                    raise DataError(f"expected {plain} once, found it in {tensors[plain][0]} and, as {name}, in {path}")
                if (dims := wanted[embedding] if plain == HEAD else wanted.get(plain)) is None:
                    raise DataError(f"expected the tensors of a {shape.network.title} in {path}, found also {name!r:.120}")
                entry = stored.get_slice(name)
                if tuple(entry.get_shape()) != dims:
                    raise DataError(
                        f"expected {name} of shape {dims} in {path}, found {tuple(entry.get_shape())};"
                        f" its sizes do not match {CONFIG_FILE}"
                    )
                if entry.get_dtype() not in DTYPES:
                    raise DataError(f"expected {name} in {', '.join(DTYPES)} in {path}, found {entry.get_dtype()}")
                tensors[plain] = path, name
    if missing := next((name for name in wanted if name not in tensors), None):
        path = folder / (WEIGHTS_FILE if (folder / WEIGHTS_FILE).is_file() else INDEX_FILE)
        raise DataError(
            f"expected a tensor {prefix}{missing} of shape {wanted[missing]} in {path}, found none;"
            " the file is not this config's"
        )
    if aside:
        print_message(f"{folder} has a vision tower of {aside} tensors; handgrad leaves it aside", ends=False)
    tied = HEAD in tensors and HEAD not in wanted
    if tied and not torch.equal(*(load_tensor(*tensors[name]) for name in (HEAD, embedding))):
        raise DataError(
            f"expected {HEAD} equal to {embedding} in {tensors[HEAD][0]}, found another;"
            " handgrad's head is the token embedding"
        )
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: the only one, or all in its index."""
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    if not (folder / INDEX_FILE).is_file():
        old = folder / "pytorch_model.bin"
        hint = "; fetch or export it again"
        if old.is_file():
            hint = f"; {old.name} may run code when read: save it again as safetensors"
        raise DataError(f"expected {WEIGHTS_FILE} or {INDEX_FILE} in {folder}, found neither{hint}")
    tensors = read_object(folder / INDEX_FILE).get("weight_map")
    names = list(tensors.values()) if isinstance(tensors, dict) else []
    if not names or not all(isinstance(n, str) and re.fullmatch(r"[\w.-]+\.safetensors", n) for n in names):
        raise DataError(f"expected a weight_map of tensors to files in {folder / INDEX_FILE}, found none; fetch it again")
    return [folder / name for name in sorted(set(names))]


def load_tensor(path: Path, name: str) -> Tensor:
    with opened(path) as stored:
        return stored.get_tensor(name)


def on_hub(source: str) -> bool:
    """True if `source` may be a name on the Hub and no such path exists here."""
    return not Path(source).exists() and re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", source) is not None


def fetch(source: str, files: tuple[str, ...] = MODEL_FILES) -> Path:
    """Downloads these `files` of a Hub model to its cache, safely with concurrent processes; returns their folder.
    Raises `DataError`: no such model, or no connection; the message says which."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(source, allow_patterns=list(files)))
    except hub_failures() as error:
        reason = "no connection, no copy here" if isinstance(error, LocalEntryNotFoundError) else f"{error!s:.200}"
        raise DataError(
            f"expected a folder {source} or a model of that name on the Hub, found neither ({reason});"
            " check the name and the connection"
        ) from None


# (key that changes the mathematics, the default there, the values that match our model)
Known = tuple[str, Any, tuple[Any, ...]]
QUANTISED = "give the model in 16 or 32 bits (under adapters of PEFT: `handgrad import ADAPTERS --base MODEL`)"


@dataclass(frozen=True)
class Config:
    """The content of a config.json."""

    content: dict[str, Any]
    path: Path
    remedy: str = "handgrad has no such model"

    def refused(self, key: str, wanted: str, actual: Any) -> DataError:
        remedy = QUANTISED if key == "quantization_config" else self.remedy
        return DataError(f"expected {key} {wanted} in {self.path}, found {actual!r:.80}; {remedy}")

    def expect(self, known: Iterable[Known]) -> None:
        """Raises `DataError` for a key with another value."""
        for key, default, ours in known:
            if (value := self.content.get(key, default)) not in ours:
                raise self.refused(key, json.dumps(ours[0]), value)

    def table(self, key: str, whole: dict[str, Any] | None = None) -> dict[str, Any]:
        """The object at `key` of the content, or of `whole`, a part of it; empty if null or missing. Raises `DataError`."""
        if not isinstance(value := (self.content if whole is None else whole).get(key), dict | None):
            raise self.refused(key, "as an object", value)
        return value or {}

    def whole(self, key: str, default: int | None = None) -> int:
        """The whole number at `key`, 1 or more; `default` if it is null or missing. Raises `DataError`."""
        value: Any = self.content.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refused(key, "of 1 or more", value)
        return value

    def number(self, key: str, default: float | None, table: dict[str, Any]) -> float:
        """The finite number above 0 at `key` of `table`, a part of the content; otherwise like `whole`."""
        value: Any = table.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.refused(key, "above 0", value)
        return float(value)
