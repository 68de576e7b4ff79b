"""Training on rewards with a text that ends an answer."""

import json
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from handgrad.cli import main
from handgrad.data.tokenizer import bytes_tokenizer
from handgrad.generation.generate import StopText
from handgrad.generation.rollouts import ExactSampler, Rollout
from handgrad.run.open import open_run, train
from handgrad.settings.config import RunConfig
from tests.test_rewards import base, folder, rewarded  # noqa: F401 (fixtures)
from tests.test_runs import records, same_bits


def test_a_text_ends_an_answer() -> None:
    stop, none = (StopText(bytes_tokenizer(), text) for text in ("né", ""))
    answer = list("ane né".encode())
    assert [stop.ends(answer[:n]) for n in range(len(answer) + 1)] == [False] * len(answer) + [True]
    assert stop.before("ane né!") == "ane " and stop.before("ane") == "ane"
    assert not none.ends(answer) and none.before("ane") == "ane"


def test_answers_end_at_the_text(base: RunConfig, folder: Path, tmp_path: Path) -> None:  # noqa: F811
    """The answers are those without a stop, up to it, with the same log-probabilities, whatever the drafts; their text
    lacks it."""
    stop, texts = "", list[list[Rollout]]()
    for name in ("whole", "stopped", "drafts"):
        with open_run(rewarded(base, folder, tmp_path / name, answer_stop=stop)) as run:
            source: Any = run.rollouts
            if name == "drafts":

                def nonsense(self: ExactSampler, rollouts: list[Rollout], most: int) -> None:
                    for rollout in rollouts:
                        while not self.is_complete(rollout, most):
                            rollout.answer.append(ord("x"))

                source.sampler.draft = nonsense.__get__(source.sampler)
            source.before_step(0)
            texts.append(source.block(0).rollouts)
            if name == "whole":  # the letter that most answers have
                answers = [bytes(one.answer[:-1]).decode("ascii", "ignore") for one in texts[0]]
                stop = max(string.ascii_letters, key=lambda letter: sum(letter in answer for answer in answers))
            else:
                assert 0 < source.block(0).figures["unended"] < 1
                lines = map(json.loads, (tmp_path / name / "rollouts" / "step_00000000.jsonl").read_text().splitlines())
                assert not any(stop in line["text"] for line in lines)
    cut = [one.answer.index(ord(stop)) + 1 if ord(stop) in one.answer else len(one.answer) for one in texts[0]]
    assert sum(n < len(one.answer) for one, n in zip(texts[0], cut, strict=True)) > 1
    for found in texts[1:]:
        assert [one.answer for one in found] == [one.answer[:n] for one, n in zip(texts[0], cut, strict=True)]
        whole = [one.losses[:n] for one, n in zip(texts[0], cut, strict=True)]
        assert [loss for one in found for loss in one.losses] == pytest.approx([loss for one in whole for loss in one])


def test_a_run_and_its_evaluation_stop(
    base: RunConfig,  # noqa: F811
    folder: Path,  # noqa: F811
    tmp_path: Path,
    capsys: Any,
) -> None:
    """A run learns to write the letter e, twice of which ends an answer. It may stop between two updates."""
    config = rewarded(base, folder, tmp_path / "run", answer_stop="ee", updates=2, steps=20, learning_rate=2e-2)
    train(config)
    with open_run(replace(config, out=str(tmp_path / "stopped"), save_every=3)) as run:
        run.begin()
        run.advance(3)
    train(replace(config, out=str(tmp_path / "stopped"), save_every=3))
    same_bits(Path(config.out), tmp_path / "stopped", 20)
    assert "answers of up to 12 tokens, or up to 'ee', a sampling" in (tmp_path / "run" / "log.txt").read_text()
    assert records(config.out, ("validation",))[-1]["answer_tokens"] == 2
    capsys.readouterr()
    assert main(["evaluate", config.out, "--reward", config.reward]) == 0
    said = capsys.readouterr().out
    assert "reward            0.0000" in said and "2.0 tokens, 100.0% of them ended" in said
