"""Text to token ids and back: GPT-2's vocabulary, plain bytes, or a byte-pair vocabulary trained on your own text.

All three work on UTF-8 bytes: every text has an encoding, and `decode(encode(text)) == text`.
"""

import base64
import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
import tokenizers

from handgrad.errors import DataError, UsageError, storage_errors
from handgrad.parsing import parse_json

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
OTHERS_FILE = "tokenizer_others.json"  # a model's other files, by name
MAX_VOCAB_SIZE = 1 << 16  # of the kinds below: their tokens are uint16; a model's may be uint32
MAX_TOKENIZER_BYTES = 64 << 20

GPT2_FILE = Path(__file__).parent / "assets" / "gpt2.tiktoken"
GPT2_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
# GPT-2's splitter, with possessive `++` where backtracking can never help, and `\s++$` so that blanks at the end of a
# text take no stack. It splits every text as the published pattern does.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

# `\s+(?!\S)` still takes stack for each blank of a run inside a text, and the regex engine gives up at a million of
# them. Such a run has a token boundary at its start and before its last blank anyway.
_BLANK = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # Unicode White_Space, the `\s` of the pattern
_LONG_BLANKS = re.compile(f"(?<![{_BLANK}])[{_BLANK}]{{65536,}}")
# Learning merges takes time with the square of a word's length, and a genome in one line is one word.
LONG_WORD = tokenizers.Regex(".{4096}")

# GPT-2's byte-level alphabet: printable bytes stand for themselves, the 68 others for the characters from U+0100 on.
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
CHARACTER_OF_BYTE = {b: chr(b) for b in _PRINTABLE}
CHARACTER_OF_BYTE |= {b: chr(256 + n) for n, b in enumerate(b for b in range(256) if b not in _PRINTABLE)}
BYTE_OF_CHARACTER = {character: b for b, character in CHARACTER_OF_BYTE.items()}


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A vocabulary of `kind` gpt2, bytes, bpe or model (`model_tokenizer`), and the function from texts to their ids."""

    kind: str
    token_bytes: tuple[bytes, ...]  # by id
    end_of_text: int
    sha256: str  # the identity that travels with shards
    encode_texts: Callable[[Sequence[str]], list[np.ndarray]]
    json_bytes: bytes = field(default=b"", repr=False)  # the tokenizer.json of a trained vocabulary
    merges: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # its merges in their order
    others: dict[str, str] = field(default_factory=dict, repr=False)  # a model's other files, by name
    begins: tuple[int, ...] = ()  # tokens that a model's own tokenizer puts before a text, like Llama 3's begin-of-text

    @property
    def vocab_size(self) -> int:
        """The number of tokens, including end-of-text."""
        return len(self.token_bytes)

    @property
    def dtype(self) -> type[np.unsignedinteger]:
        """The type of an id."""
        return np.uint16 if self.vocab_size <= 1 << 16 else np.uint32

    @property
    def document_start(self) -> tuple[int, ...]:
        """The tokens before a document in shards; they also end the previous document."""
        return (self.end_of_text, *self.begins)

    @property
    def prompt_start(self) -> tuple[int, ...]:
        """The tokens before a prompt: the ones that a model's own tokenizer begins with, or end-of-text."""
        return self.begins or (self.end_of_text,)

    def settings(self, file: str) -> dict[str, Any] | None:
        """The JSON object in a model's `file`, empty without the file; None if it holds something else."""
        try:
            content = parse_json(self.others.get(file, "{}"))
        except ValueError:
            return None
        return content if isinstance(content, dict) else None

    def encode(self, text: str) -> np.ndarray:
        """`text` as ids of `dtype`, (tokens,). A literal "<|endoftext|>" is ordinary text. DataError: a lone surrogate."""
        return self.encode_each([text])[0]

    def encode_each(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text. A batch is faster for a model's tokenizer, which runs in its own process."""
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise DataError(
                    f"expected text, found a lone surrogate {text[error.start]!a} at character {error.start}; "
                    "repair the encoding of the source"
                ) from None
        return self.encode_texts(texts)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids`. DataError: an id outside the vocabulary."""
        ids = [int(i) for i in ids]
        if (bad := next((i for i in ids if not 0 <= i < self.vocab_size), None)) is not None:
            raise DataError(
                f"expected token ids from 0 to {self.vocab_size - 1}, found {bad}; decode with the tokenizer of the data"
            )
        return b"".join(self.token_bytes[i] for i in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 (a cut character) become U+FFFD. DataError: as `decode_bytes`."""
        return self.decode_bytes(ids).decode(errors="replace")


def bytes_tokenizer() -> Tokenizer:
    """The 256 bytes of UTF-8, and end-of-text: 257 tokens, for small models and quick tests."""
    token_bytes = (*(bytes([b]) for b in range(256)), END_OF_TEXT.encode())
    sha256 = hashlib.sha256(b"256 bytes, then end-of-text").hexdigest()
    encode = lambda texts: [np.frombuffer(text.encode(), np.uint8).astype(np.uint16) for text in texts]  # noqa: E731
    return Tokenizer("bytes", token_bytes, 256, sha256, encode)


@functools.cache
def gpt2_tokenizer() -> Tokenizer:
    """GPT-2's 50,257 tokens, from the shipped file; nothing is downloaded."""
    content = GPT2_FILE.read_bytes()
    if (actual := hashlib.sha256(content).hexdigest()) != GPT2_SHA256:
        raise DataError(f"expected SHA-256 {GPT2_SHA256}, found {actual} in {GPT2_FILE}; install handgrad again")
    token_bytes = [base64.b64decode(line.split()[0]) for line in content.splitlines()]  # line number = rank = id
    encoding = tiktoken.Encoding(
        "gpt2",
        pat_str=GPT2_PATTERN,
        mergeable_ranks={token: rank for rank, token in enumerate(token_bytes)},
        special_tokens={END_OF_TEXT: len(token_bytes)},
    )

    def encode(text: str) -> np.ndarray:
        parts = [encoding.encode_to_numpy(part, disallowed_special=()) for part in _without_long_blanks(text)]
        return np.concatenate(parts).astype(np.uint16)

    every = (*token_bytes, END_OF_TEXT.encode())
    return Tokenizer("gpt2", every, len(token_bytes), GPT2_SHA256, lambda texts: [*map(encode, texts)])


def _without_long_blanks(text: str) -> Iterator[str]:
    start = 0
    for run in _LONG_BLANKS.finditer(text):
        for end in (run.start(), run.end() - 1):
            yield text[start:end]
            start = end
    yield text[start:]


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE of at most `vocab_size` tokens (fewer if `texts` has fewer pairs that repeat).

    Deterministic in the sequence of texts. The ids: 256 bytes, the merges in their order, end-of-text last.
    Raises UsageError: `vocab_size` outside 257..65536."""
    if not 257 <= vocab_size <= MAX_VOCAB_SIZE:
        raise UsageError(f"expected a vocabulary of 257 to {MAX_VOCAB_SIZE} tokens, found {vocab_size}; try bpe:4096")
    model, alphabet = byte_level(tokenizers.models.BPE()), tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size - 1, min_frequency=2, initial_alphabet=alphabet, show_progress=False
    )
    splits, cuts = model.pre_tokenizer, tokenizers.pre_tokenizers.Split(LONG_WORD, "isolated")
    model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([splits, cuts])
    model.train_from_iterator(texts, trainer)
    model.pre_tokenizer = splits
    model.add_special_tokens([END_OF_TEXT])
    return parse_bpe(model.to_str().encode(), where="the trained tokenizer")


def byte_level(model: tokenizers.models.BPE, *, splits: bool = True) -> tokenizers.Tokenizer:
    """The library's byte-level tokenizer around `model`; `splits`: GPT-2's splitter cuts a text first."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def tokenizer_record(tokenizer: Tokenizer) -> dict[str, Any]:
    """The manifest's entry for `tokenizer`; `tokenizer_loading.read_tokenizer` reads it."""
    return {name: getattr(tokenizer, name) for name in ("kind", "vocab_size", "end_of_text", "sha256")}


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """The files to write next to that manifest, by name: none for gpt2 and bytes."""
    files = {TOKENIZER_FILE: tokenizer.json_bytes} if tokenizer.json_bytes else {}
    others = json.dumps(tokenizer.others, ensure_ascii=False, indent=0).encode()
    return files | ({OTHERS_FILE: others} if tokenizer.others else {})


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Writes the tokenizer's files to `folder`; returns the manifest's record of it."""
    for name, content in tokenizer_files(tokenizer).items():
        (folder / name).write_bytes(content)
    return tokenizer_record(tokenizer)


def read_small(path: Path) -> bytes:
    """The content of a model's small file. Raises DataError: implausibly large; StorageError: unreadable."""
    with storage_errors(f"reading {path}"):
        if (size := path.stat().st_size) > MAX_TOKENIZER_BYTES:
            raise DataError(f"expected at most {MAX_TOKENIZER_BYTES} bytes, found {size} in {path}; fetch it again")
        return path.read_bytes()


def beginning(end_of_text: int) -> bytes:
    """The post-processor that puts end-of-text before a text, in JSON with blanks that no library writes."""
    marker: list[Any] = [{"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*marker, {"Sequence": {"id": "B", "type_id": 1}}]
    special = {END_OF_TEXT: {"id": END_OF_TEXT, "ids": [end_of_text], "tokens": [END_OF_TEXT]}}
    return json.dumps({"type": "TemplateProcessing", "single": marker, "pair": pair, "special_tokens": special}).encode()


def with_beginning(content: bytes, end_of_text: int) -> bytes:
    """Adds that post-processor to a `tokenizer.json` that has none; leaves others unchanged. `parse_bpe` removes it again,
    because the file's hash identifies shards."""
    return re.sub(rb'("post_processor":\s*)null', lambda match: match[1] + beginning(end_of_text), content, count=1)


def parse_bpe(content: bytes, where: str) -> Tokenizer:
    """The tokenizer of a `tokenizer.json` with this `content`; DataError if not a byte-level BPE with GPT-2's splitter."""

    # Built from the parsed tables, not by the library's loader: it accepts any pipeline, and some do not give the text
    # back, or split it differently from the splitter that `pieces` relies on.
    def expect(condition: bool, property: str) -> None:
        if not condition:
            raise DataError(f"expected {property} in {where}; use a tokenizer of `handgrad prepare --tokenizer bpe:SIZE`")

    tables: Any = None
    with contextlib.suppress(ValueError):
        tables = parse_json(content)
    expect(isinstance(tables, dict), "a JSON object")
    model: Any = tables.get("model")
    splitter: Any = tables.get("pre_tokenizer")
    added: Any = tables.get("added_tokens")
    expect(isinstance(model, dict) and model.get("type") == "BPE", "a BPE model")
    special = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges", "byte_fallback")
    expect(not any(model.get(key) for key in special), "a BPE model without dropout, affixes, fallbacks or ignored merges")
    expect(tables.get("normalizer") is None, "no normalizer")
    expect(isinstance(splitter, dict) and splitter.get("type") == "ByteLevel", "a ByteLevel pre_tokenizer")
    expect(splitter.get("add_prefix_space") is False and splitter.get("use_regex", True) is True, "GPT-2's splitter")
    vocab, merges = model.get("vocab"), model.get("merges")
    lists = isinstance(merges, list) and isinstance(added, list)
    expect(isinstance(vocab, dict) and lists, "vocab, merges and added_tokens")
    marker = added[0] if len(added) == 1 and isinstance(added[0], dict) else {}
    expect(marker.get("content") == END_OF_TEXT, f"{END_OF_TEXT} as the only added token")
    end_of_text = vocab.pop(END_OF_TEXT, marker.get("id"))
    ids = [*vocab.values(), end_of_text]
    expect(len(ids) <= MAX_VOCAB_SIZE, f"at most {MAX_VOCAB_SIZE} tokens (uint16)")
    expect(all(type(i) is int for i in ids) and sorted(ids) == list(range(len(ids))), "ids without gaps or repeats")
    byte_of = BYTE_OF_CHARACTER
    expect(all(token and all(c in byte_of for c in token) for token in vocab), "tokens in the byte-level alphabet")
    expect(all(c in vocab for c in byte_of), "a token for each of the 256 bytes")
    pairs = []
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        two = isinstance(pair, list) and len(pair) == 2 and all(isinstance(t, str) and t in vocab for t in pair)
        expect(two and pair[0] + pair[1] in vocab, "merges of two tokens into a third")
        pairs.append((pair[0], pair[1]))

    token_bytes = [END_OF_TEXT.encode()] * len(ids)
    for token, i in vocab.items():
        token_bytes[i] = bytes(byte_of[c] for c in token)
    encoder = byte_level(tokenizers.models.BPE(vocab=vocab, merges=pairs))

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        each = (encoder.encode_batch_fast([text], add_special_tokens=False)[0] for text in texts)
        return [np.array(encoding.ids, dtype=np.uint16) for encoding in each]

    content = content.replace(beginning(end_of_text), b"null")
    sha256 = hashlib.sha256(content).hexdigest()
    return Tokenizer("bpe", tuple(token_bytes), end_of_text, sha256, encode, content, tuple(pairs))
