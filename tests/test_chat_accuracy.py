"""From questions to answers: a model that has seen a few questions often, packed and masked, answers them."""

from dataclasses import replace
from pathlib import Path

from benchmarks.chat_accuracy import CONFIG, accuracy, answers, learn, questions
from handgrad.api.model import load
from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.data.questions import NAMES, conversation, known_answer
from handgrad.settings.config import check

TINY = replace(
    CONFIG,
    architecture="llama",
    llama="kv_heads=1",
    techniques="",
    num_layers=2,
    num_heads=2,
    channels=64,
    sequence_length=96,
    tokens_per_step=768,
    micro_batch=8,
    steps=70,
    warmup_steps=10,
    learning_rate=1e-2,
    eval_every=0,
    eval_tokens=96,
)


def test_what_was_trained_is_answered(tmp_path: Path) -> None:
    config = check(replace(TINY, data=str(tmp_path / "questions"), out=str(tmp_path / "run")))
    options = PrepareOptions("questions", Path(config.data), "bytes", documents=14, validation_fraction=0.2, workers=1)
    dataset = prepare(options).dataset
    figures = learn(config, asked=3)
    assert 0 < figures["trained_tokens"] < config.steps * config.tokens_per_step / 2
    assert 'packing = "whole"' in (tmp_path / "run" / "config.toml").read_text()
    text = dataset.tokenizer.decode(dataset.splits["train"][0].tokens)
    first = [conversation(0, number, held_out=False)[0][1] for number in range(14)]
    asked = [[{"role": "user", "content": question}] for question in first if f"\n{question}<" in text]
    given = answers(load(config.out, device="cpu"), asked)
    right, every = accuracy(asked, given)["all"]
    assert every >= 8 and right >= 0.9 * every, list(zip(asked, given, strict=True))


def test_the_share_of_right_answers() -> None:
    asked = questions(60)
    assert len(asked) == 60 and all(messages[-1]["role"] == "user" for messages in asked)
    assert {len(messages) for messages in asked} == {1, 3, 5}
    right = [known_answer(messages) or "" for messages in asked]
    found = accuracy(asked, [*right[:40], *(text + "." for text in right[40:])])
    assert [*found] == [*NAMES, "all"] and found["all"] == [40, 60]
    assert sum(every for _, every in found.values()) == 120
