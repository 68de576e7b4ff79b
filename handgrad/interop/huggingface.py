"""GPT-2 as transformers' `GPT2LMHeadModel` keeps it: a folder with config.json, safetensors and a tokenizer.

    ours                     theirs (after "transformer.")     shape there
    wte, wpe                 wte.weight, wpe.weight            (V, C), (maxT, C): V without padding
    blocks.l.qkv_weight      h.l.attn.c_attn.weight            (C, 3C)
    blocks.l.proj_weight     h.l.attn.c_proj.weight            (C, C)
    blocks.l.fc_weight       h.l.mlp.c_fc.weight               (C, 4C)
    blocks.l.fcproj_weight   h.l.mlp.c_proj.weight             (4C, C)
    blocks.l.ln1_*, ln2_*    h.l.ln_1.*, h.l.ln_2.*            (C)
    lnf_*                    ln_f.*                            (C)

Their Conv1D keeps a matrix as (in, out), ours is (out, in). The head is the token embedding and is not stored.

Source: transformers, models/gpt2/modeling_gpt2.py and configuration_gpt2.py.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from handgrad.config import ModelShape, check
from handgrad.data.tokenizer import Tokenizer, load_tokenizer
from handgrad.errors import DataError, UsageError
from handgrad.interop.folders import imported_config
from handgrad.interop.vocabulary import read_vocabulary
from handgrad.models import parameter_table
from handgrad.models.rows import ParameterRow

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
PREFIX = "transformer."
HEAD = "lm_head.weight"
MASKS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")  # buffers of old versions: the causal mask
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
MODEL_FILES = ("*.json", "model*.safetensors", "merges.txt")
MAX_JSON_BYTES = 64 << 20

BLOCK_NAMES = {
    "qkv": "attn.c_attn",
    "proj": "attn.c_proj",
    "fc": "mlp.c_fc",
    "fcproj": "mlp.c_proj",
    "ln1": "ln_1",
    "ln2": "ln_2",
}
# What decides the mathematics: key of config.json, its value where the file is silent, the values that mean our GPT-2.
KNOWN: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
    ("model_type", None, ("gpt2",)),
    ("activation_function", "gelu_new", ("gelu_new", "gelu_pytorch_tanh")),  # two names of one formula
    ("layer_norm_epsilon", 1e-5, (1e-5,)),
    ("scale_attn_weights", True, (True,)),
    ("scale_attn_by_inverse_layer_idx", False, (False,)),
    ("reorder_and_upcast_attn", False, (False,)),
    ("add_cross_attention", False, (False,)),
    ("tie_word_embeddings", True, (True,)),
    ("quantization_config", None, (None,)),
)
SIZES = ("vocab_size", "n_positions", "n_layer", "n_head", "n_embd")


def their_name(name: str) -> str:
    """A row of the parameter table -> its name in their file, without the prefix."""
    if name in ("wte", "wpe"):
        return f"{name}.weight"
    if name.startswith("lnf_"):
        return f"ln_f.{name.removeprefix('lnf_')}"
    _, layer, rest = name.split(".")
    module, kind = rest.rsplit("_", 1)
    return f"h.{layer}.{BLOCK_NAMES[module]}.{kind}"


def transposed(row: ParameterRow) -> bool:
    """Whether they keep this parameter the other way round: a matrix, but no embedding."""
    return len(row.shape) == 2 and row.name not in ("wte", "wpe")


def their_shape(row: ParameterRow) -> tuple[int, ...]:
    return row.stored_shape[::-1] if transposed(row) else row.stored_shape


def their_config(shape: ModelShape, tokenizer: Tokenizer, dtype: torch.dtype, dropout: float) -> dict[str, Any]:
    """The content of config.json. `dropout`: what the run was trained with, at all places."""
    kind = str(dtype).removeprefix("torch.")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": shape.vocab_size,
        "n_positions": shape.sequence_length,
        "n_ctx": shape.sequence_length,
        "n_layer": shape.num_layers,
        "n_head": shape.num_heads,
        "n_embd": shape.channels,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "tie_word_embeddings": True,
        "resid_pdrop": dropout,  # those who fine-tune may want other values
        "embd_pdrop": dropout,
        "attn_pdrop": dropout,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": tokenizer.end_of_text,
        "eos_token_id": tokenizer.end_of_text,
        "torch_dtype": kind,
        "dtype": kind,
    }


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A folder whose every tensor is there, with the shape its config.json promises, and whose tokenizer is ours."""

    folder: Path
    shape: ModelShape
    tokenizer: Tokenizer
    table: tuple[ParameterRow, ...]
    places: dict[str, tuple[Path, str]]  # their name without prefix -> file, and name in it

    def weight(self, row: ParameterRow) -> Tensor:
        """A parameter in float32 with our shape (`row.stored_shape`).

        Raises `DataError`: the file cannot be read, or holds numbers that are not finite.
        """
        path, name = self.places[their_name(row.name)]
        with opened(path) as stored:
            values = stored.get_tensor(name).to(torch.float32)
        if not torch.isfinite(values).all():
            bad = int((~torch.isfinite(values)).sum())
            raise DataError(f"expected finite numbers in {name} of {path}, found {bad} that are not; the weights diverged")
        return values.t() if transposed(row) else values


def read_folder(folder: Path, tokenizer: str = "") -> HuggingFaceFolder:
    """Opens a folder; `tokenizer` (gpt2, bytes or a file) takes the place of the folder's own.

    Raises `DataError` in one line if anything in it is missing, damaged, of another shape or not a GPT-2 of ours.
    """
    if not folder.is_dir():
        raise DataError(f"expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, found none at {folder}")
    shape = read_shape(folder / CONFIG_FILE)
    words = load_tokenizer(tokenizer) if tokenizer else read_vocabulary(folder)
    if words.vocab_size != shape.vocab_size:
        raise DataError(
            f"expected a tokenizer of {shape.vocab_size} tokens as {folder / CONFIG_FILE} says, found one of"
            f" {words.vocab_size} ({words.kind}); name the model's own with `handgrad import --tokenizer gpt2|bytes|FILE`"
        )
    table = parameter_table(shape)
    found = HuggingFaceFolder(folder, shape, words, table, find_tensors(folder))
    check_tensors(found)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of theirs; `DataError` if there is none."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise DataError(
                f"expected at most {MAX_JSON_BYTES} bytes, found {path.stat().st_size} in {path}; fetch it again"
            )
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"expected {path.name} in {path.parent}, found no such file; give a transformers folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"expected JSON in {path}, found {error}; fetch it again") from None
    if not isinstance(content, dict):
        raise DataError(f"expected a JSON object in {path}, found {type(content).__name__}; fetch it again")
    return content


def read_shape(path: Path) -> ModelShape:
    """The model's sizes from config.json; `DataError` if it means anything that our GPT-2 does not compute."""
    content = read_json(path)
    for key, default, taken in KNOWN:
        value = content.get(key, default)
        if value not in taken:
            wanted = " or ".join(json.dumps(known) for known in taken)
            raise DataError(f"expected {key} {wanted} in {path}, found {value!r:.80}; handgrad has no such model")
    sizes = {key: content.get(key, content.get("n_ctx") if key == "n_positions" else None) for key in SIZES}
    for key, value in sizes.items():
        if type(value) is not int or value < 1:
            raise DataError(f"expected {key} of 1 or more in {path}, found {value!r:.80}; handgrad has no such model")
    if content.get("n_inner") not in (None, 4 * sizes["n_embd"]):
        raise DataError(
            f"expected n_inner null or {4 * sizes['n_embd']} (4 n_embd) in {path}, found {content['n_inner']!r:.80};"
            " handgrad has no such model"
        )
    shape = ModelShape(*(sizes[key] for key in SIZES))
    try:
        check(imported_config(shape))
    except UsageError as error:
        raise DataError(f"{path}: its sizes do not hold: {error}") from None
    return shape


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file; `DataError` if it is none, or not whole."""
    try:
        with safetensors.safe_open(path, framework="pt") as stored:
            yield stored
    except (safetensors.SafetensorError, OSError) as error:
        raise DataError(f"expected a whole safetensors file at {path}, found: {error}; fetch or export it again") from None


def find_tensors(folder: Path) -> dict[str, tuple[Path, str]]:
    """Where each tensor of a folder lies, by its name without prefix; the masks of old versions are left out."""
    files = [folder / WEIGHTS_FILE]
    promised: dict[str, Any] = {}
    if not files[0].is_file():
        if not (folder / INDEX_FILE).is_file():
            old = folder / "pytorch_model.bin"
            hint = f"; {old.name} may run code when read: save it again as safetensors" if old.is_file() else ""
            raise DataError(f"expected {WEIGHTS_FILE} or {INDEX_FILE} in {folder}, found neither{hint}")
        promised = read_json(folder / INDEX_FILE).get("weight_map", {})
        names = list(promised.values()) if isinstance(promised, dict) else [None]
        if not names or not all(isinstance(n, str) and Path(n).name == n for n in names):
            raise DataError(
                f"expected a weight_map of tensors to files in {folder / INDEX_FILE}, found none; fetch it again"
            )
        files = [folder / name for name in sorted(set(names))]
    places: dict[str, tuple[Path, str]] = {}
    for path in files:
        with opened(path) as stored:
            for name in stored.keys():  # noqa: SIM118
                plain = name.removeprefix(PREFIX)
                if MASKS.fullmatch(plain):
                    continue
                if plain in places:
                    raise DataError(f"expected {plain} once, found it in {places[plain][0]} and, as {name}, in {path}")
                places[plain] = path, name
    for name, file in promised.items():
        plain = name.removeprefix(PREFIX)
        if not MASKS.fullmatch(plain) and (plain not in places or places[plain][0] != folder / file):
            raise DataError(
                f"expected {name} in {folder / file} as {INDEX_FILE} says, found no such tensor; fetch it again"
            )
    return places


def check_tensors(found: HuggingFaceFolder) -> None:
    """Raises `DataError` for the first tensor that is missing, foreign, of another shape or type, or an untied head."""
    wanted = {their_name(row.name): their_shape(row) for row in found.table}
    where = found.places[next(iter(found.places))][0].name if found.places else WEIGHTS_FILE
    path = found.folder / (where if (found.folder / WEIGHTS_FILE).is_file() else INDEX_FILE)
    for name, dims in wanted.items():
        if name not in found.places:
            raise DataError(
                f"expected a tensor {PREFIX}{name} of shape {dims} in {path}, found none; the file is not this config's"
            )
    foreign = [found.places[name] for name in sorted(set(found.places) - set(wanted) - {HEAD})]
    if foreign:
        file, name = foreign[0]
        rest = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise DataError(f"expected the tensors of a GPT-2 with a language head in {file}, found also {name!r:.120}{rest}")
    by_file: dict[Path, list[tuple[str, str]]] = {}
    for plain, (file, name) in found.places.items():
        by_file.setdefault(file, []).append((plain, name))
    for file, names in by_file.items():
        with opened(file) as stored:
            for plain, name in names:
                dims = wanted["wte.weight"] if plain == HEAD else wanted[plain]
                entry = stored.get_slice(name)
                if tuple(entry.get_shape()) != dims:
                    raise DataError(
                        f"expected {name} of shape {dims} in {file}, found {tuple(entry.get_shape())};"
                        f" its sizes are not those of {CONFIG_FILE}"
                    )
                if entry.get_dtype() not in DTYPES:
                    raise DataError(f"expected {name} in {', '.join(DTYPES)} in {file}, found {entry.get_dtype()}")
    if HEAD in found.places:
        pair = []
        for file, name in (found.places[HEAD], found.places["wte.weight"]):
            with opened(file) as stored:
                pair.append(stored.get_tensor(name))
        if not torch.equal(*pair):
            raise DataError(
                f"expected {HEAD} equal to wte.weight in {found.places[HEAD][0]}, found another;"
                " handgrad's head is the token embedding"
            )


def on_hub(source: str) -> bool:
    """Whether only the Hub can have it: nothing here has the name, and it may be one there."""
    return not Path(source).exists() and re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", source) is not None


def fetch(source: str, files: tuple[str, ...] = MODEL_FILES) -> Path:
    """The folder of a model of the Hub, these `files` downloaded to its cache, where another process may be at it, too.

    Raises `DataError`: no such model; the line says when there was no connection.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    http: tuple[type[BaseException], ...] = (HfHubHTTPError, HfHubHTTPError.__bases__[0])  # the client library's own, too
    failures: tuple[type[BaseException], ...] = (*http, HFValidationError, LocalEntryNotFoundError, OSError)
    try:
        return Path(huggingface_hub.snapshot_download(source, allow_patterns=list(files)))
    except failures as error:
        raise DataError(
            f"expected a folder {source} or a model of that name on the Hub, found neither ({error!s:.200});"
            " check the name and the connection"
        ) from None
