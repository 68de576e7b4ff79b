"""Tokens in, shards out: appended to in order, checkpointed, and under the final name only once complete."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from handgrad.data.llmc_header import HEADER_BYTES
from handgrad.data.shards import header
from handgrad.files import file_sha256, write_durably

JOURNAL_FILE = "journal.json"


@dataclass
class SplitState:
    """The written part of a split; a second attempt truncates the files to these lengths and goes on."""

    tokens: int = 0
    documents: int = 0
    text_bytes: int = 0
    source_nats: float = 0.0
    shards: list[dict[str, Any]] = field(default_factory=list)  # the complete ones, as the manifest lists them
    open_tokens: int = 0  # in the shard being written
    open_documents: int = 0


class SplitWriter:
    """Writes one split as shards of exactly `shard_tokens` tokens, the last one shorter. Raises OSError."""

    def __init__(self, folder: Path, split: str, shard_tokens: int, state: SplitState):
        self.folder, self.split, self.shard_tokens, self.state = folder, split, shard_tokens, state
        self.tokens_file: BinaryIO | None = None
        self.index_file: BinaryIO | None = None
        if state.open_tokens:
            self.tokens_file = _truncated(self._path(".bin"), HEADER_BYTES + 2 * state.open_tokens)
            self.index_file = _truncated(self._path(".idx"), 4 * state.open_documents)

    def append(self, tokens: np.ndarray, document_starts: np.ndarray, text_bytes: int, nats: float) -> None:
        """Adds uint16 `tokens`; `document_starts` are the rising offsets in them where a document starts."""
        state = self.state
        state.tokens += len(tokens)
        state.documents += len(document_starts)
        state.text_bytes += text_bytes
        state.source_nats += nats
        while len(tokens):
            if self.tokens_file is None or self.index_file is None:
                self.tokens_file = self._path(".bin").open("wb")
                self.index_file = self._path(".idx").open("wb")
                self.tokens_file.write(header(0))  # the count follows when it is known
            part = tokens[: self.shard_tokens - state.open_tokens]
            starts = document_starts[: np.searchsorted(document_starts, len(part))]
            self.tokens_file.write(part.astype("<u2").tobytes())
            self.index_file.write((starts + state.open_tokens).astype("<u4").tobytes())
            state.open_tokens += len(part)
            state.open_documents += len(starts)
            tokens, document_starts = tokens[len(part) :], document_starts[len(starts) :] - len(part)
            if state.open_tokens == self.shard_tokens:
                self.finish_shard()

    def checkpoint(self) -> None:
        """Forces what was appended to the disk."""
        for file in (self.tokens_file, self.index_file):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())

    def finish_shard(self) -> None:
        """Closes the shard being written, if there is one: header, disk, hashes."""
        if self.tokens_file is None or self.index_file is None:
            return
        self.tokens_file.seek(0)
        self.tokens_file.write(header(self.state.open_tokens))
        self.checkpoint()
        self.close()
        path, index_path = self._path(".bin"), self._path(".idx")
        self.state.shards.append(
            {
                "file": path.name,
                "tokens": self.state.open_tokens,
                "documents": self.state.open_documents,
                "sha256": file_sha256(path),
                "index_sha256": file_sha256(index_path),
            }
        )
        self.state.open_tokens = self.state.open_documents = 0

    def close(self) -> None:
        for file in (self.tokens_file, self.index_file):
            if file is not None:
                file.close()
        self.tokens_file = self.index_file = None

    def _path(self, suffix: str) -> Path:
        return self.folder / f"{self.split}_{len(self.state.shards):06d}{suffix}"


def write_journal(
    folder: Path,
    recipe: Mapping[str, Any],
    tokenizer: Mapping[str, Any],
    units_done: int,
    states: Mapping[str, SplitState],
) -> None:
    """Records that `units_done` units of `recipe` are on the disk, in the files of `states`. Raises OSError."""
    content = {
        "recipe": recipe,
        "tokenizer": tokenizer,
        "units_done": units_done,
        "states": {split: asdict(state) for split, state in states.items()},
    }
    text = json.dumps(content)
    write_durably(folder / JOURNAL_FILE, json.dumps([hashlib.sha256(text.encode()).hexdigest(), text]))


def read_journal(folder: Path, recipe: Mapping[str, Any]) -> tuple[dict[str, Any], int, dict[str, SplitState]] | None:
    """(tokenizer record, units done, state per split) from an intact journal of this `recipe`; else None."""
    try:
        digest, text = json.loads((folder / JOURNAL_FILE).read_bytes())
        if hashlib.sha256(text.encode()).hexdigest() != digest:
            return None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None  # absent or damaged: only time is lost
    content = json.loads(text)  # the hash proves that we wrote it
    if content["recipe"] != recipe:
        return None
    states = {split: SplitState(**record) for split, record in content["states"].items()}
    for split, state in states.items():
        sizes = {shard["file"]: HEADER_BYTES + 2 * shard["tokens"] for shard in state.shards}
        if state.open_tokens:
            sizes[f"{split}_{len(state.shards):06d}.bin"] = HEADER_BYTES + 2 * state.open_tokens
            sizes[f"{split}_{len(state.shards):06d}.idx"] = 4 * state.open_documents
        for name, size_bytes in sizes.items():
            path = folder / name
            if not path.is_file() or path.stat().st_size < size_bytes:
                return None
    return content["tokenizer"], content["units_done"], states


def _truncated(path: Path, size_bytes: int) -> BinaryIO:
    file = path.open("r+b")
    file.truncate(size_bytes)
    file.seek(size_bytes)
    return file
