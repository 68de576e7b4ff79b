"""Chat data: lines to conversations to shards, with the stretches that the assistant says."""

import json
import os

import numpy as np
import pytest
import torch

from handgrad.cli import main
from handgrad.data.batches import Batches
from handgrad.data.chat import NOT_TEXT, UNTRAINED, messages_of
from handgrad.data.chat_template import ChatTemplate
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.data.shards import open_dataset
from handgrad.errors import DataError, UsageError
from tests.data.chats import CHATML, TEMPLATES, made_tokenizer, talk, write_folder
from tests.data.conftest import contents


def conversations(count):
    """Conversations of one to three turns, some of them long."""
    return [
        talk(*[f"q{n} {turn}" if turn % 2 == 0 else f"said {n}" * (1 + n % 9) for turn in range(2 * (1 + n % 3))])
        for n in range(count)
    ]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.utime(path, (1.7e9, 1.7e9))  # a template may write the day
    return path


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "chat.jsonl", [{"messages": messages} for messages in conversations(60)])


def read_back(dataset):
    """By split: the text of each conversation, and what of it is trained."""
    back = {}
    for name, shards in dataset.splits.items():
        tokens = np.concatenate([shard.tokens for shard in shards])
        offsets = np.cumsum([0] + [shard.token_count for shard in shards])
        starts = np.concatenate([s.document_starts + o for s, o in zip(shards, offsets, strict=False)]).astype(int)
        trained = np.zeros(len(tokens), bool)
        for shard, offset in zip(shards, offsets, strict=False):
            for first, end in shard.trained:
                trained[offset + first : offset + end] = True
        decode = dataset.tokenizer.decode
        bounds = zip(starts, [*starts[1:], len(tokens)], strict=True)
        back[name] = [(decode(tokens[a:b]), decode(tokens[a:b][trained[a:b]])) for a, b in bounds]
    return back


@pytest.mark.nightly(but=["chatml", "thinks"])
@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2", "chatml", "thinks", "wide"])
def test_conversations_come_back(tmp_path, source, small_units, tokenizer):
    """In shards that cut them anywhere, written in several goes: each as its template says, and what the assistant says."""
    spec = tokenizer
    if tokenizer in (*TEMPLATES, "wide"):
        made = made_tokenizer(TEMPLATES.get(tokenizer, CHATML), filler=66_000 if tokenizer == "wide" else 0)
        spec = str(write_folder(made, tmp_path / "model"))
    dataset = prepare(PrepareOptions(str(source), tmp_path / "out", spec, chat=True, shard_tokens=700, workers=1)).dataset
    template, expected = ChatTemplate(dataset.tokenizer), []
    assert template.is_plain == (spec == tokenizer) and dataset.is_chat
    for messages in conversations(60):
        tokens, stretches = template.conversation(messages)
        said = np.concatenate([tokens[a:b] for a, b in stretches])
        expected.append((dataset.tokenizer.decode(tokens), dataset.tokenizer.decode(said)))
    back = read_back(dataset)
    assert back["train"] != expected and sorted(back["train"] + back["validation"]) == sorted(expected)
    assert back["train"] == [one for one in expected if one in back["train"]] and len(back["validation"]) == 3
    assert len(dataset.splits["train"]) > 3
    for name, split in dataset.manifest["splits"].items():
        trained = sum(int((s.trained[:, 1] - s.trained[:, 0]).sum()) for s in dataset.splits[name])
        assert 0 < trained == split["trained_tokens"] < split["text_tokens"] == split["tokens"]
    batches = Batches(dataset.splits["train"], 64, 0, packing="whole")
    inputs, targets = torch.empty(8, 64, dtype=torch.int64), torch.empty(8, 64, dtype=torch.int64)
    batches.fill(inputs, targets, 0)
    assert 0 < (targets >= 0).sum() == batches.trained_tokens(0, 8) < targets.numel()


def test_sharegpt_and_both_forms_give_the_same_tokens(tmp_path):
    rows = conversations(40)
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    theirs = [
        {"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in row], "id": "x"} for row in rows
    ]
    for name, lines in (("ours", [{"messages": row} for row in rows]), ("theirs", theirs)):
        write(tmp_path / f"{name}.jsonl", lines)
        prepare(PrepareOptions(str(tmp_path / f"{name}.jsonl"), tmp_path / name, "bytes", chat=True, workers=1))
    ours, theirs = contents(tmp_path / "ours"), contents(tmp_path / "theirs")
    assert {n: c for n, c in ours.items() if n != "manifest.json"} == {
        n: c for n, c in theirs.items() if n != "manifest.json"
    }
    assert len(ours) == 7


@pytest.mark.parametrize(("spec", "enough"), [("bpe:300", 2500), ("model", 6000)])
def test_any_number_of_workers_and_an_interrupted_attempt(tmp_path, source, small_units, spec, enough):
    """With the plain template, and with a model's tokenizer and its own."""
    if spec == "model":
        spec = str(write_folder(made_tokenizer(CHATML), tmp_path / "model"))
    options = [
        PrepareOptions(str(source), tmp_path / name, spec, chat=True, workers=workers, shard_tokens=500)
        for name, workers in (("one", 1), ("two", 2), ("again", 1))
    ]
    for each in options[:2]:
        prepare(each)

    def stop(progress):
        if progress.tokens > enough:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="go on"):
        prepare(options[2], stop)
    prepare(options[2])
    one, two, again = (contents(each.out) for each in options)
    assert one == two == again and sum(name.endswith(".trained") for name in one) > 4
    assert prepare(options[0]).already_prepared


def test_another_template_or_no_chat_is_another_dataset(tmp_path, source):
    options = PrepareOptions(str(source), tmp_path / "out", "bytes", chat=True, workers=1)
    prepare(options)
    plain = PrepareOptions(str(source), tmp_path / "out", "bytes", text_field="text", workers=1)
    with pytest.raises(UsageError, match="found one with chat 'plain' instead of None"):
        prepare(plain)
    model = write_folder(made_tokenizer(CHATML), tmp_path / "model")
    first = PrepareOptions(str(source), tmp_path / "chatml", str(model), chat=True, workers=1)
    prepare(first)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATES["thinks"]}))
    with pytest.raises(UsageError, match="found one with chat 'template"):
        prepare(first)


def test_the_date_of_a_template_is_that_of_the_file(tmp_path, source):
    model = write_folder(made_tokenizer(TEMPLATES["trims"]), tmp_path / "model")
    dataset = prepare(PrepareOptions(str(source), tmp_path / "out", str(model), chat=True, workers=1)).dataset
    assert read_back(dataset)["train"][0][0].startswith("<|begin|>Today: 14 Nov 2023\n")


GOOD, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    "row, message",
    [
        ({"text": "a"}, 'expected an object with "messages", found the keys text in line 2 of'),
        ({"prompt": "a", "chosen": "b"}, r'keys prompt, chosen in .*; write it as {"messages": \[{"role": "user"'),
        ([1], 'expected an object with "messages", found a list in line 2 of'),
        ({"messages": talk("a", "b", system="c"), "system": "Be brief."}, "found system beside another in line 2"),
        (
            {"messages": [SYSTEM, SYSTEM, *talk("a", "b")]},
            "expected the system's message once, before the others, found it as message 2 in line 2 of .*; take it out",
        ),
        ({"messages": [*talk("a", "b"), SYSTEM]}, "before the others, found it as message 3 in line 2 of"),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "system", "value": "c"}, ANSWER]},
            "before the others, found it as message 2 in line 2 of",
        ),
        ({"prompt": [GOOD, SYSTEM], "completion": [ANSWER]}, "before the others, found it as message 2 in line 2 of"),
        ({"messages": talk("a", "b"), "chat_template_kwargs": {"a": 1}}, "messages alone, found chat_template_kwargs"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "found also history in line 2"),
        (
            {"prompt": talk("a", "b", "c"), "completion": talk("d")},
            "expected a prompt without answers, found one in line 2",
        ),
        ({"messages": [], "functions": [1]}, "without tools"),
        ({"messages": [{"role": "assistant", "content": "a", "train": False}]}, "all trained, found train false"),
        ({"messages": []}, r"expected a list of messages, found \[\] in line 2"),
        ({"messages": [GOOD]}, "expected a message of the assistant, found none in line 2"),
        ({"messages": [GOOD, "b"]}, "found a str as message 2 in line 2"),
        ({"messages": [{"role": "user"}]}, "expected a role and a content of text, found {'role': 'user'} as message 1"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "expected a role and a content of text"),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "expected a role system, user, assistant, found 'tool' as message 1",
        ),
        ({"messages": [GOOD, {"role": "assistant", "content": " \n"}]}, "found an empty message 2 in line 2"),
        ({"messages": [GOOD, {"role": "assistant", "content": "b", "tool_calls": [1]}]}, "found tool_calls as message 2"),
        (
            {"messages": [GOOD, {"role": "assistant", "content": "b", "reasoning_content": "c"}]},
            "found reasoning_content as",
        ),
        (
            {"messages": [GOOD, {"role": "assistant", "content": None, "function_call": {"name": "f"}}]},
            "found function_call as message 2",
        ),
        ({"messages": [{"role": "user", "content": None}]}, "expected a role and a content of text, found {'role'"),
        ({"messages": None}, 'expected an object with "messages"'),
        (
            {"messages": [GOOD, {"role": "assistant", "content": "b", "weight": 0}]},
            "expected weight 1, found 0 as message 2",
        ),
        ({"messages": talk("a", "b"), "tools": [{"type": "function"}]}, "expected conversations without tools, found some"),
        (
            {"messages": [GOOD, {"role": "assistant", "content": "\ud800"}]},
            "found a lone surrogate .* in message 2 in line 2",
        ),
        (
            {"messages": [GOOD, {"role": "assistant", "content": "\ufdd0"}]},
            r"line 2 of .*noncharacter U\+FDD0 in message 2",
        ),
    ],
)
def test_a_line_that_is_no_conversation(tmp_path, row, message):
    model = write_folder(made_tokenizer(CHATML), tmp_path / "model")
    path = write(tmp_path / "chat.jsonl", [{"messages": talk("a", "b")}, row])
    with pytest.raises(DataError, match=message) as raised:
        prepare(PrepareOptions(str(path), tmp_path / "out", str(model), chat=True, workers=1))
    assert "\n" not in str(raised.value) and "chat.jsonl" in str(raised.value)


def test_null_is_absent_and_weights_are_of_answers():
    """Writers of a fixed form give every key; what others leave untrained on a user's message is so here by itself."""
    nulls = dict.fromkeys((*NOT_TEXT, *UNTRAINED, "weight", "name", "refusal", "audio", "from", "value"))
    beside = dict.fromkeys(("tools", "functions", "system", "chat_template_kwargs", "conversations"))
    said = (("system", "s"), ("user", "a"), ("assistant", "b"))
    openai = {"messages": [{"role": role, "content": content} | nulls for role, content in said]} | beside
    assert messages_of(openai, "line 1") == said
    sharegpt = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    nulls = dict.fromkeys(("weight", "role", "content", "train"))
    assert messages_of({"messages": None, "conversations": [nulls | turn for turn in sharegpt]}, "line 1") == said[1:]
    empty = [{"role": role, "content": content, "tool_calls": [], "function_call": {}} for role, content in said]
    assert messages_of({"messages": empty}, "line 1") == said, "nor is an empty list of calls"
    user, answer = {"role": "user", "content": "a", "train": False, "weight": 0}, {"role": "assistant", "content": "b"}
    assert messages_of({"messages": [user, answer | {"weight": 1.0, "train": True}]}, "line 1") == said[1:]


def test_a_template_that_does_not_serve_names_the_line(tmp_path):
    model = write_folder(made_tokenizer(TEMPLATES["trims"]), tmp_path / "model")
    path = write(tmp_path / "chat.jsonl", [{"messages": talk("a", "b")}, {"messages": talk("a", "b", system="c")}])
    with pytest.raises(DataError, match=r"line 2 of .*chat\.jsonl: .*found No place for system"):
        prepare(PrepareOptions(str(path), tmp_path / "out", str(model), chat=True, workers=1))


def test_what_is_no_source_of_conversations(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    for given in (str(tmp_path / "a.txt"), "stories", "tinystories"):
        with pytest.raises(UsageError, match=r"expected (\.jsonl, \.json or \.parquet files|conversations) with --chat"):
            prepare(PrepareOptions(given, tmp_path / "out", chat=True))


def test_the_command(tmp_path, source, capsys):
    assert main(["prepare", "--chat", str(source), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]) == 0
    printed = capsys.readouterr().out
    split = open_dataset(tmp_path / "out").manifest["splits"]["train"]
    assert f"{split['tokens']} tokens in 57 conversations, {split['trained_tokens']} of them trained (" in printed
