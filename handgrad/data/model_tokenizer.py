"""The tokenizer of a model from elsewhere: its own library runs its `tokenizer.json`, and the files beside it are kept.

Two numbers are not in that file: the size of the model's vocabulary, which may have more rows than there are tokens, and
the token that ends a document.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from handgrad.data.tokenizer import (
    OTHERS_FILE,
    TOKENIZER_FILE,
    Tokenizer,
    byte_of_character,
    parse_bpe,
    read_small,
)
from handgrad.data.vocabulary import is_bytes, read_vocabulary
from handgrad.errors import DataError
from handgrad.parsing import parse_json

KIND, GENERATION_FILE, CONFIG_FILE = "model", "generation_config.json", "tokenizer_config.json"
MODEL_FILE = "config.json"  # of which nothing but the padding token travels with the tokenizer
# Files of transformers beside `tokenizer.json`, among them the chat template and all ends of texts; kept unchanged.
OTHERS = (
    *(CONFIG_FILE, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", GENERATION_FILE),
)
MAX_TOKENS = 1 << 24


def read_model_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a transformers folder. Raises `DataError` if there is none that gives a text's bytes back."""
    path, config = folder / TOKENIZER_FILE, read_object(folder / MODEL_FILE)
    if not path.is_file():
        raise DataError(f"expected {TOKENIZER_FILE} in {folder}, found no such file; add the model's tokenizer files")
    others = {name: read_text(folder / name) for name in OTHERS if (folder / name).is_file()}
    ends = config.get("eos_token_id")
    if ends is None and GENERATION_FILE in others:
        ends = read_object(folder / GENERATION_FILE).get("eos_token_id")
    elif isinstance(ends, list):  # transformers makes this file of the configuration, where there is none
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
        others.setdefault(GENERATION_FILE, json.dumps(ids))
    if (pad := config.get("pad_token_id")) is not None:
        others[MODEL_FILE] = json.dumps({"pad_token_id": pad})
    first = ends[0] if isinstance(ends, list) and ends else ends
    tokenizer = model_tokenizer(read_small(path), others, config.get("vocab_size"), first, str(path))
    check_added(folder, tokenizer)
    return tokenizer


def check_added(folder: Path, tokenizer: Tokenizer) -> None:
    """Raises `DataError` for a token that only a file beside `tokenizer.json` adds: transformers would add it, we would
    not."""
    listed: dict[Any, Any] = {}
    if "added_tokens.json" in tokenizer.others:
        found = read_object(folder / "added_tokens.json")
        listed |= {number if type(number) is int else repr(number): content for content, number in found.items()}
    if CONFIG_FILE in tokenizer.others:
        decoder = read_object(folder / CONFIG_FILE).get("added_tokens_decoder")
        for number, token in decoder.items() if isinstance(decoder, dict) else ():
            listed[int(number) if str(number).isdigit() else number] = (
                token.get("content") if isinstance(token, dict) else token
            )
    added = {token["id"]: token["content"] for token in parse_json(tokenizer.json_bytes).get("added_tokens") or []}
    for number, content in listed.items():
        if added.get(number) != content:
            raise DataError(
                f"expected the added token {content!r:.60} ({number!r:.20}) in {folder / TOKENIZER_FILE}, found it in"
                " another file beside it; load the tokenizer in transformers and save it again"
            )


def read_text(path: Path) -> str:
    """A file of a model. Raises `DataError`: it is not UTF-8, or larger than any is."""
    try:
        return read_small(path).decode()
    except UnicodeDecodeError:
        raise DataError(f"expected UTF-8 in {path}, found other bytes; fetch it again") from None


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model. Raises `DataError` if there is none."""
    if not path.is_file():
        raise DataError(f"expected {path.name} in {path.parent}, found no such file; give a transformers folder")
    content = read_small(path)
    try:
        content = parse_json(content)
    except ValueError as error:
        raise DataError(f"expected JSON in {path}, found {error!s:.200}; fetch it again") from None
    if not isinstance(content, dict):
        raise DataError(f"expected a JSON object in {path}, found {type(content).__name__}; fetch it again")
    return content


def model_tokenizer(content: bytes, others: Mapping[str, str], vocab_size: Any, end_of_text: Any, where: str) -> Tokenizer:
    """The tokenizer in a `tokenizer.json` of this `content`. Raises `DataError`."""
    try:
        library = tokenizers.Tokenizer.from_buffer(content)
        tables = parse_json(content)
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"expected a tokenizer in {where}, found {error!s:.200}; fetch it again") from None
    steps = tables.get("decoder") or {}
    kinds = {step.get("type") for step in steps.get("decoders", [steps])}
    if kinds != {"ByteLevel"}:
        found = ", ".join(map(str, sorted(kinds, key=str)))
        ours = "handgrad has tokenizers of bytes alone, no SentencePiece as of Llama 2, TinyLlama and Mistral"
        raise DataError(f"expected a ByteLevel decoder in {where}, found {found}; {ours}")
    if type(vocab_size) is not int or not library.get_vocab_size() <= vocab_size <= MAX_TOKENS:
        least = library.get_vocab_size()
        raise DataError(
            f"expected a vocab_size of {least} or more beside {where}, found {vocab_size!r:.80}; for added tokens call"
            f" model.resize_token_embeddings({least}) in transformers and save it"
        )
    if type(end_of_text) is not int or not 0 <= end_of_text < library.get_vocab_size():
        raise DataError(
            f"expected a token that ends texts as eos_token_id beside {where}, found {end_of_text!r:.80}; name it"
        )
    library.encode_special_tokens = True  # what reads like one in a text is text
    library.no_truncation()
    library.no_padding()
    added, byte_of = library.get_added_tokens_decoder(), byte_of_character()

    def bytes_of(token: int) -> bytes:
        if token in added:
            return added[token].content.encode()
        return bytes(byte_of[character] for character in library.id_to_token(token) or "")

    try:
        token_bytes = tuple(map(bytes_of, range(vocab_size)))
    except KeyError:
        raise DataError(
            f"expected tokens in the byte-level alphabet in {where}, found others; handgrad has no such tokenizer"
        ) from None
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32

    def encode(text: str) -> np.ndarray:
        return np.array(library.encode_batch_fast([text], add_special_tokens=False)[0].ids, dtype=dtype)

    sha256 = hashlib.sha256(content + f"{vocab_size} {end_of_text}".encode()).hexdigest()
    begins = tokens_before(library)
    return Tokenizer(KIND, token_bytes, end_of_text, sha256, encode, content, others=dict(others), begins=begins)


def tokens_before(library: tokenizers.Tokenizer) -> tuple[int, ...]:
    """The tokens that a library's tokenizer puts before every text."""
    whole, text = (library.encode("a", add_special_tokens=special).ids for special in (True, False))
    places = range(len(whole) - len(text) + 1)
    return tuple(whole[: next((n for n in places if whole[n : n + len(text)] == text), 0)])


def of_record(folder: Path, record: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a manifest's entry names, from the files beside the manifest."""
    others = read_object(folder / OTHERS_FILE) if (folder / OTHERS_FILE).is_file() else {}
    path = folder / TOKENIZER_FILE
    return model_tokenizer(read_small(path), others, record.get("vocab_size"), record.get("end_of_text"), str(path))


def of_transformers(folder: Path, vocab_size: Any) -> Tokenizer:
    """The tokenizer of a transformers folder: GPT-2's, bytes, a BPE with GPT-2's splitter, or else the model's own.
    `vocab_size`: of the model."""
    return read_vocabulary(folder) if is_ours(folder / TOKENIZER_FILE, vocab_size) else read_model_tokenizer(folder)


def is_ours(path: Path, vocab_size: Any) -> bool:
    """True for bytes, for a byte-level BPE of this size with GPT-2's splitter and one special token, and for no file at
    all, which a folder of GPT-2's older files has not."""
    if not path.is_file() or is_bytes(content := read_small(path)):
        return True
    try:
        return parse_bpe(content, where=str(path)).vocab_size == vocab_size
    except DataError:
        return False
