"""From documents to shards: exact tokens, splits as documented, bounded memory, and nothing overwritten."""

import codecs
import gzip
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from handgrad.cli import main
from handgrad.data import prepare as preparing, stories
from handgrad.data.pieces import split_of
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.data.shards import open_dataset
from handgrad.data.tokenizer import train_bpe
from handgrad.data.tokenizer_loading import load_tokenizer
from handgrad.errors import DataError, UsageError
from tests.data.conftest import contents, rows, write_rows

MARKER = {"gpt2": 50256, "bytes": 256}


def text_of(dataset, split: str) -> list[str]:
    """The documents of a split, by its markers; checks that the index says the same."""
    tokens = np.concatenate([shard.tokens for shard in dataset.splits[split]])
    starts = np.flatnonzero(tokens == dataset.tokenizer.end_of_text)
    indexed, before = [], 0
    for shard in dataset.splits[split]:
        indexed += (shard.document_starts.astype(np.int64) + before).tolist()
        before += shard.token_count
    assert indexed == starts.tolist() and (len(starts) == 0 or starts[0] == 0)
    return [dataset.tokenizer.decode(part[1:]) for part in np.split(tokens, starts[1:])]


@pytest.mark.parametrize("tokenizer", ["gpt2", "bytes"])
def test_the_tokens_of_a_text_file_are_those_of_the_whole(tmp_path, make_text, small_units, tokenizer):
    text = make_text(60_000)
    (tmp_path / "a.txt").write_text(text)
    result = prepare(PrepareOptions(str(tmp_path / "a.txt"), tmp_path / "out", tokenizer, shard_tokens=7000, workers=1))
    dataset, whole = result.dataset, load_tokenizer(tokenizer).encode(text)
    parts = [np.concatenate([s.tokens for s in dataset.splits[split]]) for split in ("train", "validation")]
    assert [part[0] for part in parts] == [MARKER[tokenizer]] * 2
    assert np.array_equal(np.concatenate([part[1:] for part in parts]), whole)
    assert {s.token_count for s in dataset.splits["train"][:-1]} == {7000}
    train, validation = text_of(dataset, "train"), text_of(dataset, "validation")
    assert train + validation == [train[0], validation[0]] and train[0] + validation[0] == text
    assert abs(len(validation[0].encode()) / len(text.encode()) - 0.1) < 0.01
    record = dataset.manifest["splits"]["train"]
    assert record["text_bytes"] == len(train[0].encode()) and record["text_tokens"] == record["tokens"] - 1
    assert record["source_nats"] is None and dataset.manifest["recipe"]["source"] == "a.txt"
    assert not result.already_prepared and not list(tmp_path.glob("*.partial"))


def test_a_small_text_gets_a_vocabulary_of_its_own(tmp_path, make_text, monkeypatch):
    """From a size on GPT-2's; the same for folders, by the sum of their files. What was chosen is what was asked for."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(make_text(30_000))
    small = PrepareOptions(str(tmp_path / "a.txt"), tmp_path / "small", workers=1)
    assert small.tokenizer == "auto"
    dataset = prepare(small).dataset
    assert dataset.tokenizer.kind == "bpe" and dataset.tokenizer.vocab_size <= 4096
    assert dataset.manifest["recipe"]["tokenizer"] == "bpe:4096" and prepare(small).already_prepared
    assert prepare(replace(small, tokenizer="bpe:4096")).already_prepared
    monkeypatch.setattr(preparing, "SMALL_TEXT_BYTES", 40_000)
    assert prepare(replace(small, source=str(tmp_path), out=tmp_path / "two")).dataset.tokenizer.kind == "gpt2"


def test_datasets_by_name_and_stories_keep_gpt2s_vocabulary(tmp_path):
    stories_ = prepare(PrepareOptions("stories", tmp_path / "stories", documents=200, workers=1)).dataset
    assert stories_.tokenizer.kind == "gpt2"
    download = SimpleNamespace(size_bytes=1000, download=object())
    assert preparing.suited_tokenizer([download]) == "gpt2"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_rows_are_dealt_out_in_blocks(tmp_path, make_text, small_units, name):
    texts = rows(make_text, 100)
    write_rows(tmp_path / name, texts, "body")
    options = PrepareOptions(str(tmp_path / name), tmp_path / "out", "bytes", "body", workers=1, validation_fraction=0.1)
    dataset = prepare(options).dataset
    expected = [[t for n, t in enumerate(texts) if split_of(0, n, 10) == split] for split in (0, 1)]
    assert [text_of(dataset, "train"), text_of(dataset, "validation")] == expected and len(expected[1]) == 10
    assert [sum(split_of(0, n, 10) for n in range(b, b + 10)) for b in range(0, 100, 10)] == [1] * 10
    assert (
        len({next(i for i in range(10) if split_of(0, b + i, 10)) for b in range(0, 300, 10)}) > 5
    )  # not always the same place
    assert [split_of(1, n, 10) for n in range(100)] != [split_of(0, n, 10) for n in range(100)]


def test_the_formats_agree_and_empty_rows_are_passed_over(tmp_path, make_text):
    texts = rows(make_text, 40)
    results = []
    for name in ("a.jsonl", "a.jsonl.gz", "a.parquet"):
        write_rows(tmp_path / name, [*texts[:7], "", *texts[7:], ""])
        out = tmp_path / f"out-{name}"
        results.append(prepare(PrepareOptions(str(tmp_path / name), out, "bytes")).dataset.identity)
    assert len(set(results)) == 1


def test_a_folder_a_glob_and_a_limit(tmp_path, make_text):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    texts = {"in/a.txt": make_text(3000, 1), "in/deep/b.txt": make_text(3000, 2), "in/c.pdf": "x", "in/.venv/d.txt": "x"}
    (tmp_path / "in" / ".venv").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "in" / "d.txt.gz").write_bytes(gzip.compress(texts["in/a.txt"].encode()))
    both = prepare(PrepareOptions(str(tmp_path / "in"), tmp_path / "folder", "bytes")).dataset
    assert [len(text_of(both, split)) for split in ("train", "validation")] == [3, 3]  # each file has both parts
    assert text_of(both, "train")[0] == text_of(both, "train")[1]  # a.txt and d.txt.gz
    globbed = prepare(PrepareOptions(str(tmp_path / "in/**/b*"), tmp_path / "glob", "bytes")).dataset
    assert text_of(globbed, "train") == text_of(both, "train")[2:]
    limited = prepare(PrepareOptions(str(tmp_path / "in"), tmp_path / "limited", "bytes", documents=1)).dataset
    assert text_of(limited, "train") == text_of(both, "train")[:1]


def test_notes_of_windows(tmp_path, make_text, capsys):
    """.md files are text; the mark that an editor there puts before a text is none, its line ends stay; what is no text by
    its name is counted, hidden folders are not looked into."""
    notes, out = tmp_path / "notes", tmp_path / "out"
    text = make_text(3000, 1).replace(" ", "\r\n")
    for name, content in {"a.md": text.encode(), "b.TXT": codecs.BOM_UTF8 + text.encode()}.items():
        (notes / name).parent.mkdir(exist_ok=True)
        (notes / name).write_bytes(content)
    for name in ("x.docx", "y.PDF", "z.pdf", "Makefile", ".git/notes.md"):
        (notes / name).parent.mkdir(exist_ok=True)
        (notes / name).write_bytes(b"\xff")
    assert main(["prepare", str(notes), "--out", str(out), "--tokenizer", "bytes", "--workers", "1"]) == 0
    assert "left out   4 files of other kinds: 2 .pdf, 1 .docx, 1 no suffix\n" in capsys.readouterr().out
    train, validation = (text_of(open_dataset(out), split) for split in ("train", "validation"))
    assert train[0] == train[1] and validation[0] == validation[1] and train[0] + validation[0] == text
    assert (
        main(["prepare", str(notes / "a.md"), "--out", str(tmp_path / "one"), "--tokenizer", "bytes", "--workers", "1"])
        == 0
    )
    assert "left out" not in capsys.readouterr().out


def test_stories_carry_their_entropy(tmp_path, small_units):
    options = PrepareOptions(
        "stories", tmp_path / "out", "bytes", documents=200, seed=5, workers=1, validation_fraction=0.05
    )
    dataset = prepare(options).dataset
    told = [stories.story(5, n) for n in range(200)]
    for number, split in enumerate(("train", "validation")):
        mine = [story for n, story in enumerate(told) if split_of(5, n, 20) == number]
        assert text_of(dataset, split) == [story.text for story in mine]
        record = dataset.manifest["splits"][split]
        assert record["source_nats"] == pytest.approx(sum(story.nats for story in mine), rel=1e-12)
        assert dataset.floor(split) == record["source_nats"] / record["tokens"] > 0


def test_a_vocabulary_trained_on_the_source(tmp_path, make_text, small_units):
    (tmp_path / "a.txt").write_text(make_text(30_000))
    dataset = prepare(PrepareOptions(str(tmp_path / "a.txt"), tmp_path / "out", "bpe:300", workers=2)).dataset
    assert (dataset.tokenizer.kind, dataset.tokenizer.vocab_size) == ("bpe", 300)
    train = text_of(dataset, "train")[0]
    assert np.array_equal(dataset.splits["train"][0].tokens[1:], dataset.tokenizer.encode(train))
    again = prepare(PrepareOptions(str(tmp_path / "a.txt"), tmp_path / "again", str(tmp_path / "out"), workers=1)).dataset
    assert again.identity == dataset.identity
    assert dataset.tokenizer.sha256 != train_bpe([make_text(30_000)], 300).sha256  # validation text took no part


# ---- what is there already


def test_prepared_already_or_something_else(tmp_path, make_text):
    source = tmp_path / "a.txt"
    source.write_text(make_text(5000))
    options = PrepareOptions(str(source), tmp_path / "out", "bytes")
    first = prepare(options)
    before = contents(options.out)
    assert prepare(options).already_prepared and contents(options.out) == before
    assert prepare(PrepareOptions(os.path.relpath(source), tmp_path / "out", "bytes", workers=2)).already_prepared
    for other, message in (
        (PrepareOptions(str(source), options.out, "gpt2"), "tokenizer 'bytes' instead of 'gpt2'"),
        (PrepareOptions("stories", options.out, "bytes"), "source 'a.txt' instead of 'stories'"),
        (PrepareOptions(str(source), options.out, "bytes", seed=1), "seed 0 instead of 1"),
    ):
        with pytest.raises(UsageError, match=message):
            prepare(other)
    source.write_text(make_text(5000, seed=2))
    with pytest.raises(UsageError, match="other source files"):
        prepare(options)
    assert contents(options.out) == before
    replaced = prepare(PrepareOptions(str(source), options.out, "bytes", overwrite=True))
    assert not replaced.already_prepared and replaced.dataset.identity != first.dataset.identity
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "out"]


def test_a_folder_of_something_else_is_never_touched(tmp_path, make_text):
    (tmp_path / "a.txt").write_text(make_text(5000))
    (tmp_path / "out").mkdir()
    prepare(PrepareOptions(str(tmp_path / "a.txt"), tmp_path / "out", "bytes"))  # an empty folder is fine
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.doc").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="something else"):
            prepare(PrepareOptions(str(tmp_path / "a.txt"), tmp_path / "home", "bytes", overwrite=overwrite))
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "thesis.doc").write_text("precious")
    prepare(PrepareOptions(str(tmp_path / "a.txt"), tmp_path / "new", "bytes"))
    assert (tmp_path / "home" / "thesis.doc").exists() and (tmp_path / "new" / "thesis.doc").exists()


def test_two_at_once(tmp_path, make_text):
    (tmp_path / "a.txt").write_text(make_text(5000))
    options = PrepareOptions(str(tmp_path / "a.txt"), tmp_path / "out", "bytes")
    seen = []

    def second(progress):
        with pytest.raises(UsageError, match="another process writing it"):
            prepare(options)
        seen.append(progress)

    prepare(options, second)
    assert seen and seen[-1].done == seen[-1].total == (tmp_path / "a.txt").stat().st_size and seen[-1].unit == "bytes"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer": "gpt5"}, "gpt5"),
        ({"tokenizer": "bpe:12"}, "bpe:SIZE"),
        ({"tokenizer": "bpe:99999"}, "bpe:SIZE"),
        ({"validation_fraction": 0.0}, "fraction"),
        ({"validation_fraction": 0.6}, "fraction"),
        ({"shard_tokens": 1}, "tokens a shard"),
        ({"workers": -1}, "--workers"),
        ({"out": Path("..")}, "--out"),
    ],
)
def test_options_that_make_no_sense(tmp_path, change, message):
    with pytest.raises(UsageError, match=message):
        prepare(PrepareOptions(**({"source": "stories", "out": tmp_path / "out"} | change)))


# ---- memory

# VmHWM and not getrusage: a process inherits the maximum of the one that started it, which here holds torch.
MEASURE = """
import json, multiprocessing, sys
from pathlib import Path
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.data.tokenizer_loading import load_tokenizer

def peak_bytes(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

workers = [0]
def watch(progress):
    workers.extend(peak_bytes(child.pid) for child in multiprocessing.active_children())

if __name__ == "__main__":
    import pyarrow.parquet
    load_tokenizer("gpt2").encode("warm")
    before = peak_bytes("self")
    result = prepare(PrepareOptions(sys.argv[1], Path(sys.argv[2]), workers=int(sys.argv[3])), watch)
    print(json.dumps([before, peak_bytes("self"), max(workers), result.dataset.tokens("train")]))
"""


@pytest.mark.fault(28)
@pytest.mark.nightly(but=["no blanks"])
@pytest.mark.parametrize("shape", ["one line", "no blanks", "one row group"])
def test_memory_is_bounded(tmp_path, make_text, shape):
    text, size = make_text(500_000), 60_000_000
    if shape == "one line":
        source, line = tmp_path / "a.txt", text.replace("\n", " ")
        source.write_text(line * (size // len(line)))
    elif shape == "no blanks":
        source, size = tmp_path / "a.txt", 20_000_000
        source.write_text("".join(text.split()) * 60)
    else:
        source = tmp_path / "a.parquet"
        texts = [text[i : i + 5000] + str(n) for n in range(size // 500_000) for i in range(0, 500_000, 5000)]
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), source, row_group_size=1 << 30, compression="none")
    (tmp_path / "measure.py").write_text(MEASURE)
    command = [sys.executable, tmp_path / "measure.py", source, tmp_path / "out", "2" if shape == "one line" else "1"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    before, main, worker, tokens = json.loads(run.stdout)
    assert tokens > size / 10 and (worker > 0) == (shape == "one line")
    assert main - before < 90_000_000, f"{(main - before) >> 20} MiB more in the main process"
    assert worker < 120_000_000, f"{worker >> 20} MiB in a worker"


def test_the_result_opens(tmp_path):
    prepare(PrepareOptions("stories", tmp_path / "out", "bytes", documents=300))
    assert open_dataset(tmp_path / "out").manifest["recipe"]["documents"] == 300


@pytest.mark.fault(27)
def test_too_little_for_two_splits(tmp_path):
    write_rows(tmp_path / "a.jsonl", ["only one"])
    with pytest.raises(DataError, match=r"none for (train|validation) among the 1 .*jsonl; add text$"):
        prepare(PrepareOptions(str(tmp_path / "a.jsonl"), tmp_path / "out", "bytes"))
    assert not (tmp_path / "out").exists()
