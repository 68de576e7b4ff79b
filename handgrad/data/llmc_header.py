"""The first kilobyte of every llm.c file: 256 little-endian int32 with the file's kind, its layout's version, and sizes.

Source: llm.c, train_gpt2.py, train_gpt2.cu, dev/data/data_common.py, train_llama3.py.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from handgrad.errors import DataError, storage_errors

HEADER_WORDS = 256
HEADER_BYTES = HEADER_WORDS * 4
MODEL, DEBUG_STATE, TOKENIZER, TOKENS, EVALUATION, OPTIMIZER = 20240326, 20240327, 20240328, 20240520, 20240522, 20240527
WIDE_TOKENS = 20240801
KINDS = {
    MODEL: "a GPT-2 model",
    DEBUG_STATE: "a debug state",
    TOKENIZER: "a tokenizer",
    TOKENS: "GPT-2 tokens",
    EVALUATION: "multiple-choice questions",
    OPTIMIZER: "an optimizer state",
    WIDE_TOKENS: "Llama 3 tokens",
    20240803: "a Llama 3 model",
}


def make_header(words: dict[int, int]) -> bytes:
    """A header of 1024 bytes: `words` maps index to number, the rest is zero."""
    content = np.zeros(HEADER_WORDS, "<i4")
    for index, value in words.items():
        content[index] = value
    return content.tobytes()


def read_header(path: Path, magic: int, versions: tuple[int, ...]) -> tuple[list[int], int]:
    """(the 256 numbers of the header of a file of kind `magic`, size of the file in bytes). Raises `DataError`: no such
    file, too short, of another kind or version; `StorageError`: it cannot be read."""
    with storage_errors(f"reading {path}"):
        if not path.is_file():
            raise DataError(f"expected {KINDS[magic]} of llm.c at {path}, found no such file")
        with path.open("rb") as file:
            first = file.read(HEADER_BYTES)
        return parse_header(first, path, magic, versions), path.stat().st_size


def parse_header(first: bytes, path: Path, magic: int, versions: tuple[int, ...]) -> list[int]:
    """The 256 numbers of the header of `path`. Raises `DataError`: too short, another kind or version."""
    if len(first) < HEADER_BYTES:
        raise DataError(f"expected an llm.c header of {HEADER_BYTES} bytes in {path}, found {len(first)}; the file was cut")
    words = np.frombuffer(first, "<i4").tolist()
    if words[0] != magic:
        kind = f"{words[0]}, {KINDS[words[0]]}" if words[0] in KINDS else f"{words[0]}, which is no llm.c file's"
        raise DataError(f"expected magic {magic} ({KINDS[magic]}) in {path}, found {kind}; give another file")
    if words[1] not in versions:
        wanted = " or ".join(map(str, versions))
        raise DataError(f"expected version {wanted} of {KINDS[magic]} in {path}, found {words[1]}; use a newer llm.c")
    return words


def check_size(path: Path, expected: int, actual: int, content: str) -> None:
    """Raises `DataError` if a file is not as long as its header says; `content` names the sizes in it."""
    if actual != expected:
        raise DataError(f"expected {expected} bytes for {content} in {path}, found {actual}; restore it or make it again")


class TokenForm(NamedTuple):
    """One of the two formats of a token file: its magic, its version, the dtype of a token."""

    magic: int
    version: int
    dtype: np.dtype


NARROW, WIDE = TokenForm(TOKENS, 1, np.dtype("<u2")), TokenForm(WIDE_TOKENS, 7, np.dtype("<u4"))


def token_form(vocab_size: int) -> TokenForm:
    """The format that can hold every token of a vocabulary."""
    return NARROW if vocab_size <= 1 << 16 else WIDE


def header(token_count: int, form: TokenForm = NARROW) -> bytes:
    """The 1024 bytes that precede `token_count` tokens."""
    return make_header({0: form.magic, 1: form.version, 2: token_count})
