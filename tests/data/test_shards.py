"""Shards: the llm.c layout, lazy verification, and every kind of damage named before a token is used."""

import json
import os
import struct

import numpy as np
import pytest

from handgrad.data import shards
from handgrad.data.llmc_header import EVALUATION, header, make_header
from handgrad.data.shards import open_dataset
from handgrad.errors import DataError
from handgrad.files import file_sha256
from tests.data.conftest import flip_bit

TOKENS = np.arange(1000, dtype=np.uint16) % 257


@pytest.fixture
def folder(make_dataset):
    return make_dataset([TOKENS, TOKENS[:500]], [TOKENS[:100]])


def edit(folder, change):
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_the_layout_is_that_of_llmc():
    words = struct.unpack("<256i", header(12345))
    assert words[:3] == (20240520, 1, 12345) and set(words[3:]) == {0}


def test_an_intact_folder(folder):
    dataset = open_dataset(folder)
    first, second = dataset.splits["train"]
    assert np.array_equal(first.tokens, TOKENS) and np.array_equal(second.tokens, TOKENS[:500])
    assert dataset.tokenizer.kind == "bytes" and dataset.tokens("train") == 1500 and dataset.floor("train") is None
    assert first.document_starts.tolist() == [0]
    with pytest.raises(ValueError, match="read-only"):
        first.tokens[0] = 1


@pytest.mark.fault(21)
def test_a_flipped_bit_is_found_at_first_touch_and_the_file_named(folder):
    flip_bit(folder / "train_000001.bin", 1500)
    first, second = open_dataset(folder).splits["train"]  # opening hashes nothing
    assert len(first.tokens) == 1000
    with pytest.raises(DataError, match=r"SHA-256.*train_000001\.bin"):
        _ = second.tokens


def write_at(path, offset, content):
    """Into the file itself, an hour after it was written."""
    before = path.stat().st_mtime_ns
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)
    os.utime(path, ns=(before, before + 3600 * 10**9))


def test_a_shard_that_is_overwritten_while_it_is_read(folder, monkeypatch):
    """None of its new tokens is used, also where the old ones had been verified."""
    path, verified = folder / "train_000000.bin", []
    monkeypatch.setattr(shards, "file_sha256", lambda file: verified.append(file) or file_sha256(file))
    shard = open_dataset(folder).splits["train"][0]
    assert np.array_equal(shard.read(100, 50), TOKENS[100:150]) and verified == [path]
    write_at(path, 1024, b"")  # touched
    for start in (100, 200):
        assert np.array_equal(shard.read(start, 50), TOKENS[start : start + 50])
    assert verified == [path] * 2, "hashed again once"
    write_at(path, 1024 + 2 * 900, b"\x01")
    with pytest.raises(DataError, match=r"SHA-256 .*, found .* in .*train_000000\.bin; it changed, restore it"):
        shard.read(100, 50)
    copy = path.with_suffix(".new")  # a new file under its name leaves the open one as it was
    shard = open_dataset(folder).splits["train"][1]
    assert np.array_equal(shard.read(0, 50), TOKENS[:50])
    copy.write_bytes(b"other")
    copy.replace(shard.path)
    assert np.array_equal(shard.read(50, 50), TOKENS[50:100])


def test_a_bare_shard_that_is_overwritten_while_it_is_read(folder):
    """Without a manifest it is held to the content of its first use."""
    path = folder / "gpt2_train_000000.bin"
    path.write_bytes((folder / "train_000000.bin").read_bytes())
    write_at(path, 1024, np.full(1000, 40000, "<u2").tobytes())
    (folder / "manifest.json").unlink()
    shard = open_dataset(folder).splits["train"][0]
    assert shard.read(0, 10).tolist() == [40000] * 10
    write_at(path, 1024, b"")  # touched
    assert shard.read(5, 10).tolist() == [40000] * 10
    write_at(path, 1024 + 2 * 900, b"\x01")
    with pytest.raises(DataError, match=r"SHA-256 .*, found .* in .*gpt2_train_000000\.bin; it changed, restore it"):
        shard.read(0, 10)


@pytest.mark.fault(22)
@pytest.mark.parametrize("size", [0, 1, 100, 1023, 1024, 1025, 3022, 3023, 3025, 5000])
def test_any_other_size_is_refused(folder, size):
    path = folder / "train_000000.bin"
    path.write_bytes((path.read_bytes() + bytes(5000))[:size])
    with pytest.raises(DataError, match=rf"train_000000\.bin, found {size};"):
        open_dataset(folder)


@pytest.mark.fault(22)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((20240521, 1, 1000), "magic"),
        ((20240520, 2, 1000), "version"),
        ((20240801, 7, 1000), "Llama"),
        ((20240520, 1, 999), "3022 bytes"),
        ((20240520, 1, -1), "bytes for -1"),
    ],
)
def test_a_wrong_header_is_refused(folder, words, message):
    path = folder / "train_000000.bin"
    path.write_bytes(struct.pack("<3i", *words) + path.read_bytes()[12:])
    with pytest.raises(DataError, match=message):
        _ = open_dataset(folder).splits["train"][0].tokens


@pytest.mark.fault(23)
def test_a_token_outside_the_vocabulary_is_named_with_shard_and_offset(make_dataset):
    bad = TOKENS.copy()
    bad[[700, 800]] = 257, 60000
    dataset = open_dataset(make_dataset([TOKENS, bad], [TOKENS]))
    assert len(dataset.splits["train"][0].tokens) == 1000
    with pytest.raises(DataError, match=r"below 257, found 257 at token 700 of .*train_000001\.bin"):
        _ = dataset.splits["train"][1].tokens


def test_a_missing_shard_and_a_damaged_index(folder):
    flip_bit(folder / "validation_000000.idx", 0)
    with pytest.raises(DataError, match=r"SHA-256.*validation_000000\.idx"):
        _ = open_dataset(folder).splits["validation"][0].document_starts
    (folder / "validation_000000.idx").unlink()
    with pytest.raises(DataError, match="found none"):
        _ = open_dataset(folder).splits["validation"][0].document_starts
    (folder / "train_000001.bin").unlink()
    with pytest.raises(DataError, match="no such file"):
        open_dataset(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(schema=2), "schema 1, found 2"),
        (lambda m: m["splits"].pop("validation"), "splits"),
        (lambda m: m["splits"]["train"].update(tokens=7), "expected 7 tokens"),
        (lambda m: m["splits"]["train"].update(tokens=True), "expected tokens as int"),
        (lambda m: m["splits"]["train"].update(text_bytes=-1), "expected text_bytes as int"),
        (lambda m: m["splits"]["train"].update(source_nats=float("inf")), "finite"),
        (lambda m: m["splits"]["train"]["shards"][0].update(file="../secret.bin"), "plain file name"),
        (lambda m: m["splits"]["train"]["shards"][0].update(sha256="x"), "SHA-256"),
        (lambda m: m["tokenizer"].update(kind="words"), "words"),
        (lambda m: m["tokenizer"].update(vocab_size=50257), "vocab_size"),
    ],
)
def test_an_edited_manifest_is_refused(folder, change, message):
    edit(folder, change)
    with pytest.raises(DataError, match=message):
        open_dataset(folder)


def test_the_identity_is_that_of_the_tokens(make_dataset):
    one = open_dataset(make_dataset([TOKENS], [TOKENS], "one"))
    same = open_dataset(make_dataset([TOKENS], [TOKENS], "same"))
    changed = TOKENS.copy()
    changed[5] += 1
    other = open_dataset(make_dataset([changed], [TOKENS], "other"))
    assert one.identity == same.identity != other.identity and len(one.identity) == 64
    edit(same.folder, lambda m: m.update(recipe={"source": "elsewhere"}))
    assert open_dataset(same.folder).identity == one.identity


def test_bytes_do_not_open_as_gpt2_tokens(tmp_path):
    """A prepared folder that has lost its manifest."""
    (tmp_path / "train_000000.bin").write_bytes(header(5000) + np.resize(TOKENS, 5000).astype("<u2").tobytes())
    with pytest.raises(DataError, match=r"expected GPT-2 tokens.*found none above 256 .*manifest.json.*--tokenizer bytes"):
        open_dataset(tmp_path)


def test_tokens_of_another_tokenizer_do_not_open_as_gpt2s(tmp_path):
    """They are in GPT-2's range, so nothing else would tell."""
    (tmp_path / "train_000000.bin").write_bytes(header(3) + np.array([1, 300, 4095], "<u2").tobytes())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"expected manifest.json beside .*tokenizer.json, found none; restore it"):
        open_dataset(tmp_path)


def test_a_file_of_a_prepared_folder_is_answered_with_the_folder(folder):
    for name in ("train_000000.bin", "manifest.json"):
        with pytest.raises(DataError, match=rf"found the file .*{name}; give its folder: --data .*{folder.name}$"):
            open_dataset(folder / name)


def test_a_bare_folder_of_llmc_files(tmp_path):
    for name, tokens in (
        ("fineweb_train_000001", [1, 2, 50256]),
        ("fineweb_train_000002", [3]),
        ("fineweb_val_000000", [4, 5]),
    ):
        (tmp_path / f"{name}.bin").write_bytes(header(len(tokens)) + np.array(tokens, "<u2").tobytes())
    dataset = open_dataset(tmp_path)
    assert dataset.manifest is None and dataset.tokenizer.kind == "gpt2"
    assert [s.tokens.tolist() for s in dataset.splits["train"]] == [[1, 2, 50256], [3]]
    assert [s.tokens.tolist() for s in dataset.splits["validation"]] == [[4, 5]]
    before = dataset.identity
    flip_bit(tmp_path / "fineweb_val_000000.bin", 1024)
    assert open_dataset(tmp_path).identity != before
    (tmp_path / "fineweb_val_000000.bin").write_bytes(header(2) + np.array([1, 50257], "<u2").tobytes())
    with pytest.raises(DataError, match="found 50257 at token 1"):
        _ = open_dataset(tmp_path).splits["validation"][0].tokens


def test_llmcs_own_names(tmp_path):
    """As its data scripts name their files; the multiple-choice questions beside them are not tokens."""
    content = header(2) + np.array([7, 8], "<u2").tobytes()
    splits = {
        "train": ["tiny_shakespeare_train", "TinyStories_train", "edu_fineweb_train_000001", "fineweb_train_000103"],
        "validation": ["tiny_shakespeare_val", "TinyStories_val", "edu_fineweb_val_000000", "fineweb_val_000000"],
    }
    for name in (*splits["train"], *splits["validation"]):
        (tmp_path / f"{name}.bin").write_bytes(content)
    (tmp_path / "gpt2_tokenizer.bin").write_bytes(b"no tokens")
    (tmp_path / "hellaswag_val.bin").write_bytes(make_header({0: EVALUATION, 1: 1, 2: 1, 3: 38}) + bytes(38))
    found = open_dataset(tmp_path).splits
    assert {split: [s.path.stem for s in found[split]] for split in found} == {s: sorted(n) for s, n in splits.items()}


def test_an_empty_shard_is_no_error(tmp_path):
    (tmp_path / "a_train_0.bin").write_bytes(header(0))
    assert len(open_dataset(tmp_path).splits["train"][0].tokens) == 0


def test_what_is_no_dataset(tmp_path):
    with pytest.raises(DataError, match="none at"):
        open_dataset(tmp_path / "nowhere")
    (tmp_path / "half.partial").mkdir()
    with pytest.raises(DataError, match="finish it"):
        open_dataset(tmp_path / "half")
    with pytest.raises(DataError, match="none in"):
        open_dataset(tmp_path)
