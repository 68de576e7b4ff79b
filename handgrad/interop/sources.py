"""Opens weights in any format, in one way for `train --init-from`, `import`, `evaluate` and `sample`.

    source                                          is
    a file ending in .bin                           a model of llm.c
    RUN, RUN/best, RUN/checkpoints/step_00001000    a checkpoint of ours: there is a manifest.json, or checkpoints/
    a folder with adapter_config.json               adapters of PEFT, merged with the weights that it names
    a folder with config.json                       a model of transformers
    NAME or OWNER/NAME, and no such path here       a model of the Hub, downloaded to its cache

The first matching line decides.
"""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import handgrad
from handgrad.data.tokenizer import tokenizer_files, tokenizer_record
from handgrad.errors import DataError, StorageError, UsageError
from handgrad.evaluation.load import CHAT, SHAPE, SIZES, Weights, checkpoint_weights, imported_config, trained_on_chats
from handgrad.files import check_free, file_sha256, whole
from handgrad.interop import adapters
from handgrad.interop.adapters import base_of, merged_checkpoint
from handgrad.interop.huggingface import (
    CONFIG_FILE,
    MODEL_FILES,
    SMALL_FILES,
    HuggingFaceFolder,
    fetch,
    on_hub,
    read_folder,
    read_shape,
    read_shape_and_words,
)
from handgrad.interop.llmc import LlmcModel, read_model
from handgrad.models import parameter_table
from handgrad.networks.modern import of_stored
from handgrad.settings.config import FIELDS, to_dict
from handgrad.storage import checkpoint
from handgrad.storage.checkpoint import MANIFEST, Checkpoint, Stored
from handgrad.storage.run_files import CHECKPOINTS, named_run


def open_weights(
    source: str, tokenizer: str = "", *, strict: bool = False, base: str = "", above: tuple[Path, ...] = ()
) -> Weights:
    """The weights at a user's `source` (see above). `tokenizer` (gpt2, bytes or a file) replaces the source's own,
    except a checkpoint's. `strict`: a run's newest checkpoint, or an error. `base`: the weights under adapters of PEFT,
    instead of the ones that they name. `above`: the adapters on top of these weights. Raises `DataError` if there are
    none, if they are damaged, or if handgrad lacks their network."""
    path = Path(source)
    above = with_base(above, path)
    if base and not adapters.is_peft(path):
        raise UsageError(f"--base goes with adapters of PEFT, found {source} without {adapters.PEFT_CONFIG}")
    if is_llmc(path):
        return imported("llm.c", str(path), read_model(path, tokenizer), [path])
    if is_ours(path):
        if tokenizer:
            raise UsageError(f"{source} is a run or checkpoint and has its tokenizer; leave --tokenizer out")
        return weights_of(checkpoint.find(source, strict=strict), source, above)
    if adapters.is_peft(path):
        named = base or adapters.base_source(path)
        try:
            base_weights = open_weights(named, tokenizer, above=above)
        except DataError as error:
            other = (
                "" if base or len(above) > 1 else f"; other weights than it names: `handgrad import {source} --base MODEL`"
            )
            raise DataError(f"{error}{other}") from None
        return adapters.adapted(path, base_weights)
    if on_hub(source):  # another network or tokenizer is refused before its weights, often gigabytes, are downloaded
        read_shape_and_words(fetch(source, SMALL_FILES), tokenizer)
    folder = read_folder(folder_of(source, MODEL_FILES), tokenizer)
    return imported("hf", source, folder, sorted({file for file, _ in folder.tensors.values()}))


def weights_of(saved: Checkpoint, named: str = "", above: tuple[Path, ...] = ()) -> Weights:
    """The weights of a checkpoint of ours, adapters merged with the weights that they adapt; `named`: the user's name for
    it; `above` as in `open_weights`. Raises the errors of `checkpoint_weights` and `base_of`."""
    weights = checkpoint_weights(saved, named)
    opener = functools.partial(open_weights, above=above)
    return merged_checkpoint(weights, base_of(saved, opener)) if weights.config.lora else weights


def with_base(above: tuple[Path, ...], base: Path) -> tuple[Path, ...]:
    """`above`, extended by the path of the weights under them. Raises DataError if they form a cycle."""
    resolved = base.resolve()
    if resolved in above:
        circle = " on ".join(map(str, (*above[above.index(resolved) :], resolved)))
        raise DataError(f"expected adapters on weights, found adapters on each other: {circle}; name their weights anew")
    return (*above, resolved)


def imported(kind: str, source: str, model: HuggingFaceFolder | LlmcModel, files: Iterable[Path]) -> Weights:
    origin = {"from": kind, "source": source, "sha256": {file.name: file_sha256(file) for file in files}}
    return Weights(model.shape, model.tokenizer, model.weight, origin, imported_config(model.shape))


def read_sizes(source: str, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The fields of a configuration that the weights decide: their `SHAPE`. Reads no weights; from the Hub it fetches only
    the model's config.json. `above` as in `open_weights`."""
    path = Path(source)
    above = with_base(above, path)
    if is_llmc(path):
        shape = read_model(path).shape
    elif is_ours(path):
        config = checkpoint.peek_config(path.parent if checkpoint.is_best_alias(path) else path)
        if config is None:
            checkpoint.find(source)  # raises the reason
        if config is None or not all(type(config.get(name)) is int for name in SIZES):
            raise DataError(f"{source} holds no checkpoint; {named_run(path)}")
        return shape_fields(config)
    elif adapters.is_peft(path):
        return read_sizes(adapters.base_source(path), above)
    else:
        shape = read_shape(folder_of(source, (CONFIG_FILE,)) / CONFIG_FILE)
    return {name: getattr(shape, name) for name in SHAPE}


def shape_fields(config: dict[str, Any]) -> dict[str, Any]:
    """The model's `SHAPE` in a stored configuration; a field that it lacks has its default."""
    config = of_stored(config)
    return {name: config.get(name, FIELDS[name].default) for name in SHAPE}


def is_llmc(path: Path) -> bool:
    return path.suffix == ".bin" and not path.is_dir()


def is_ours(path: Path) -> bool:
    return (path / MANIFEST).exists() or (path / CHECKPOINTS).is_dir() or checkpoint.is_best_alias(path)


def folder_of(source: str, files: tuple[str, ...]) -> Path:
    """A transformers folder: a local one, or the Hub's cache with these `files`. Raises `DataError` if there is none."""
    if on_hub(source):
        return fetch(source, files)
    path = Path(source)
    if not (path / CONFIG_FILE).is_file():
        actual = "a file" if path.is_file() else "a folder without them" if path.is_dir() else "nothing"
        if runs := sorted(folder.parent for folder in path.glob(f"*/{CHECKPOINTS}")):
            actual = f"a folder of runs; name one of them, as {runs[0]}"
        elif (path / "model.bin").is_file():
            actual = "a folder of llm.c; name its model.bin"
        elif models := sorted(file.parent for file in path.glob(f"*/{CONFIG_FILE}")):
            actual = f"a folder of models; name one of them, as {models[-1]}"
        elif run := next((above for above in path.parents if (above / CHECKPOINTS).is_dir()), None):
            actual += f"; name the run, {run}"
        raise DataError(
            f"expected weights at {path}: a run, a checkpoint, a transformers folder with {CONFIG_FILE}, a .bin of llm.c or"
            f" a name on the Hub; found {actual}"
        )
    return path


def import_model(source: str, out: Path, tokenizer: str = "", base: str = "") -> Weights:
    """`handgrad import`: weights into a folder `out` that `evaluate`, `sample`, `export` and `train --init-from` treat
    as a run's: a checkpoint of step 0 without moments, in float32, which holds float16 and bf16 exactly. Raises the
    errors of `open_weights`; `UsageError`: `out` exists; `StorageError`: the disk refuses. Then `out` does not exist."""
    check_free(out)
    weights = open_weights(source, tokenizer, base=base)
    manifest: dict[str, Any] = {
        "handgrad": handgrad.__version__,
        "versions": {"handgrad": handgrad.__version__, "torch": torch.__version__},
        "config": to_dict(weights.config),
        "vocab_size": weights.shape.vocab_size,
        "tokenizer": tokenizer_record(weights.tokenizer),
        "identity": {"data": None, "tokenizer": weights.tokenizer.sha256},
        "imported": weights.origin,
        CHAT: weights.checkpoint is not None and trained_on_chats(weights.checkpoint),
    }
    tensors = [
        Stored(row.name, torch.float32, row.stored_shape, functools.partial(weights.weight, row))
        for row in parameter_table(weights.shape)
    ]
    with whole(out) as partial:
        partial.mkdir(parents=True)
        written = checkpoint.save(partial / CHECKPOINTS, 0, tensors, manifest, tokenizer_files(weights.tokenizer))
        try:
            checkpoint.open_checkpoint(written)  # sizes and hashes, read back from the disk
        except DataError as error:
            raise StorageError(f"reading back {out} failed: {error}") from None
    return weights
