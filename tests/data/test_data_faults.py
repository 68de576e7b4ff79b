"""Whatever the bytes are: one readable error of the documented kind, quickly, and nothing under the final name."""

import errno
import json
import os
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from handgrad.data.llmc_header import header
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.data.shards import open_dataset
from handgrad.data.tokenizer import train_bpe
from handgrad.data.tokenizer_loading import load_tokenizer
from handgrad.errors import DataError, HandgradError, StorageError

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def touch(folder) -> None:
    """Uses everything that a dataset has."""
    dataset = open_dataset(folder)
    for split in ("train", "validation"):
        for shard in dataset.splits[split]:
            assert len(shard.tokens) == shard.token_count
            if dataset.manifest is not None:
                assert len(shard.document_starts) == shard.document_count
        dataset.floor(split) if dataset.tokens(split) else None
    assert len(dataset.identity) == 64


def only_a_data_error(folder) -> bool:
    """True if `touch` refuses, in less than a second of CPU time; any other exception goes through."""
    begun = time.process_time()
    try:
        touch(folder)
    except DataError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        return True
    finally:
        assert time.process_time() - begun < 1
    return False


@pytest.mark.fault(26)
@FUZZ
@given(content=st.binary(max_size=3000) | st.binary(max_size=50).map(lambda b: header(len(b) // 2) + b))
def test_any_bytes_as_a_shard(tmp_path, content):
    (tmp_path / "x_train_0.bin").write_bytes(content)
    only_a_data_error(tmp_path)


@pytest.mark.fault(22, 26)
@FUZZ
@given(place=st.integers(0, 11), value=st.integers(0, 255))
def test_any_header(tmp_path, place, value):
    content = bytearray(header(100) + np.arange(100, dtype="<u2").tobytes())
    changed = content[place] != value
    content[place] = value
    (tmp_path / "x_train_0.bin").write_bytes(content)
    assert only_a_data_error(tmp_path) == changed


@pytest.mark.fault(26)
@FUZZ
@given(content=st.binary(max_size=200) | JSON.map(lambda j: json.dumps(j).encode()))
def test_any_bytes_as_a_manifest(tmp_path, content):
    (tmp_path / "manifest.json").write_bytes(content)
    assert only_a_data_error(tmp_path)


def test_hostile_json(tmp_path):
    for content in (
        b"[" * 100_000,
        b'{"schema": 1' + b"0" * 10_000 + b"}",
        b'{"schema": NaN}',
        b"\xff\xfe",
        b'{"schema": 1e999}',
    ):
        (tmp_path / "manifest.json").write_bytes(content)
        assert only_a_data_error(tmp_path)
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(DataError):
            load_tokenizer(str(tmp_path))


@st.composite
def edited(draw):
    """A path into a manifest and what to put there."""
    path = draw(
        st.sampled_from(
            [(k,) for k in ("schema", "tokenizer", "splits")]
            + [("tokenizer", k) for k in ("kind", "vocab_size", "end_of_text", "sha256")]
            + [("splits", "train")]
            + [
                ("splits", "train", k)
                for k in ("tokens", "text_tokens", "documents", "text_bytes", "source_nats", "shards")
            ]
            + [("splits", "train", "shards", 0)]
            + [("splits", "train", "shards", 0, k) for k in ("file", "tokens", "documents", "sha256", "index_sha256")]
        )
    )
    return path, draw(JSON | st.sampled_from([2**62, 10**30, -1, "/dev/zero", "..", "train_000000.bin\n", 1.0, True]))


@pytest.mark.fault(26)
@FUZZ
@given(edit=edited())
def test_an_edited_manifest(make_dataset, tmp_path, edit):
    folder = tmp_path / "shards"
    if not folder.exists():
        make_dataset([np.arange(50)], [np.arange(50)])
        touch(folder)
        (tmp_path / "intact").write_bytes((folder / "manifest.json").read_bytes())
    manifest = json.loads((tmp_path / "intact").read_text())
    (path, value), place = edit, manifest
    for key in path[:-1]:
        place = place[key]
    harmless = path[-1] in ("text_tokens", "text_bytes", "source_nats") or place[path[-1]] == value
    place[path[-1]] = value
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert only_a_data_error(folder) or harmless


@pytest.mark.fault(26)
def test_counts_beyond_the_file_allocate_nothing(make_dataset):
    folder = make_dataset([np.arange(50)], [np.arange(50)])
    manifest = json.loads((folder / "manifest.json").read_text())
    train = manifest["splits"]["train"]
    train["tokens"] = train["shards"][0]["tokens"] = train["documents"] = train["shards"][0]["documents"] = 2**40
    (folder / "manifest.json").write_text(json.dumps(manifest))
    tracemalloc.start()
    assert only_a_data_error(folder)
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10**9), value=st.binary(min_size=1, max_size=3))
def test_a_damaged_tokenizer_file(tmp_path, place, value):
    path = tmp_path / "tokenizer.json"
    if not (tmp_path / "intact").exists():
        (tmp_path / "intact").write_bytes(train_bpe(["to be or not to be " * 9], 262).json_bytes)
    content = bytearray((tmp_path / "intact").read_bytes())
    content[place % len(content) : place % len(content) + len(value)] = value
    path.write_bytes(content)
    try:
        tokenizer = load_tokenizer(str(path))
    except DataError:
        return
    assert tokenizer.decode(tokenizer.encode("to be, über")) == "to be, über"  # what is accepted still works


# ---- sources


@pytest.mark.fault(26)
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.jsonl.gz", "a.txt.gz", "a.txt"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(max_size=300)
    | st.binary(max_size=40).map(lambda b: b"PAR1" + b + b"PAR1")
    | JSON.map(lambda j: json.dumps(j).encode())
)
def test_any_bytes_as_a_source(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    try:
        prepare(PrepareOptions(str(tmp_path / name), tmp_path / "out", "bytes", workers=1, overwrite=True))
    except HandgradError as error:
        assert error.exit_code == 65 and "\n" not in str(error) and len(str(error)) < 1000
    else:
        touch(tmp_path / "out")


def refuse(tmp_path, content: bytes, name: str, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare(PrepareOptions(str(tmp_path / name), tmp_path / "out", "bytes"))
    assert not (tmp_path / "out").exists()


@pytest.mark.fault(27)
@pytest.mark.parametrize("offset", [0, 1, 2, 1001, 262_143, 262_144, 262_145, 270_000])
def test_text_that_is_not_utf8_is_named_with_its_byte(tmp_path, offset):
    content = bytearray(b"a" + "é".encode() * 150_000)  # reading in blocks of 262,144 bytes tears a character
    content[offset] = 0xFF
    first = offset if offset % 2 or offset == 0 else offset - 1  # a broken second byte belongs to the first
    refuse(tmp_path, bytes(content), "a.txt", rf"expected UTF-8.*at byte {first} of .*a\.txt")


def test_rows_that_are_not_utf8(tmp_path):
    refuse(tmp_path, b'{"text": "fine"}\n{"text": "\xff"}\n', "a.jsonl", r"at byte 27 of .*a\.jsonl")
    refuse(tmp_path, b'{"text": "\\ud800"}\n', "a.jsonl", "surrogate.* line 1 of")
    binary = pyarrow.array([b"fine", b"\xff"], pyarrow.binary()).cast(pyarrow.string(), safe=False)
    pyarrow.parquet.write_table(pyarrow.table({"text": binary}), tmp_path / "b.parquet")
    refuse(tmp_path, (tmp_path / "b.parquet").read_bytes(), "a.parquet", "UTF-8.* row 2")


def test_truncated_files(tmp_path, make_text):
    import gzip

    whole = gzip.compress(make_text(50_000).encode())
    refuse(tmp_path, whole[:-100], "a.txt.gz", "gzip")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["abc" * 1000] * 100}), tmp_path / "b.parquet")
    refuse(tmp_path, (tmp_path / "b.parquet").read_bytes()[:-1], "a.parquet", "parquet file")


@pytest.mark.fault(27)
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "no document"),
        ("a.jsonl", b"", "no document"),
        ("a.jsonl", b'{"text": ""}\n\n{"text": null}\n', "no document"),
        ("a.jsonl", b'{"body": "x"}\n', "'text', found the keys body in line 1 .*; try --text-field body$"),
        ("a.jsonl", b'{"id": "7", "body": "long", "n": 1}\n', "found the keys id, body, n .*; try --text-field body$"),
        ("a.jsonl", b'{"n": 1}\n', "; try --text-field$"),
        ("a.jsonl", b'{"text": "x"}\n{"text": 3}\n', "found 3 in line 2"),
        ("a.jsonl", b'{"text": "x"}\n{"text":\n', "JSON object.* in line 2"),
        ("a.jsonl", b"[[1]]\n", "found a list"),
        ("a.csv", b"x", "convert it, or rename plain text"),
        ("a.txt", b"x", "none for (train|validation)"),
    ],
)
def test_sources_without_usable_text(tmp_path, name, content, message):
    refuse(tmp_path, content, name, message)


def test_parquet_columns(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"column 'text', found body, n .*; try --text-field body$"):
        prepare(PrepareOptions(str(tmp_path / "a.parquet"), tmp_path / "out"))
    with pytest.raises(DataError, match="found int64"):
        prepare(PrepareOptions(str(tmp_path / "a.parquet"), tmp_path / "out", text_field="n"))


def test_a_row_too_long_to_hold(tmp_path, monkeypatch):
    from handgrad.data import sources

    monkeypatch.setattr(sources, "MAX_ROW_BYTES", 1000)
    content = json.dumps({"text": "x" * 20_000_000}).encode()
    tracemalloc.start()
    refuse(tmp_path, content, "a.jsonl", "at most 1000 bytes.*line 1")
    assert tracemalloc.get_traced_memory()[1] < 10_000_000  # it was not read to its end
    tracemalloc.stop()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x" * 2000]}), tmp_path / "b.parquet")
    refuse(tmp_path, (tmp_path / "b.parquet").read_bytes(), "a.parquet", "below 1000.*row 1")


def test_missing_sources(tmp_path):
    (tmp_path / "empty").mkdir()
    for given_source, message in (
        (tmp_path / "no.txt", "no such file"),
        (tmp_path / "*.txt", "matches no text"),
        (tmp_path / "empty", "found none"),
    ):
        with pytest.raises(DataError, match=message):
            prepare(PrepareOptions(str(given_source), tmp_path / "out"))


CUT = """
import os, sys
from handgrad.data.shards import open_dataset
from handgrad.errors import DataError
shard = open_dataset(sys.argv[1]).splits["train"][0]
assert shard.read(39_000, 5).tolist() == [0, 1, 2, 3, 4]
os.truncate(shard.path, 20_000)
try:
    shard.read(39_000, 5)
except DataError as error:
    print(error)
"""


def test_a_shard_that_is_cut_while_it_is_read(make_dataset):
    """In a process of its own, which a memory map would lose by SIGBUS."""
    folder = make_dataset([np.arange(40_000) % 250], [np.arange(60)])
    found = subprocess.run([sys.executable, "-c", CUT, str(folder)], capture_output=True, text=True)
    line = f"expected 40000 tokens in {folder / 'train_000000.bin'}, cut while it was read; restore it\n"
    assert (found.returncode, found.stdout) == (0, line), found.stderr


@pytest.mark.parametrize("name", ["pread", "file_digest"])
def test_a_disk_that_fails_while_a_shard_is_read(make_dataset, monkeypatch, name):
    """In a step, and where the shard is verified before its first use."""
    shard = open_dataset(make_dataset([np.arange(40_000) % 250], [np.arange(60)])).splits["train"][0]

    def fail(*given):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(f"os.{name}" if name == "pread" else f"hashlib.{name}", fail)
    with pytest.raises(StorageError, match=r"reading .*train_000000.bin failed: Input/output error"):
        shard.read(0, 5)
