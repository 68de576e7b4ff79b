"""Reads and writes tokenizers in transformers' format.

The tokenizers library runs the `tokenizer.json` of a model's own tokenizer; its other files are kept. That file lacks two
numbers: the size of the model's vocabulary, which may have more rows than tokens, and the token that ends a document.

GPT-2's, bytes and trained ones translate exactly into `tokenizer.json`, `vocab.json`, `merges.txt` and
`tokenizer_config.json`, bytes as a byte-level BPE without merges. One difference is deliberate: transformers reads a
literal "<|endoftext|>" in a text as the special token, we read it as text.
"""

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from handgrad.data.codes import PALETTE, PALETTE_FILE, codes_tokenizer, parse_codes
from handgrad.data.confined import ProgramError, program
from handgrad.data.tokenizer import (
    BYTE_OF_CHARACTER,
    CHARACTER_OF_BYTE,
    END_OF_TEXT,
    OTHERS_FILE,
    TOKENIZER_FILE,
    Tokenizer,
    byte_level,
    bytes_tokenizer,
    gpt2_tokenizer,
    parse_bpe,
    read_small,
    with_beginning,
)
from handgrad.errors import DataError
from handgrad.parsing import parse_json

KIND, GENERATION_FILE, CONFIG_FILE = "model", "generation_config.json", "tokenizer_config.json"
MODEL_FILE = "config.json"  # only its padding token travels with the tokenizer
# Files of transformers next to `tokenizer.json`, with the chat template and the end-of-text tokens; kept unchanged.
OTHERS = (
    *(CONFIG_FILE, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", GENERATION_FILE),
)
MAX_TOKENS = 1 << 24
# Gemma's SentencePiece in the library: blanks are written as this character, any character that has no token as its bytes.
BLANK, BYTE = "▁", re.compile("<0x([0-9A-F]{2})>")
UNBLANKED = {"type": "Replace", "pattern": {"String": BLANK}, "content": " "}
PIECES = {
    "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": BLANK},
    "decoder": {"type": "Sequence", "decoders": [UNBLANKED, {"type": "ByteFallback"}, {"type": "Fuse"}]},
}
IMAGE = "<image_soft_token>"  # Gemma's text models have no row for it
IMAGE_ROWS = 262208  # of the vocabulary of a Gemma 3 with images, where config.json leaves it out


def read_model_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a transformers folder. Raises `DataError` if there is none, or none that handgrad supports."""
    path, config = folder / TOKENIZER_FILE, read_object(folder / MODEL_FILE)
    if not path.is_file():
        raise DataError(f"expected {TOKENIZER_FILE} in {folder}, found no such file; add the model's tokenizer files")
    others = {name: read_text(folder / name) for name in OTHERS if (folder / name).is_file()}
    ends = config.get("eos_token_id")
    if ends is None and GENERATION_FILE in others:
        ends = read_object(folder / GENERATION_FILE).get("eos_token_id")
    elif isinstance(ends, list):  # transformers derives this file from the configuration if it is missing
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
        others.setdefault(GENERATION_FILE, json.dumps(ids))
    if (pad := config.get("pad_token_id")) is not None:
        others[MODEL_FILE] = json.dumps({"pad_token_id": pad})
    first = ends[0] if isinstance(ends, list) and ends else ends
    tokenizer = model_tokenizer(read_small(path), others, vocabulary_rows(config), first, str(path))
    check_added(folder, tokenizer)
    return tokenizer


def vocabulary_rows(config: Mapping[str, Any]) -> Any:
    """The size of the vocabulary in a config.json, which is its text model's in one of a model with images."""
    text = config.get("text_config")
    return text.get("vocab_size", IMAGE_ROWS) if isinstance(text, dict) else config.get("vocab_size")


def check_added(folder: Path, tokenizer: Tokenizer) -> None:
    """Raises `DataError` for a token that another file adds, as transformers would, but `tokenizer.json` does not."""
    listed: dict[Any, Any] = {}
    if "added_tokens.json" in tokenizer.others:
        entries = read_object(folder / "added_tokens.json")
        listed |= {number if type(number) is int else repr(number): content for content, number in entries.items()}
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
    """The text of a model's file. Raises `DataError`: it is not UTF-8, or implausibly large."""
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
    """The tokenizer of a `tokenizer.json` with this `content`. Raises `DataError` if it is damaged or unsupported."""
    try:
        library, tables = program("tokenizer", content), parse_json(content)
    except ValueError as error:
        raise DataError(f"expected a tokenizer in {where}, found {error!s:.200}; fetch it again") from None
    steps = tables.get("decoder") or {}
    kinds = {step.get("type") for step in steps.get("decoders", [steps])}
    if not (pieces := has_pieces(tables)) and kinds != {"ByteLevel"}:
        actual = ", ".join(map(str, sorted(kinds, key=str)))
        ours = "handgrad has tokenizers of bytes and Gemma's, no SentencePiece as of Llama 2, TinyLlama and Mistral"
        raise DataError(f"expected a ByteLevel decoder in {where}, found {actual}; {ours}")
    about = json.loads(library.about)
    least = about["size"] - ([about["size"] - 1, IMAGE] in about["added"])
    if type(vocab_size) is not int or not least <= vocab_size <= MAX_TOKENS:
        raise DataError(
            f"expected a vocab_size of {least} or more beside {where}, found {vocab_size!r:.80}; for added tokens call"
            f" model.resize_token_embeddings({least}) in transformers and save it"
        )
    if type(end_of_text) is not int or not 0 <= end_of_text < least:
        raise DataError(f"expected an eos_token_id, which ends texts, beside {where}, found {end_of_text!r:.80}; name it")
    try:
        bytes_of = piece_bytes if pieces else lambda token: bytes(map(BYTE_OF_CHARACTER.__getitem__, token))
        token_bytes = {number: bytes_of(token or "") for number, token in about["tokens"]}
    except KeyError:
        raise DataError(
            f"expected tokens in the byte-level alphabet in {where}, found others; handgrad has no such tokenizer"
        ) from None
    token_bytes |= {number: piece_bytes(token) if pieces else token.encode() for number, token in about["added"]}
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        try:
            reply = np.frombuffer(library.run(json.dumps(texts, ensure_ascii=False).encode()), np.uint32)
        except ProgramError as error:
            raise DataError(f"expected a tokenizer in {where} that encodes any text, found {error}; use another") from None
        return np.split(reply[len(texts) :].astype(dtype), np.cumsum(reply[: len(texts)])[:-1]) if len(texts) else []

    sha256 = hashlib.sha256(content + f"{vocab_size} {end_of_text}".encode()).hexdigest()
    every = tuple(token_bytes.get(number, b"") for number in range(vocab_size))
    return Tokenizer(KIND, every, end_of_text, sha256, encode, content, others=dict(others), begins=tuple(about["begins"]))


def has_pieces(tables: Mapping[str, Any]) -> bool:
    """True for Gemma's rules: they give every text back, but for `BLANK` as a blank."""
    same = all(tables.get(key) == step for key, step in PIECES.items())
    return same and (tables.get("model") or {}).get("byte_fallback") is True


def piece_bytes(piece: str) -> bytes:
    byte = BYTE.fullmatch(piece)
    return bytes.fromhex(byte[1]) if byte else piece.replace(BLANK, " ").encode()


def of_record(folder: Path, record: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a manifest's entry names, from the files next to the manifest."""
    others = read_object(folder / OTHERS_FILE) if (folder / OTHERS_FILE).is_file() else {}
    path = folder / TOKENIZER_FILE
    return model_tokenizer(read_small(path), others, record.get("vocab_size"), record.get("end_of_text"), str(path))


def of_transformers(folder: Path, vocab_size: Any) -> Tokenizer:
    """The tokenizer of a transformers folder: GPT-2's, bytes, a BPE with its splitter, or the model's own."""
    return read_vocabulary(folder) if is_ours(folder / TOKENIZER_FILE, vocab_size) else read_model_tokenizer(folder)


def is_ours(path: Path, vocab_size: Any) -> bool:
    """True for bytes, for a byte-level BPE of this size with GPT-2's splitter and one special token, and if there is no
    file, as in a folder with GPT-2's older files."""
    if not path.is_file() or is_bytes(content := read_small(path)):
        return True
    try:
        return parse_bpe(content, where=str(path)).vocab_size == vocab_size
    except DataError:
        return False


VOCAB_FILE, MERGES_FILE = "vocab.json", "merges.txt"


def characters(token: bytes) -> str:
    """A token in the byte-level alphabet: one printable character per byte."""
    return "".join(map(CHARACTER_OF_BYTE.__getitem__, token))


def vocabulary(tokenizer: Tokenizer) -> dict[str, int]:
    """Token (in the byte-level alphabet) -> id, end-of-text included, in the order of the ids."""
    tokens = [characters(token) for token in tokenizer.token_bytes]
    tokens[tokenizer.end_of_text] = END_OF_TEXT
    return {token: i for i, token in enumerate(tokens)}


@functools.cache
def gpt2_merges() -> tuple[tuple[str, str], ...]:
    """GPT-2's merges in order, derived from the ranks of its tokens.

    The merges of lower rank reduce the bytes of a token of rank r to two pieces; the merge of rank r joins these."""
    tokenizer = gpt2_tokenizer()
    tokens = tokenizer.token_bytes[: tokenizer.end_of_text]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tuple(
        (characters(left), characters(right))
        for rank, token in enumerate(tokens)
        if len(token) > 1
        for left, right in [_two_pieces(token, rank, ranks)]
    )


def _two_pieces(token: bytes, rank: int, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    pieces = [token[i : i + 1] for i in range(len(token))]
    while len(pieces) > 2:
        pairs = [ranks.get(left + right, rank) for left, right in itertools.pairwise(pieces)]
        first = min(range(len(pairs)), key=pairs.__getitem__)
        assert pairs[first] < rank, f"{token!r} is no merge of tokens of lower rank"
        pieces[first : first + 2] = [pieces[first] + pieces[first + 1]]
    return pieces[0], pieces[1]


def tokenizer_json(vocab: dict[str, int], merges: Sequence[tuple[str, str]], *, splits: bool = True) -> bytes:
    """A `tokenizer.json` of a byte-level BPE; `splits`: GPT-2's splitter cuts a text first."""
    tokenizer = byte_level(tokenizers.models.BPE(vocab=vocab, merges=list(merges)), splits=splits)
    tokenizer.add_special_tokens([END_OF_TEXT])  # with its id in the vocabulary
    return tokenizer.to_str().encode()


def vocabulary_files(tokenizer: Tokenizer, longest: int) -> dict[str, bytes]:
    """The tokenizer's files by name; a model's own are unchanged. `longest`: the model's context in tokens."""
    if tokenizer.kind == "model":
        return {TOKENIZER_FILE: tokenizer.json_bytes} | {name: text.encode() for name, text in tokenizer.others.items()}
    if tokenizer.kind == PALETTE:
        return {PALETTE_FILE: tokenizer.json_bytes}
    vocab = vocabulary(tokenizer)
    merges = gpt2_merges() if tokenizer.kind == "gpt2" else tokenizer.merges
    # Keeps a trained tokenizer's file unchanged: its hash identifies shards.
    content = tokenizer.json_bytes or tokenizer_json(vocab, merges, splits=tokenizer.kind != "bytes")
    settings = {
        # Bytes have no splitter; the class GPT2Tokenizer would add one.
        "tokenizer_class": "PreTrainedTokenizerFast" if tokenizer.kind == "bytes" else "GPT2Tokenizer",
        "add_prefix_space": False,
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "add_bos_token": True,  # for llama.cpp's converter; transformers follows tokenizer.json
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
    }
    return {
        TOKENIZER_FILE: with_beginning(content, tokenizer.end_of_text),
        VOCAB_FILE: json.dumps(vocab, ensure_ascii=False).encode(),
        MERGES_FILE: ("\n".join(["#version: 0.2", *(f"{left} {right}" for left, right in merges)]) + "\n").encode(),
        CONFIG_FILE: json.dumps(settings, indent=2).encode(),
    }


def read_vocabulary(folder: Path) -> Tokenizer:
    """The tokenizer of a transformers folder: GPT-2's, bytes, a palette, or another byte-level BPE with GPT-2's
    splitter. Raises `DataError` if there is none, or it has other rules."""
    if (path := folder / PALETTE_FILE).is_file():
        return codes_tokenizer(parse_codes(read_small(path), str(path)))
    if (path := folder / TOKENIZER_FILE).is_file():
        content = read_small(path)
    elif (folder / VOCAB_FILE).is_file() and (folder / MERGES_FILE).is_file():
        path = folder / VOCAB_FILE
        content = _joined(path, folder / MERGES_FILE)
    else:
        raise DataError(
            f"expected {TOKENIZER_FILE}, or {VOCAB_FILE} and {MERGES_FILE}, in {folder}, found neither; add the model's"
            " tokenizer files, or name one with `handgrad import --tokenizer gpt2|bytes|FILE`"
        )
    if is_bytes(content):
        return bytes_tokenizer()
    tokenizer = parse_bpe(content, where=str(path))
    gpt2 = gpt2_tokenizer()
    return gpt2 if tokenizer.token_bytes == gpt2.token_bytes and tokenizer.merges == gpt2_merges() else tokenizer


def _joined(vocab_path: Path, merges_path: Path) -> bytes:
    """Joins the two files that GPT-2 came with into one `tokenizer.json`."""
    vocab = read_object(vocab_path)
    if not all(type(i) is int for i in vocab.values()):
        raise DataError(f"expected tokens in {vocab_path}, each with its id, found something else; fetch it again")
    ids = sorted(vocab.values())
    if ids != list(range(len(ids))):  # the library has room for every id up to the largest
        missing = next((i for i, there in enumerate(ids) if i != there), 0)
        raise DataError(
            f"expected tokens in {vocab_path} with the ids 0 to {len(ids) - 1}, found {ids[missing]} instead of {missing};"
            " fetch it again"
        )
    read_small(merges_path)  # refuses a huge file
    try:
        vocab, merges = tokenizers.models.BPE.read_file(str(vocab_path), str(merges_path))
        content = tokenizer_json(vocab, merges)
    except Exception as error:  # the library raises nothing narrower
        raise DataError(
            f"expected tokens in {vocab_path} and their merges in {merges_path}, found {error!s:.200}; fetch them again"
        ) from None
    if END_OF_TEXT not in vocab:
        raise DataError(f"expected {END_OF_TEXT} in {vocab_path}, found no such token; use a GPT-2 tokenizer")
    return content


def is_bytes(content: bytes) -> bool:
    """True for a `tokenizer.json` where every byte is its own id and end-of-text is 256."""
    try:
        tables = parse_json(content)
        model, splitter = tables["model"], tables["pre_tokenizer"]
        same = model["type"] == "BPE" and model["vocab"] == vocabulary(bytes_tokenizer()) and model["merges"] == []
        plain = tables["normalizer"] is None and splitter["type"] == "ByteLevel" and splitter["add_prefix_space"] is False
        return same and plain and [token["content"] for token in tables["added_tokens"]] == [END_OF_TEXT]
    except (ValueError, KeyError, TypeError):
        return False
