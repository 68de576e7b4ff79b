"""Small corpora and folders that the data tests share."""

import gzip
import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from handgrad.data import pieces, prepare
from handgrad.data.llmc_header import header

WORDS = ["the", "of", "and", "to", "a", "in", "you", "that", "he", "was", "don't", "42", "über", "東京", "this"]


@pytest.fixture
def make_text():
    """(characters, seed) -> prose-like text of that length or a little more, with lines, indents and double blanks."""

    def make(characters: int, seed: int = 0) -> str:
        random_ = random.Random(seed)
        parts, length = [], 0
        while length < characters:
            parts.append(random_.choice(WORDS) + random_.choice([" ", " ", " ", " ", ", ", ".\n", "  ", "\n\n", "\n    "]))
            length += len(parts[-1])
        return "".join(parts)

    return make


@pytest.fixture
def make_dataset(tmp_path):
    """Writes a folder as `prepare` would, from token arrays, without `prepare`."""

    def make(
        train: list[np.ndarray],
        validation: list[np.ndarray],
        name: str = "shards",
        documents: bool = False,  # of the end-of-text token each begins one, else the first token alone
        trained: Callable[[np.ndarray], np.ndarray] | None = None,  # stretches of a shard's tokens: chat data
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        splits = {}
        for split, arrays in (("train", train), ("validation", validation)):
            shards = []
            for n, tokens in enumerate(arrays):
                content = header(len(tokens)) + tokens.astype("<u2").tobytes()
                starts = np.flatnonzero(tokens == 256) if documents else np.array([0])
                index = starts.astype("<u4").tobytes()
                (folder / f"{split}_{n:06d}.bin").write_bytes(content)
                (folder / f"{split}_{n:06d}.idx").write_bytes(index)
                hashes = {"sha256": hashlib.sha256(content).hexdigest(), "index_sha256": hashlib.sha256(index).hexdigest()}
                shards.append({"file": f"{split}_{n:06d}.bin", "tokens": len(tokens), "documents": len(starts), **hashes})
                if trained:
                    stretches = trained(tokens)
                    edges = stretches.astype("<u4").tobytes()
                    (folder / f"{split}_{n:06d}.trained").write_bytes(edges)
                    count = int((stretches[:, 1] - stretches[:, 0]).sum())
                    shards[-1] |= {"trained_tokens": count, "trained_sha256": hashlib.sha256(edges).hexdigest()}
            total = sum(len(tokens) for tokens in arrays)
            splits[split] = {
                "tokens": total,
                "text_tokens": total - len(arrays),
                "documents": sum(shard["documents"] for shard in shards),
                "text_bytes": total - len(arrays),
                "source_nats": None,
                "shards": shards,
            }
        sha256 = hashlib.sha256(b"256 bytes, then end-of-text").hexdigest()
        tokenizer = {"kind": "bytes", "vocab_size": 257, "end_of_text": 256, "sha256": sha256}
        manifest = {"schema": 1, "tokenizer": tokenizer, "splits": splits}
        if trained:
            manifest["chat"] = True
            for split in splits.values():
                split["trained_tokens"] = sum(shard["trained_tokens"] for shard in split["shards"])
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return folder

    return make


@pytest.fixture
def small_units(monkeypatch):
    """Many units, pieces and checkpoints out of little text, and a pool of workers for it."""
    monkeypatch.setattr(pieces, "PIECE_CHARACTERS", 500)
    monkeypatch.setattr(pieces, "MAX_PIECE_CHARACTERS", 2000)
    monkeypatch.setattr(pieces, "UNIT_CHARACTERS", 3000)
    monkeypatch.setattr(pieces, "STORIES_PER_UNIT", 10)
    monkeypatch.setattr(prepare, "CHECKPOINT_UNITS", 2)
    monkeypatch.setattr(prepare, "BYTES_PER_WORKER", 1)
    monkeypatch.setattr(prepare, "STORIES_PER_WORKER", 1)


def flip_bit(path: Path, offset: int) -> None:
    """Flips the lowest bit of one byte of a file."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def rows(make_text, count: int) -> list[str]:
    """`count` documents, from a word to a few thousand characters."""
    return [make_text(random.Random(n).choice([5, 50, 3000]), n) for n in range(count)]


def write_rows(path: Path, texts: list[str], field: str = "text") -> None:
    """Writes documents as the rows of a .jsonl, .jsonl.gz or .parquet file."""
    lines = "".join(json.dumps({"id": n, field: text}) + "\n" for n, text in enumerate(texts))
    if path.suffix == ".parquet":
        table = pyarrow.table({"id": range(len(texts)), field: pyarrow.array(texts, pyarrow.string())})
        pyarrow.parquet.write_table(table, path, row_group_size=7)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines)


def everything(tmp_path: Path, make_text) -> Path:
    """A folder with a source of each kind."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a.txt").write_text(make_text(40_000, 1))
    write_rows(folder / "b.jsonl", rows(make_text, 40))
    write_rows(folder / "c.parquet", rows(make_text, 40))
    return folder
