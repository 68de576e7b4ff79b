"""Conversations in the forms and files that datasets have: each gives the shards of the same conversations as messages."""

import gzip
import json
import os
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from handgrad.cli import main
from handgrad.data import pieces, prepare as preparing, sources
from handgrad.data.chat import messages_of
from handgrad.data.chat_template import ChatTemplate
from handgrad.data.pieces import split_of
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.errors import DataError
from tests.data.chats import TRIMS, made_tokenizer, talk, write_folder
from tests.data.conftest import contents

PAIRS = [(f"What is {n}? \u00e9", f"It is {n}." * (1 + n % 5)) for n in range(40)]
ASKED = talk("Say it.\n\nthe text", "said", system="Be brief.")


def shards(folder, source):
    """The files of the shards of a source, by name."""
    prepare(PrepareOptions(str(source), folder, "bytes", chat=True, workers=1))
    return {name: content for name, content in contents(folder).items() if name != "manifest.json"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": ASKED[1:], "system": "Be brief.", "id": 7},
        {"messages": ASKED, "system": "Be brief."},
        {"messages": [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in ASKED]},
        {"messages": None, "conversations": [{"role": turn["role"], "content": turn["content"]} for turn in ASKED]},
        {"messages": [turn | {"tool_calls": None, "weight": None, "train": None} for turn in ASKED], "tools": None},
        {"instruction": "Say it.", "input": "the text", "output": "said", "system": "Be brief.", "text": "all of it"},
        {"instruction": "Say it.", "context": "the text", "response": "said", "system_prompt": "Be brief."},
        {"instruction": "Say it.\n\nthe text", "input": "", "output": "said", "system": "Be brief.", "history": []},
        {"prompt": ASKED[:2], "completion": ASKED[2:]},
        *[
            {"system_prompt": "Be brief.", asked: "Say it.\n\nthe text", answered: "said"}
            for asked, answered in (
                ("prompt", "completion"),
                ("prompt", "response"),
                ("question", "answer"),
                ("question", "response"),
                ("query", "response"),
            )
        ],
    ],
)
def test_a_row_of_any_form(row):
    assert messages_of(row, "line 1") == tuple((turn["role"], turn["content"]) for turn in ASKED)


def test_every_kind_of_file_gives_the_same_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 100)  # less than an entry, and a character is cut here and there
    rows = [{"messages": talk(*pair)} for pair in PAIRS]
    alpaca = [{"instruction": asked, "input": "", "output": answer} for asked, answer in PAIRS]
    kinds = {
        "lines.jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows),
        "lines.json": "\ufeff" + "\n".join(map(json.dumps, rows)),
        "array.json": json.dumps(alpaca, indent=2, ensure_ascii=False),
        "array.jsonl": "\ufeff\n [" + ",".join(json.dumps(row, ensure_ascii=False) for row in rows) + "]\n",
    }
    for name, content in kinds.items():
        (tmp_path / name).write_bytes(content.encode())
    (tmp_path / "packed.json.gz").write_bytes(gzip.compress(kinds["array.json"].encode()))
    for name, found in (("talks", rows), ("pairs", alpaca)):
        table = pyarrow.Table.from_pylist([row | {"id": n, "system": None} for n, row in enumerate(found)])
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=7)
    expected, *others = [shards(tmp_path / f"of {path.name}", path) for path in sorted(tmp_path.iterdir())]
    assert len(others) == 6 and len(expected) == 6
    assert all(other == expected for other in others)


def test_json_files_are_read_where_they_are_named(tmp_path):
    """A folder's .json files are settings; of one that has nothing else the command is told."""
    (tmp_path / "talks").mkdir()
    (tmp_path / "talks" / "a.json").write_text(json.dumps([{"messages": talk(*pair)} for pair in PAIRS]))
    with pytest.raises(DataError, match=r"found none; name its \.json files: '.*talks/\*\.json'"):
        sources.find_local(str(tmp_path / "talks"))
    assert [file.name for file in sources.find_local(str(tmp_path / "talks" / "*.json"))]
    (tmp_path / "talks" / "b.jsonl").write_text("{}")
    assert [file.name for file in sources.find_local(str(tmp_path / "talks"))] == ["b.jsonl"]
    assert sources.passed_over(str(tmp_path / "talks")) == {".json": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"messages": 1} {"messages": 2}]', "found .* as entry 1 of .*a.json; repair the file"),
        ('[{"messages": [{"role": "user"', "expected an array of objects, found .* as entry 1 of"),
        ("[[], ", "found a list in entry 1 of"),
        ("[", "found its end as entry 1 of"),
        ("[]", "found no document"),
        ('["' + "a" * 200 + '\xff"]', "found other bytes at byte 202 of"),
    ],
)
def test_an_array_that_is_none(tmp_path, monkeypatch, content, message):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 50)
    (tmp_path / "a.json").write_bytes(content.encode("latin1"))
    with pytest.raises(DataError, match=message) as raised:
        prepare(PrepareOptions(str(tmp_path / "a.json"), tmp_path / "out", "bytes", chat=True, workers=1))
    assert "\n" not in str(raised.value)


def test_an_entry_too_long_to_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 50)
    monkeypatch.setattr(sources, "MAX_ROW_BYTES", 1000)
    (tmp_path / "a.json").write_text(json.dumps(["a" * 5000]))
    with pytest.raises(DataError, match="as entry 1 of"):
        list(sources.read_objects(tmp_path / "a.json"))


@pytest.mark.nightly(but=["1"])
@pytest.mark.parametrize("workers", [1, 2])
def test_bad_rows_are_left_out_on_request(tmp_path, monkeypatch, capsys, workers):
    """Those that are no conversation, and those that the template refuses: the others are prepared as if they stood alone,
    each in its split, and the command says how many and why. An interrupted attempt still knows."""
    monkeypatch.setattr(pieces, "UNIT_CHARACTERS", 200)
    monkeypatch.setattr(preparing, "CHECKPOINT_UNITS", 1)
    monkeypatch.setattr(preparing, "BYTES_PER_WORKER", 1)
    good = [{"messages": talk(*pair)} for pair in PAIRS]
    bad = {3: {"messages": talk("a", " ")}, 20: {"messages": talk("a", "b", system="no")}, 21: [1], 39: {"text": "a"}}
    rows = [bad.get(n, row) for n, row in enumerate(good)]
    model = write_folder(made_tokenizer(TRIMS), tmp_path / "model")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.utime(tmp_path / "a.jsonl", (1.7e9, 1.7e9))
    options = PrepareOptions(str(tmp_path / "a.jsonl"), tmp_path / "out", str(model), chat=True, workers=workers)
    with pytest.raises(DataError, match=r"an empty message 2 in line 4 of .*; --skip-bad-rows leaves such rows out"):
        prepare(options)

    def stop(progress):
        if progress.done > 2000:
            raise KeyboardInterrupt

    options = replace(options, skip_bad_rows=True)
    with pytest.raises(KeyboardInterrupt):
        prepare(options, stop)
    dataset = prepare(options).dataset
    splits = dataset.manifest["splits"]
    assert sum(split["documents"] for split in splits.values()) == 36
    assert splits["train"]["left_out"] + splits["validation"].get("left_out", 0) == 4
    assert "an empty message 2 in line 4 of" in splits["train"]["first_left_out"]
    template = ChatTemplate(dataset.tokenizer, datetime.fromtimestamp(1.7e9, UTC))
    expected = [[], []]
    for n, row in enumerate(good):
        if n not in bad:
            expected[split_of(0, n, 20)] += template.conversation(row["messages"])[0].tolist()
    found = [np.concatenate([shard.tokens for shard in dataset.splits[name]]).tolist() for name in ("train", "validation")]
    assert found == expected
    command = ["prepare", "--chat", str(tmp_path / "a.jsonl"), "--tokenizer", str(model), "--out", str(tmp_path / "out")]
    assert main([*command, "--skip-bad-rows"]) == 0
    assert f"           {splits['train']['left_out']} rows left out, the first: expected" in capsys.readouterr().out
    assert main(command) == 64
    assert main(["prepare", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "x"), "--skip-bad-rows"]) == 64


def test_whoever_names_no_tokenizer_hears_of_the_models(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": talk(*pair)}) + "\n" for pair in PAIRS))
    assert main(["prepare", "--chat", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out"), "--workers", "1"]) == 0
    assert "; --tokenizer MODEL if a model's weights are to be finetuned on it\n" in capsys.readouterr().out


def test_nothing_but_bad_rows(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": talk("a")}) + "\n")
    options = PrepareOptions(str(tmp_path / "a.jsonl"), tmp_path / "out", "bytes", chat=True, skip_bad_rows=True, workers=1)
    with pytest.raises(
        DataError, match=r"found no document in .* \(expected a message of the assistant, found none in line 1"
    ):
        prepare(options)


@pytest.mark.parametrize("row", [{"instruction": "a", "output": "b"}, {"prompt": "a", "response": "b"}, {"messages": "a"}])
def test_rows_of_conversations_without_chat(tmp_path, row):
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        with pytest.raises(DataError, match="; add --chat to the command, which prepares"):
            prepare(PrepareOptions(str(tmp_path / name), tmp_path / "out", "bytes", workers=1))


def test_rows_of_pairs_without_preferences(tmp_path):
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError, match="; add --preferences --reference MODEL, which prepares pairs of answers"):
        prepare(PrepareOptions(str(tmp_path / "a.jsonl"), tmp_path / "out", "bytes", workers=1))


def test_a_parquet_file_without_conversations(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r'expected a column "messages", found text in .*; write rows as'):
        prepare(PrepareOptions(str(tmp_path / "a.parquet"), tmp_path / "out", "bytes", chat=True, workers=1))
