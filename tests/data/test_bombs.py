"""Small files that expand to large ones are refused, and never held whole."""

import gzip
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from handgrad.data import sources
from handgrad.data.pieces import text_parts
from handgrad.data.sources import find_local, read_rows
from handgrad.errors import DataError
from handgrad.evaluation import tasks

MEBIBYTE = 1 << 20


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FREE_BYTES", "FREE_CHUNK_BYTES"):
        monkeypatch.setattr(sources, name, 8 * MEBIBYTE)
    monkeypatch.setattr(tasks, "MOST_BYTES", 8 * MEBIBYTE)


def repeated(path: Path, count: int, length: int = MEBIBYTE, **how: object) -> Path:
    """A parquet file with the same text in each row."""
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x" * length] * count}), path, compression="zstd", **how)
    return path


def packed(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content))
    return path


def rows(path: Path) -> None:
    for _ in read_rows(find_local(str(path))[0], "text"):
        pass


def parts(path: Path) -> None:
    text_parts(path, 0.1)


def task(path: Path) -> None:
    for _ in tasks.read_rows(path):
        pass


@pytest.mark.parametrize(
    ("name", "make", "read"),
    [
        ("a.parquet", lambda path: repeated(path, 100), rows),  # a text that the file holds once
        ("b.parquet", lambda path: repeated(path, 32, use_dictionary=False), rows),  # pages that pack well
        ("a.parquet", lambda path: repeated(path, 100), task),
        ("a.jsonl.gz", lambda path: packed(path, (b" " * 1023 + b"\n") * 16384), rows),
        ("a.jsonl.gz", lambda path: packed(path, b'{"text": "%s"}\n' % (b"a" * MEBIBYTE) * 16), rows),
        ("a.txt.gz", lambda path: packed(path, b" " * 16 * MEBIBYTE), parts),
        ("a.jsonl.gz", lambda path: packed(path, b" " * 64 * MEBIBYTE), task),
    ],
)
def test_bombs(name: str, make: Callable[[Path], Path], read: Callable[[Path], None], tmp_path: Path) -> None:
    path = make(tmp_path / name)
    assert path.stat().st_size < 100_000
    tracemalloc.start()
    with pytest.raises(DataError, match=r"packed to no less than 1/200|a task of at most") as refused:
        read(path)
    assert str(path) in str(refused.value)
    assert tracemalloc.get_traced_memory()[1] < 40 * MEBIBYTE
    tracemalloc.stop()


@pytest.mark.parametrize("blank", [b"\n", b" \r\n", b"\n\t"])
def test_blank_lines_are_skipped_together(blank: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one by one, of which a gigabyte takes long. The lines after them keep their numbers."""
    path = packed(tmp_path / "a.jsonl.gz", b'{"text": "a"}\n' + blank * MEBIBYTE + b'{"text": "b"}\n\n x\n')
    counted = []
    monkeypatch.setattr(sources, "check_expansion", lambda size, path: counted.append(size))
    found = sources.read_objects(path)
    number = 2 + blank.count(b"\n") * MEBIBYTE
    assert [(where, row) for _, where, row in (next(found), next(found))] == [
        (f"line 1 of {path}", {"text": "a"}),
        (f"line {number} of {path}", {"text": "b"}),
    ]
    with pytest.raises(DataError, match=f"found b' x.n' in line {number + 2} of"):
        next(found)
    assert len(counted) < 2 * len(blank) * MEBIBYTE / sources.BLANKS_BYTES + 10


def test_a_batch_holds_a_text_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "FREE_BYTES", 1 << 40)
    before = pyarrow.total_allocated_bytes()
    found = read_rows(find_local(str(repeated(tmp_path / "a.parquet", 64)))[0], "text")
    next(found)
    assert pyarrow.total_allocated_bytes() - before < 16 * MEBIBYTE
    assert sum(len(text) for _, text in found) == 63 * MEBIBYTE


def test_long_rows_come_in_small_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PARQUET_BYTES", 5 * MEBIBYTE // 4)
    texts = [os.urandom(MEBIBYTE // 4).hex() for _ in range(8)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", use_dictionary=False)
    with sources.open_parquet(tmp_path / "a.parquet") as file:
        batches = list(sources.batches(file))
    assert [batch.num_rows for batch in batches] == [2, 2, 2, 2]
    assert [text for batch in batches for text in batch.column(0).to_pylist()] == texts


def test_what_packs_well_is_read(tmp_path: Path) -> None:
    """Ordinary repetitions, beyond what any file may expand to."""
    line = b"".join(b'{"text": "%d and some words"}\n' % n for n in range(300_000))
    path = packed(tmp_path / "a.jsonl.gz", line)
    assert len(line) > 8 * MEBIBYTE
    assert sum(1 for _ in read_rows(find_local(str(path))[0], "text")) == 300_000


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()])
def test_every_kind_of_text_column(kind: pyarrow.DataType, tmp_path: Path) -> None:
    texts = ["a", None, "b" * 1000, "ü", "a"] * 50
    table = pyarrow.table({"text": pyarrow.array(texts, kind), "more": [["a", "b"]] * 250})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=70)
    found = [text for _, text in read_rows(find_local(str(tmp_path / "a.parquet"))[0], "text")]
    assert found == [text for text in texts if text]
    read = [row.fields for row in tasks.read_rows(tmp_path / "a.parquet")]
    assert json.dumps(read) == json.dumps([{"text": text, "more": ["a", "b"]} for text in texts])
