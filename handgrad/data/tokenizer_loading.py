"""Loads a tokenizer of any kind: by the user's name for it, or by its record in the manifest of shards or a checkpoint. For
a name from other software, the error gives the name in handgrad, or says why there is none."""

import re
import shlex
from pathlib import Path
from typing import Any

from handgrad.data.codes import PALETTE, codes_tokenizer, is_palette, parse_codes
from handgrad.data.model_tokenizer import MODEL_FILE, of_record, of_transformers, read_object, vocabulary_rows
from handgrad.data.tokenizer import TOKENIZER_FILE, Tokenizer, bytes_tokenizer, gpt2_tokenizer, parse_bpe, read_small
from handgrad.errors import DataError, UsageError
from handgrad.storage.run_files import BEST, CHECKPOINTS, named_run


def load_tokenizer(spec: str) -> Tokenizer:
    """Loads the tokenizer "gpt2" or "bytes", or from path `spec`: a run, a checkpoint, a transformers folder, or a
    `tokenizer.json` or its folder. Raises UsageError: no such tokenizer; DataError: a `tokenizer.json` that is not a
    byte-level BPE with GPT-2's splitter, or a folder whose tokenizer handgrad lacks."""
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
        hint = answer(spec)
        if Path(spec).is_dir():
            hint = f", a folder without a tokenizer; {named_run(Path(spec))}"
        raise UsageError(
            f"expected the tokenizer gpt2, bytes, bpe:SIZE, a run, a model's folder or a tokenizer.json, found {spec!r}"
            f"{hint}"
        )
    content = read_small(path)
    if is_palette(content):
        return codes_tokenizer(parse_codes(content, str(path)))
    try:
        return parse_bpe(content, where=str(path))
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
    return of_transformers(folder, vocabulary_rows(read_object(folder / MODEL_FILE)))


def read_tokenizer(folder: Path, record: Any) -> Tokenizer:
    """The tokenizer that `record`, a manifest's entry, names; DataError if it is not the one that made the shards."""
    kind = record.get("kind") if isinstance(record, dict) else None
    if kind not in ("gpt2", "bytes", "bpe", "model", PALETTE):
        raise DataError(f"expected a tokenizer gpt2, bytes, bpe or palette in {folder}, found {kind!r:.100}; prepare again")
    if kind in ("bpe", "model", PALETTE) and not (folder / TOKENIZER_FILE).is_file():
        raise DataError(f"expected {TOKENIZER_FILE} in {folder}, found no such file; restore it or prepare the data again")
    if kind == "model":
        tokenizer = of_record(folder, record)
    else:
        tokenizer = load_tokenizer(str(folder / TOKENIZER_FILE) if kind in ("bpe", PALETTE) else kind)
    for name in ("sha256", "vocab_size", "end_of_text"):
        if record.get(name) != getattr(tokenizer, name):
            raise DataError(
                f"expected the tokenizer with {name} {record.get(name)!r:.100} that made the shards in {folder}, "
                f"found {getattr(tokenizer, name)}; restore it or prepare the data again"
            )
    return tokenizer


GPT2, BYTES, SIZED = "did you mean gpt2?", "did you mean bytes?", "a trained one has its size in its name, as bpe:4096"
OPENAI = "of OpenAI's vocabularies handgrad has gpt2 alone; bpe:4096 trains one on your text"
PIECES = "handgrad has tokenizers of bytes alone, no SentencePiece or WordPiece; bpe:4096 trains one on your text"
# Remedy -> the names that get it.
ANSWERS = {
    GPT2: "gpt-2 gpt2-small gpt2-medium gpt2-large gpt2-xl gpt gpt3 gpt-3 r50k r50k-base tiktoken openai-community/gpt2",
    BYTES: "byte byte-level raw utf8 utf-8 ascii byt5",
    "bytes is the nearest, a token for each byte; handgrad has none of characters": "char chars char-level character"
    " characters character-level",
    SIZED: "bpe bbpe byte-bpe bytelevel-bpe byte-level-bpe hf tokenizers huggingface train trained custom new own",
    OPENAI: "p50k p50k-base cl100k cl100k-base o200k o200k-base o200k-harmony gpt3.5 gpt-3.5 gpt-3.5-turbo gpt4 gpt-4 gpt4o"
    " gpt-4o gpt5 gpt-5 gpt-oss",
    PIECES: "sentencepiece spm sp unigram wordpiece word words wordlevel whitespace bert bert-base-uncased",
    "leave --tokenizer out": "none default",
}
# Families whose tokenizer comes with a model's folder: how their names begin -> a model of the family on the Hub.
FAMILIES = {"llama": "meta-llama/Llama-3.2-1B", "qwen": "Qwen/Qwen3-0.6B", "smollm": "HuggingFaceTB/SmolLM2-135M"}
FAMILIES |= {"gemma-?3": "google/gemma-3-270m"}
WITH_PIECES = r"(llama-?2|tinyllama|mistral|mixtral|gemma(?!-?3(-|$))|t5)[-\w.]*"  # models without a byte-level tokenizer
SUFFIXES = (".json", ".model", ".bin", ".txt")  # of files
HUB_NAME = r"\w[\w.-]*/\w[\w.-]*"
LARGEST = 1 << 16


def answer(name: str) -> str:
    """The end of the message about a name that is neither a tokenizer of handgrad, nor a file, nor a folder."""
    remedy = meant(name)
    if not remedy and re.fullmatch(HUB_NAME, name) and Path(name).suffix not in SUFFIXES:
        return f", no such file or folder; a model of the Hub comes by {imports(name)}"
    return f"; {remedy}" if remedy else ", no such file or folder"


def meant(name: str) -> str:
    """The remedy for one of the names above; empty for any other name."""
    plain = name.lower().replace("_", "-")
    for preset, names in ANSWERS.items():
        if plain in names.split():
            return preset
    if re.fullmatch(WITH_PIECES, plain):
        return PIECES
    if re.fullmatch(r"gpt2|bytes|auto|bpe:\d+", plain):
        return "" if plain == name else f"did you mean {plain}?"
    if (size := re.fullmatch(r"(?:bpe|bbpe)?[-=: ]?(\d{1,5})(k?)", plain)) and (words := words_of(*size.groups())):
        return f"did you mean bpe:{words}?"
    if model := next((model for family, model in FAMILIES.items() if re.fullmatch(rf"{family}[-\w.]*", plain)), ""):
        return f"it comes with a model, as by {imports(model)}"
    return ""


def words_of(digits: str, kilo: str) -> int:
    """The vocabulary size in a name, which may end in k; 0 if bpe:SIZE does not allow it."""
    words = int(digits) * (1024 if kilo else 1)
    return words if 257 <= words <= LARGEST else 0


def imports(model: str) -> str:
    """The command that fetches a model of the Hub, and the option that takes its tokenizer."""
    run = f"runs/{model.rpartition('/')[2]}"
    return f"`{shlex.join(['handgrad', 'import', model, '--out', run])}`, then --tokenizer {shlex.quote(run)}"
