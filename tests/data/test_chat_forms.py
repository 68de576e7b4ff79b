"""Conversations in the forms and files that datasets have: each gives the shards of the same conversations as messages."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from handgrad.data import sources
from handgrad.data.chat import messages_of
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.errors import DataError
from tests.data.chats import talk
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


@pytest.mark.parametrize("row", [{"instruction": "a", "output": "b"}, {"prompt": "a", "response": "b"}, {"messages": "a"}])
def test_rows_of_conversations_without_chat(tmp_path, row):
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        with pytest.raises(DataError, match="; conversations, or questions and answers, need --chat"):
            prepare(PrepareOptions(str(tmp_path / name), tmp_path / "out", "bytes", workers=1))


def test_a_parquet_file_without_conversations(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r'expected a column "messages", found text in .*; write rows as'):
        prepare(PrepareOptions(str(tmp_path / "a.parquet"), tmp_path / "out", "bytes", chat=True, workers=1))
