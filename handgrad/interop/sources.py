"""Weights from wherever they are: one way to open them for `train --init-from`, `import`, `evaluate` and `sample`.

    source                                          is
    a file ending in .bin                           a model of llm.c
    RUN, RUN/best, RUN/checkpoints/step_00001000    a checkpoint of ours: there is a manifest.json, or checkpoints/
    a folder with config.json                       a model of transformers
    NAME or OWNER/NAME, and no such path here       a model of the Hub, downloaded to its cache

The first line that fits decides.
"""

from pathlib import Path

import torch

from handgrad import checkpoint
from handgrad.checkpoint import MANIFEST, Stored
from handgrad.errors import DataError, UsageError
from handgrad.evaluation.load import Weights, checkpoint_weights
from handgrad.files import file_sha256
from handgrad.interop.folders import check_free, imported_config, write_imported
from handgrad.interop.huggingface import CONFIG_FILE, MODEL_FILES, fetch, on_hub, read_folder, read_shape
from handgrad.interop.llmc_model import read_model
from handgrad.models import parameter_table
from handgrad.run_files import CHECKPOINTS

SIZES = ("num_layers", "num_heads", "channels", "sequence_length")


def open_weights(source: str, tokenizer: str = "") -> Weights:
    """The weights that a user means by `source` (see above). `tokenizer` (gpt2, bytes or a file) takes the place of the
    source's own, which a checkpoint does not allow.

    Raises `DataError` in one line: there is nothing of the kind, or it is damaged, or no GPT-2 of ours.
    """
    path = Path(source)
    if is_llmc(path):
        return open_bin(path, tokenizer)
    if is_ours(path):
        if tokenizer:
            raise UsageError(f"{source} is a run or checkpoint and has its tokenizer; leave --tokenizer out")
        return checkpoint_weights(checkpoint.find(source), source)
    return open_folder(source, tokenizer)


def read_sizes(source: str) -> dict[str, int]:
    """The fields of a configuration that the weights decide: their `SIZES`. Reads no weights, and of the Hub only the
    model's config.json."""
    path = Path(source)
    if is_llmc(path):
        shape = read_model(path).shape
    elif is_ours(path):
        run = path.parent if checkpoint.means_best(path) else path
        config = checkpoint.peek_config(run)
        if config is None or not all(type(config.get(name)) is int for name in SIZES):
            raise DataError(f"{source} holds no checkpoint; give a run folder or RUN/checkpoints/step_00001000")
        return {name: config[name] for name in SIZES}
    else:
        shape = read_shape(folder_of(source, (CONFIG_FILE,)) / CONFIG_FILE)
    return {name: getattr(shape, name) for name in SIZES}


def is_llmc(path: Path) -> bool:
    return path.suffix == ".bin" and not path.is_dir()


def is_ours(path: Path) -> bool:
    return (path / MANIFEST).exists() or (path / CHECKPOINTS).is_dir() or checkpoint.means_best(path)


def folder_of(source: str, files: tuple[str, ...]) -> Path:
    """A transformers folder, here or, with these files, in the Hub's cache."""
    if on_hub(source):
        return fetch(source, files)
    path = Path(source)
    if not (path / CONFIG_FILE).is_file():
        found = "a file" if path.is_file() else "a folder without them" if path.is_dir() else "nothing"
        raise DataError(
            f"expected weights at {path}: a run, a checkpoint, a transformers folder with {CONFIG_FILE}, a .bin of llm.c or"
            f" a name on the Hub; found {found}"
        )
    return path


def open_bin(path: Path, tokenizer: str) -> Weights:
    found = read_model(path, tokenizer)
    origin = {"from": "llm.c", "source": str(path), "sha256": {path.name: file_sha256(path)}}
    return Weights(found.shape, found.tokenizer, found.weight, origin, imported_config(found.shape))


def open_folder(source: str, tokenizer: str) -> Weights:
    found = read_folder(folder_of(source, MODEL_FILES), tokenizer)
    files = sorted({file for file, _ in found.places.values()})
    origin = {"from": "hf", "source": source, "sha256": {file.name: file_sha256(file) for file in files}}
    return Weights(found.shape, found.tokenizer, found.weight, origin, imported_config(found.shape))


def import_model(source: str, out: Path, tokenizer: str = "") -> Weights:
    """`handgrad import`: weights into a run-like folder `out`, as float32, which holds float16 and bf16 exactly. Raises as
    `open_weights` and `write_imported`; nothing is left at `out` then."""
    check_free(out)
    found = open_weights(source, tokenizer)
    # `row` is bound now: the tensors are fetched one by one, when they are written.
    tensors = [
        Stored(row.name, torch.float32, row.stored_shape, lambda row=row: found.weight(row).contiguous())
        for row in parameter_table(found.shape)
    ]
    write_imported(out, found.shape, found.tokenizer, tensors, found.origin)
    return found
