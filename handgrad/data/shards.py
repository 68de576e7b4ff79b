"""Opens and verifies a folder of token shards.

A shard is an llm.c token file, little-endian: 256 int32 (magic 20240520, version 1, token count, zeros), then the
tokens as uint16. For a vocabulary above 65,536 it is llm.c's file for Llama 3: magic 20240801, version 7, the tokens as
uint32. `train_000000.bin` has an index `train_000000.idx`: the offsets within the shard, uint32, where documents start.
Chat data also has `train_000000.trained`: pairs of such offsets, the first token of a trained stretch and the one after
its last. `manifest.json` lists the files with their hashes. A folder of llm.c `.bin` files without a manifest also opens,
as GPT-2 tokens.

Opening reads the manifest and the file sizes. A shard's content is hashed and checked once, when its tokens are first
used.
"""

import functools
import hashlib
import json
import math
import mmap
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from handgrad.data.codes import Codes, codes_of
from handgrad.data.llmc_header import (
    EVALUATION,
    HEADER_BYTES,
    NARROW,
    WIDE_TOKENS,
    TokenForm,
    check_size,
    parse_header,
    token_form,
)
from handgrad.data.recommended import prepare_commands, tokenizer_of
from handgrad.data.sources import SUFFIXES, holds_text, is_text
from handgrad.data.tokenizer import TOKENIZER_FILE, Tokenizer
from handgrad.data.tokenizer_loading import load_tokenizer, read_tokenizer
from handgrad.errors import DataError, storage_error, storage_errors
from handgrad.files import file_sha256
from handgrad.parsing import parse_json
from handgrad.storage.run_files import CONFIG_FILE

MAX_SHARD_TOKENS = (1 << 31) - 1  # the header's count is an int32

MANIFEST_FILE = "manifest.json"
SCHEMA = 1
MAX_MANIFEST_BYTES = 64 << 20
SAMPLED_TOKENS = 4096  # of a shard without a manifest
SPLITS = ("train", "validation")
HASH = (r"[0-9a-f]{64}", "a SHA-256")
SHARD_FIELDS = {"file": (r"[A-Za-z0-9_]+\.bin", "a plain file name"), "sha256": HASH, "index_sha256": HASH}


@dataclass(frozen=True, eq=False)
class Shard:
    """One token file. The hashes are None in a folder without a manifest."""

    path: Path
    token_count: int
    vocab_size: int
    document_count: int | None = None
    sha256: str | None = None
    index_sha256: str | None = None
    trained_sha256: str | None = None  # None: every token is trained
    end_of_text: int = 0

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """All tokens, uint16 or uint32, (token_count,): a read-only memory map, verified on first use. Raises
        DataError: header, size, hash or a token id is wrong; StorageError: the file cannot be read."""
        _ = self.written_ns  # read before hashing the content
        content, form = _memory_map(self.path), token_form(self.vocab_size)
        actual = _token_count(content[:HEADER_BYTES], len(content), self.path, form)
        if actual != self.token_count:
            raise DataError(f"expected {self.token_count} tokens in {self.path}, found {actual}; prepare the data again")
        _ = self.verified_sha256
        tokens = np.frombuffer(content, form.dtype, offset=HEADER_BYTES)
        step = 1 << 24  # bounds the temporary of the comparison
        for start in range(0, len(tokens), step):
            part = tokens[start : start + step]
            if int(part.max()) >= self.vocab_size:
                offset = start + int(np.argmax(part >= self.vocab_size))
                raise DataError(
                    f"expected token ids below {self.vocab_size}, found {tokens[offset]} at token {offset} of "
                    f"{self.path}; the shard was made with another tokenizer, prepare the data again"
                )
        return tokens

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` tokens from `start` on, read from the verified file with pread: if the disk fails or the file is cut,
        a memory map would kill the process with SIGBUS and no message. Verifies a file again that was written to since.
        Raises the errors of `tokens`."""
        dtype = self.tokens.dtype
        size_bytes, offset = count * dtype.itemsize, HEADER_BYTES + start * dtype.itemsize
        try:
            content = os.pread(self.file.fileno(), size_bytes, offset)
            written_ns = os.fstat(self.file.fileno()).st_mtime_ns  # takes a microsecond
        except OSError as error:
            raise storage_error(error, f"reading {self.path}") from None
        if len(content) != size_bytes or written_ns != self.written_ns:
            self._verify_again(written_ns)
            return self.read(start, count)
        return np.frombuffer(content, dtype)

    @functools.cached_property
    def verified_sha256(self) -> str:
        """SHA-256 of the token file at its first use; raises DataError if the manifest has another. Without a manifest
        nothing confirms it, but after later writes the content must still match it."""
        return _check_hash(self.sha256, self.path)

    @functools.cached_property
    def written_ns(self) -> int:
        """The time, in ns, of the last write to the token file before its verification; 0 without a file."""
        with storage_errors(f"reading {self.path}"):
            return self.path.stat().st_mtime_ns if self.path.exists() else 0

    def _verify_again(self, written_ns: int) -> None:
        """Accepts a write that did not change the content. Raises DataError: the file was cut, or holds other bytes."""
        if os.fstat(self.file.fileno()).st_size < HEADER_BYTES + self.tokens.nbytes:
            raise DataError(f"expected {self.token_count} tokens in {self.path}, cut while it was read; restore it")
        _check_hash(self.verified_sha256, self.path)
        vars(self)["written_ns"] = written_ns  # the cached property stores it there

    @functools.cached_property
    def file(self) -> BinaryIO:
        """The token file; stays open as long as the shard lives."""
        with storage_errors(f"reading {self.path}"):
            return self.path.open("rb", buffering=0)

    @functools.cached_property
    def document_starts(self) -> np.ndarray:
        """Offsets of the tokens that start a document, uint32, (document_count,), ascending; DataError: an invalid file."""
        path = self.path.with_suffix(".idx")
        if self.document_count is None or self.index_sha256 is None:
            raise DataError(f"expected a manifest with document boundaries beside {self.path}, found none; prepare again")
        content = _memory_map(path)
        if len(content) != 4 * self.document_count:
            raise DataError(f"expected {4 * self.document_count} bytes in {path}, found {len(content)}; prepare again")
        _check_hash(self.index_sha256, path)
        starts = np.frombuffer(content, "<u4")
        if len(starts) and (int(starts[-1]) >= self.token_count or not np.all(starts[1:] > starts[:-1])):
            raise DataError(f"expected rising offsets below {self.token_count} in {path}, found others; prepare again")
        return starts

    @functools.cached_property
    def trained(self) -> np.ndarray | None:
        """(first, end) of each trained stretch of tokens, uint32, (stretches, 2), ascending; None: all tokens are
        trained. Raises DataError: an invalid file."""
        if self.trained_sha256 is None:
            return None
        path = self.path.with_suffix(".trained")
        content = _memory_map(path)
        _check_hash(self.trained_sha256, path)
        edges = np.frombuffer(content, "<u4")
        rising = np.all(edges[1:] >= edges[:-1]) and np.all(edges[1::2] > edges[::2]) if len(edges) % 2 == 0 else False
        if not rising or (len(edges) and int(edges[-1]) > self.token_count):
            raise DataError(
                f"expected rising stretches of at most {self.token_count} tokens in {path}, found others; prepare again"
            )
        return edges.reshape(-1, 2)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A prepared folder. `manifest` is the parsed manifest.json, or None for a bare folder of llm.c files."""

    folder: Path
    tokenizer: Tokenizer
    splits: Mapping[str, tuple[Shard, ...]]
    manifest: dict[str, Any] | None

    @functools.cached_property
    def identity(self) -> str:
        """SHA-256, as hex, over the tokenizer and the shards of each split in order.

        Without a manifest, a shard is identified by its length and 64 samples of 4 KiB, since hashing hundreds of
        gigabytes at every start would take minutes."""
        shards = {
            name: [
                [s.token_count, s.sha256 or _sampled_sha256(s.path), *filter(None, [s.trained_sha256])]
                for s in self.splits[name]
            ]
            for name in SPLITS
        }
        content = {"tokenizer": [self.tokenizer.sha256, self.tokenizer.vocab_size], "splits": shards}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def tokens(self, split: str) -> int:
        """Tokens of a split, including the end-of-text markers."""
        return sum(shard.token_count for shard in self.splits[split])

    @property
    def is_chat(self) -> bool:
        """True for conversations, which train only what the assistant says."""
        return bool(self.manifest and self.manifest.get("chat"))

    @functools.cached_property
    def codes(self) -> Codes | None:
        """The form of its pictures; None for text."""
        return codes_of(self.tokenizer)

    def floor(self, split: str) -> float | None:
        """The lowest mean loss that a model can reach, in nats per token; None if the source does not know it."""
        nats = self.manifest["splits"][split]["source_nats"] if self.manifest else None
        return None if nats is None else nats / self.tokens(split)


def open_dataset(folder: str | Path, model: str = "", *, chat: bool = False) -> Dataset:
    """Opens a prepared folder, or a bare folder of llm.c token files. `model`: the command in an error message uses its
    tokenizer; `chat`: the model was trained on conversations. Raises DataError: there is no such folder, or it is
    damaged; StorageError: it cannot be read."""
    folder = Path(folder)
    if folder.is_file():
        remedy = "give a folder that `handgrad prepare` has made"
        if is_text(folder, tuple(SUFFIXES)):
            remedy = f"run {prepare_commands(folder, model, chat=chat)}, then give that --out as --data"
        if folder.suffix == ".bin" or folder.name == MANIFEST_FILE:
            remedy = f"give its folder: --data {shlex.quote(str(folder.parent))}"
        raise DataError(f"expected a folder of token shards, found the file {folder}; {remedy}")
    if not folder.is_dir():
        begun = folder.with_name(folder.name + ".partial").is_dir()
        (tokenizer, first), out = tokenizer_of(model), ["--out", str(folder)]
        hint = f"make one: {first}`{shlex.join(['handgrad', 'prepare', 'MY_TEXT.txt', *tokenizer, *out])}`"
        hint = "finish it by running its `handgrad prepare` again" if begun else hint
        raise DataError(f"expected a folder of token shards, found none at {folder}; {hint}")
    with storage_errors(f"reading {folder}"):
        if (folder / MANIFEST_FILE).is_file():
            return _open_prepared(folder)
        return _open_bare(folder, model, chat=chat)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`, with every field that handgrad uses checked for type and range; DataError otherwise."""
    path = folder / MANIFEST_FILE
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise DataError(f"expected a manifest of at most {MAX_MANIFEST_BYTES} bytes, found {path.stat().st_size} in {path}")
    try:
        manifest = parse_json(path.read_bytes())
    except ValueError:
        raise DataError(f"expected JSON, found none in {path}; prepare the data again") from None
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if schema != SCHEMA:
        raise DataError(f"expected schema {SCHEMA}, found {schema!r:.100} in {path}; prepare the data with this version")
    splits = _field(manifest, "splits", dict, path)
    chat = "chat" in manifest and _field(manifest, "chat", bool, path)
    fields = SHARD_FIELDS | ({"trained_sha256": HASH} if chat else {})
    totals = ("tokens", "documents", *(["trained_tokens"] if chat else []))
    if set(splits) != set(SPLITS):
        raise DataError(f"expected the splits train and validation, found {sorted(splits)!r:.100} in {path}; prepare again")
    for name in SPLITS:
        split = _field(splits, name, dict, path)
        counts = {key: _field(split, key, int, path) for key in (*totals, "text_tokens", "text_bytes")}
        if split.get("source_nats") is not None and not math.isfinite(_field(split, "source_nats", float, path)):
            raise DataError(f"expected source_nats to be finite in {path}; prepare the data again")
        shards = _field(split, "shards", list, path)
        for shard in shards:
            for key, (pattern, form) in fields.items():
                if not isinstance(shard, dict) or not re.fullmatch(pattern, _field(shard, key, str, path)):
                    raise DataError(f"expected {form} as {key} of a shard, found {shard!r:.100} in {path}; prepare again")
        for key in totals:
            total = sum(_field(shard, key, int, path) for shard in shards)
            if counts[key] != total:
                raise DataError(
                    f"expected {counts[key]} {key} in the {name} shards, found {total} in {path}; prepare again"
                )
    return manifest


def _field(record: Mapping[str, Any], key: str, kind: type, path: Path) -> Any:
    value = record.get(key)
    if type(value) is kind and (kind is not int or 0 <= value < 1 << 63):
        return value
    raise DataError(f"expected {key} as {kind.__name__}, found {value!r:.100} in {path}; prepare the data again")


def _open_prepared(folder: Path) -> Dataset:
    manifest = read_manifest(folder)
    tokenizer = read_tokenizer(folder, manifest.get("tokenizer"))
    splits = {}
    for name in SPLITS:
        shards = []
        for record in manifest["splits"][name]["shards"]:
            path = folder / record["file"]
            if not path.is_file():
                raise DataError(f"expected the shard {path}, found no such file; restore it or prepare the data again")
            _check_size(path.stat().st_size, record["tokens"], path, token_form(tokenizer.vocab_size))
            hashes = record["sha256"], record["index_sha256"], record["trained_sha256"] if manifest.get("chat") else None
            counts = record["tokens"], tokenizer.vocab_size, record["documents"]
            shards.append(Shard(path, *counts, *hashes, tokenizer.end_of_text))
        splits[name] = tuple(shards)
    return Dataset(folder, tokenizer, splits, manifest)


def _open_bare(folder: Path, model: str, *, chat: bool) -> Dataset:
    if (folder / TOKENIZER_FILE).exists():  # a prepared folder, whose tokens are not GPT-2's
        raise DataError(
            f"expected {MANIFEST_FILE} beside {folder / TOKENIZER_FILE}, found none; restore it or prepare the text again"
        )
    tokenizer = load_tokenizer("gpt2")
    splits: dict[str, list[Shard]] = {name: [] for name in SPLITS}
    for path in sorted(folder.glob("*.bin")):
        match = re.search(r"(?:^|_)(train|val|validation)(?:_|\.)", path.name)
        if match and path.is_file():
            with path.open("rb") as file:
                first = file.read(HEADER_BYTES)
            if first[:4] == EVALUATION.to_bytes(4, "little"):
                continue  # hellaswag_val.bin holds questions, but has a shard's name
            if first[:4] == WIDE_TOKENS.to_bytes(4, "little"):
                raise DataError(
                    f"expected GPT-2 tokens in {path}, as there is no {MANIFEST_FILE}, found Llama 3 tokens of llm.c;"
                    " prepare their text with --tokenizer and the folder of the model"
                )
            token_count = _token_count(first, path.stat().st_size, path)
            check_not_bytes(path)
            splits["train" if match[1] == "train" else "validation"].append(Shard(path, token_count, tokenizer.vocab_size))
    if not any(splits.values()):
        inside = sorted(shlex.quote(str(path.parent)) for path in folder.glob(f"*/{MANIFEST_FILE}"))
        text = prepare_commands(folder, model, chat=chat) if holds_text(folder) else "`handgrad prepare`"
        remedy = f"make shards with {text}"
        if (folder / CONFIG_FILE).is_file():
            remedy = f"it is a run, whose data {folder / CONFIG_FILE} names"
        if inside:
            remedy = f"name one of the prepared folders in it, as --data {inside[0]}"
        raise DataError(
            f"expected {MANIFEST_FILE} or llm.c files *_train_*.bin and *_val_*.bin, found none in {folder}; {remedy}"
        )
    return Dataset(folder, tokenizer, {name: tuple(shards) for name, shards in splits.items()}, None)


def check_not_bytes(path: Path) -> None:
    """Raises DataError for a shard whose first tokens all fit the tokenizer `bytes`: GPT-2's tokens are larger as well."""
    with path.open("rb") as file:
        file.seek(HEADER_BYTES)
        first = np.frombuffer(file.read(2 * SAMPLED_TOKENS), "<u2")
    if len(first) == SAMPLED_TOKENS and int(first.max()) <= 256:
        raise DataError(
            f"expected GPT-2 tokens in {path}, as there is no {MANIFEST_FILE}, found none above 256 in the first"
            f" {SAMPLED_TOKENS}; restore {MANIFEST_FILE}, or prepare the text again with --tokenizer bytes"
        )


def _token_count(first: bytes, size_bytes: int, path: Path, form: TokenForm = NARROW) -> int:
    """The token count in a shard's header, checked against the size of its file."""
    token_count = parse_header(first, path, form.magic, (form.version,))[2]
    _check_size(size_bytes, token_count, path, form)
    return token_count


def _check_size(size_bytes: int, token_count: int, path: Path, form: TokenForm) -> None:
    check_size(path, HEADER_BYTES + form.dtype.itemsize * token_count, size_bytes, f"{token_count} tokens")


def _check_hash(expected: str | None, path: Path) -> str:
    """The SHA-256 of a file. Raises DataError if another one is `expected`."""
    with storage_errors(f"reading {path}"):  # an unreadable page of a map would raise SIGBUS
        actual = file_sha256(path)
    if expected not in (None, actual):
        raise DataError(f"expected SHA-256 {expected}, found {actual} in {path}; it changed, restore it or prepare again")
    return actual


def _memory_map(path: Path) -> Any:
    with storage_errors(f"reading {path}"):
        if not path.exists():
            raise DataError(f"expected the file {path}, found none; restore it or prepare the data again")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""


def _sampled_sha256(path: Path) -> str:
    content = _memory_map(path)
    digest = hashlib.sha256()
    for n in range(64):
        start = n * max(0, len(content) - 4096) // 63
        digest.update(content[start : start + 4096])
    return digest.hexdigest()
