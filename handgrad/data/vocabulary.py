"""Tokenizers as transformers keeps them: `tokenizer.json`, `vocab.json`, `merges.txt`, `tokenizer_config.json`.

All three kinds translate exactly, bytes as a byte-level BPE without merges. One difference is deliberate: transformers
reads a literal "<|endoftext|>" in a text as the special token, we read it as text.
"""

import functools
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from handgrad.data.tokenizer import (
    END_OF_TEXT,
    TOKENIZER_FILE,
    Tokenizer,
    byte_level,
    byte_of_character,
    bytes_tokenizer,
    gpt2_tokenizer,
    parse_bpe,
    read_small,
    with_beginning,
)
from handgrad.errors import DataError
from handgrad.parsing import parse_json

VOCAB_FILE, MERGES_FILE, SETTINGS_FILE = "vocab.json", "merges.txt", "tokenizer_config.json"


def characters(token: bytes) -> str:
    """A token in the byte-level alphabet: one printable character per byte."""
    return "".join(map(_character_of_byte().__getitem__, token))


@functools.cache
def _character_of_byte() -> dict[int, str]:
    return {byte: character for character, byte in byte_of_character().items()}


def vocabulary(tokenizer: Tokenizer) -> dict[str, int]:
    """Token (in the byte-level alphabet) -> id, end-of-text included, in the order of the ids."""
    tokens = [characters(token) for token in tokenizer.token_bytes]
    tokens[tokenizer.end_of_text] = END_OF_TEXT
    return {token: i for i, token in enumerate(tokens)}


@functools.cache
def gpt2_merges() -> tuple[tuple[str, str], ...]:
    """GPT-2's merges, in their order, from the ranks of its tokens.

    The last merge of its own bytes makes a token of rank r: the merges of lower rank leave two pieces.
    """
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
    made = byte_level(tokenizers.models.BPE(vocab=vocab, merges=list(merges)), splits=splits)
    made.add_special_tokens([END_OF_TEXT])  # with the id that the vocabulary has for it
    return made.to_str().encode()


def vocabulary_files(tokenizer: Tokenizer, longest: int) -> dict[str, bytes]:
    """The files by name, a model's as they came; `longest` is the model's context in tokens."""
    if tokenizer.kind == "model":
        return {TOKENIZER_FILE: tokenizer.json_bytes} | {name: text.encode() for name, text in tokenizer.others.items()}
    vocab = vocabulary(tokenizer)
    merges = gpt2_merges() if tokenizer.kind == "gpt2" else tokenizer.merges
    # A trained one as it is: its hash is the identity of shards.
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
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
    return {
        TOKENIZER_FILE: with_beginning(content, tokenizer.end_of_text),
        VOCAB_FILE: json.dumps(vocab, ensure_ascii=False).encode(),
        MERGES_FILE: ("\n".join(lines) + "\n").encode(),
        SETTINGS_FILE: json.dumps(settings, indent=2).encode(),
    }


def read_vocabulary(folder: Path) -> Tokenizer:
    """The tokenizer of a transformers folder: GPT-2's, bytes, or another byte-level BPE with GPT-2's splitter.

    Raises `DataError` if there is none, or one with other rules.
    """
    path = folder / TOKENIZER_FILE
    if path.is_file():
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
    same = tokenizer.token_bytes == gpt2.token_bytes and tokenizer.merges == gpt2_merges()
    return gpt2 if same else tokenizer


def _joined(vocab_path: Path, merges_path: Path) -> bytes:
    """The two files that GPT-2 came with, as one `tokenizer.json`."""
    ids = sorted(_ids(vocab_path))
    if ids != list(range(len(ids))):  # the library has room for every id up to the largest
        found = next((i for i, there in enumerate(ids) if i != there), 0)
        raise DataError(
            f"expected tokens in {vocab_path} with the ids 0 to {len(ids) - 1}, found {ids[found]} instead of {found};"
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


def _ids(path: Path) -> list[int]:
    """The ids in a vocab.json. Raises `DataError` if it is none."""
    content = read_small(path)
    try:
        vocab = parse_json(content)
    except ValueError as error:
        raise DataError(f"expected tokens in {path}, found {error!s:.200}; fetch it again") from None
    if not isinstance(vocab, dict) or not all(type(i) is int for i in vocab.values()):
        raise DataError(f"expected tokens in {path}, each with its id, found something else; fetch it again")
    return list(vocab.values())


def is_bytes(content: bytes) -> bool:
    """True if in a `tokenizer.json` every byte is its own id, and end-of-text is 256."""
    try:
        tables = parse_json(content)
        model, splitter = tables["model"], tables["pre_tokenizer"]
        same = model["type"] == "BPE" and model["vocab"] == vocabulary(bytes_tokenizer()) and model["merges"] == []
        plain = tables["normalizer"] is None and splitter["type"] == "ByteLevel" and splitter["add_prefix_space"] is False
        return same and plain and [token["content"] for token in tables["added_tokens"]] == [END_OF_TEXT]
    except (ValueError, KeyError, TypeError):
        return False
