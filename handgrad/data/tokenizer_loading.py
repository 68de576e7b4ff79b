"""Loads a tokenizer of any kind: by the user's word for it, or by its record in the manifest of shards or a checkpoint."""

from pathlib import Path
from typing import Any

from handgrad.data.model_tokenizer import MODEL_FILE, of_record, of_transformers, read_object
from handgrad.data.tokenizer import TOKENIZER_FILE, Tokenizer, bytes_tokenizer, gpt2_tokenizer, parse_bpe, read_small
from handgrad.data.tokenizer_names import answer
from handgrad.errors import DataError, UsageError
from handgrad.storage.run_files import BEST, CHECKPOINTS, named_run


def load_tokenizer(spec: str) -> Tokenizer:
    """Loads the tokenizer "gpt2" or "bytes", or from path `spec`: a run, a checkpoint, a transformers folder, or a
    `tokenizer.json` or its folder.

    Raises UsageError: no such tokenizer; DataError: a `tokenizer.json` that is no byte-level BPE with GPT-2's splitter, or
    a folder whose tokenizer handgrad lacks.
    """
    if spec == "gpt2":
        return gpt2_tokenizer()
    if spec == "bytes":
        return bytes_tokenizer()
    path = Path(spec)
    if path.name == BEST and not path.exists():  # RUN/best has the tokenizer of its run
        path = path.parent
    if any((path / name).exists() for name in ("config.json", "manifest.json", CHECKPOINTS)):
        return of_folder(path)
    if path.is_dir():
        path = path / TOKENIZER_FILE
    if not path.is_file():
        found = answer(spec)
        if Path(spec).is_dir():
            found = f", a folder without a tokenizer; {named_run(Path(spec))}"
        raise UsageError(
            f"expected the tokenizer gpt2, bytes, bpe:SIZE, a run, a model's folder or a tokenizer.json, found {spec!r}"
            f"{found}"
        )
    try:
        return parse_bpe(read_small(path), where=str(path))
    except DataError:
        if (path.parent / "config.json").is_file():
            folder = f"give --tokenizer {path.parent}"
            raise DataError(f"expected the folder of a model's tokenizer, found its file {path}; {folder}") from None
        raise


def of_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a run or a checkpoint of ours, or of a transformers folder."""
    checkpoints = sorted(folder.glob(f"{CHECKPOINTS}/step_*/manifest.json"))
    manifest = checkpoints[-1] if checkpoints else folder / "manifest.json"
    record = read_object(manifest).get("tokenizer") if manifest.is_file() else None
    if isinstance(record, dict):
        return read_tokenizer(manifest.parent, record)
    return of_transformers(folder, read_object(folder / MODEL_FILE).get("vocab_size"))


def read_tokenizer(folder: Path, record: Any) -> Tokenizer:
    """The tokenizer that `record`, a manifest's entry, names; DataError if it is not the one that made the shards."""
    kind = record.get("kind") if isinstance(record, dict) else None
    if kind not in ("gpt2", "bytes", "bpe", "model"):
        raise DataError(f"expected a tokenizer gpt2, bytes or bpe in {folder}, found {kind!r:.100}; prepare the data again")
    if kind in ("bpe", "model") and not (folder / TOKENIZER_FILE).is_file():
        raise DataError(f"expected {TOKENIZER_FILE} in {folder}, found no such file; restore it or prepare the data again")
    if kind == "model":
        tokenizer = of_record(folder, record)
    else:
        tokenizer = load_tokenizer(str(folder / TOKENIZER_FILE) if kind == "bpe" else kind)
    for name in ("sha256", "vocab_size", "end_of_text"):
        if record.get(name) != getattr(tokenizer, name):
            raise DataError(
                f"expected the tokenizer with {name} {record.get(name)!r:.100} that made the shards in {folder}, "
                f"found {getattr(tokenizer, name)}; restore it or prepare the data again"
            )
    return tokenizer
