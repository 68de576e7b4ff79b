"""llm.c's tokenizer file: the bytes of every token. It can decode but not encode, so at best it identifies a tokenizer.

    header    [0] 20240328  [1] 2 (1: without the id of end-of-text)  [2] V  [3] id of end-of-text
    per token    its length in bytes, one byte; its bytes

Source: llm.c, train_gpt2.py (`write_tokenizer`) and llmc/tokenizer.h.
"""

from pathlib import Path

from handgrad.data.llmc_header import HEADER_BYTES, TOKENIZER, make_header, read_header
from handgrad.data.tokenizer import MAX_VOCAB_SIZE, TOKENIZER_FILE, Tokenizer, read_small
from handgrad.data.tokenizer_loading import load_tokenizer
from handgrad.errors import DataError, UsageError
from handgrad.memory.rows import rounded_up
from handgrad.settings.config import VOCABULARY_MULTIPLE

GPT2_VOCAB_SIZE = 50257
LONGEST_TOKEN_BYTES = 255


def tokenizer_bytes(tokenizer: Tokenizer) -> bytes:
    """The content of the file. Raises `UsageError` if a token is too long for it, or if no file beside it can encode: of
    another model's tokenizer."""
    if tokenizer.kind == "model":
        raise UsageError(
            "expected the tokenizer gpt2, bytes or bpe for llm.c's files, found another model's; `export --to hf` writes it"
        )
    longest = max(map(len, tokenizer.token_bytes))
    if longest > LONGEST_TOKEN_BYTES:
        raise UsageError(
            f"expected tokens of at most {LONGEST_TOKEN_BYTES} bytes for llm.c's tokenizer file, found one of {longest};"
            " train the tokenizer on other text"
        )
    words = {0: TOKENIZER, 1: 2, 2: tokenizer.vocab_size, 3: tokenizer.end_of_text}
    return make_header(words) + b"".join(bytes([len(token)]) + token for token in tokenizer.token_bytes)


def read_tokens(path: Path) -> tuple[tuple[bytes, ...], int]:
    """(the bytes of every token, the id of end-of-text) of a tokenizer file. Raises `DataError`."""
    words, _ = read_header(path, TOKENIZER, (1, 2))
    count, end_of_text = words[2], words[3] if words[1] == 2 else GPT2_VOCAB_SIZE - 1
    if not 0 <= end_of_text < count <= MAX_VOCAB_SIZE:
        raise DataError(
            f"expected at most {MAX_VOCAB_SIZE} tokens and an end-of-text among them in {path}, found {count} and"
            f" {end_of_text}; the file is damaged"
        )
    content, tokens, start = read_small(path), [], HEADER_BYTES
    for number in range(count):
        length = content[start] if start < len(content) else 0
        if not length or start + 1 + length > len(content):
            raise DataError(f"expected {count} tokens of 1 byte or more in {path}, found the end or none at {number}")
        tokens.append(content[start + 1 : start + 1 + length])
        start += 1 + length
    if start != len(content):
        raise DataError(f"expected {start} bytes for {count} tokens in {path}, found {len(content)}; copy it again")
    return tuple(tokens), end_of_text


def tokenizer_beside(path: Path, vocab_size: int, named: str) -> Tokenizer:
    """The tokenizer of the model file at `path`: the one `named`; else a `tokenizer.json` beside it; else GPT-2's or bytes,
    by the size of the vocabulary. A `*tokenizer.bin` beside the model must hold its tokens.

    Raises `DataError` if there is none, or if one of another model lies there.
    """
    if named:
        found = load_tokenizer(named)
    elif (path.parent / TOKENIZER_FILE).is_file():
        found = load_tokenizer(str(path.parent / TOKENIZER_FILE))
    else:
        # A model saved with its padding has more rows than GPT-2 has tokens: another vocabulary.
        sizes = {kind.vocab_size: kind for kind in map(load_tokenizer, ("gpt2", "bytes"))}
        if vocab_size not in sizes:
            hint = "; its rows are padded" if vocab_size == rounded_up(GPT2_VOCAB_SIZE, VOCABULARY_MULTIPLE) else ""
            raise DataError(
                f"expected the {GPT2_VOCAB_SIZE} tokens of GPT-2 in {path}, found {vocab_size}{hint};"
                " name the model's tokenizer with --tokenizer gpt2, bytes or FILE"
            )
        found = sizes[vocab_size]
    if found.vocab_size != vocab_size:
        raise DataError(
            f"expected a tokenizer of {vocab_size} tokens as {path} says, found one of {found.vocab_size} ({found.kind});"
            " name the model's own with --tokenizer gpt2, bytes or FILE"
        )
    beside = sorted(path.parent.glob("*tokenizer.bin"))
    if not named and len(beside) == 1 and read_tokens(beside[0]) != (found.token_bytes, found.end_of_text):
        raise DataError(
            f"expected the tokens of {found.kind} in {beside[0]}, found others; it decodes but cannot encode, so name the"
            " model's tokenizer with --tokenizer gpt2, bytes or FILE"
        )
    return found
