"""A finished run says what it was, and raises no false alarm."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from handgrad.cli import main
from handgrad.evaluation.outcome import Outcome, outcome_of
from handgrad.run.log import read_curves
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from tests.test_runs import records

UNIFORM = math.log(4096)
Curve = Callable[[float], float]  # loss at a fraction of the run


def judged(
    curve: Curve, steps: int, noise: float = 0.05, validation: Curve | None = None, seed: int = 0, **settings: object
) -> Outcome:
    draw = random.Random(seed)
    losses = [(step, curve((step - 1) / steps) + draw.gauss(0, noise)) for step in range(1, steps + 1)]
    every = max(1, steps // 10)
    validations = [(step, validation(step / steps)) for step in range(0, steps + 1, every) if step] if validation else []
    floor, saved = settings.pop("floor", None), settings.pop("saved", None)
    config = RunConfig(**{"steps": steps, "learning_rate": 3.0, "out": "runs/a"} | settings)  # type: ignore[arg-type]
    found = outcome_of(config, losses, validations, UNIFORM, floor, 3.2e-3, saved)  # type: ignore[arg-type]
    assert found is not None
    return found


def falling(last: float, power: float = 0.5, first: float = UNIFORM) -> Curve:
    """A power law from `first` to `last`, most of it early."""
    return lambda done: last + (first - last) * max(0.0, (1 + 400 * done) ** -power - 401**-power)


GOOD = {
    "a long run": (falling(3.3), 20_000, {"validation": falling(3.3)}),
    "the demo, at its source's entropy": (falling(0.49), 2500, {"validation": falling(0.475), "floor": 0.47}),
    "one batch, known by heart": (falling(0.001, 2), 400, {"validation": lambda done: 6 + done, "overfit_one_batch": True}),
    "a finetune of few steps": (lambda done: 2.4 - 0.1 * done, 8, {"noise": 0.6, "init_from": "gpt2"}),
    "a finetune of rows that differ": (lambda done: 1.4 - 0.1 * done, 60, {"noise": 0.8, "init_from": "gpt2"}),
    "a finetune that barely moves": (lambda done: 2.0, 300, {"noise": 0.3, "init_from": "gpt2"}),
    "noisy validation": (falling(3.3), 500, {"validation": lambda done: 3.3 + 0.03 * math.sin(40 * done)}),
    "one spike": (lambda done: falling(2.5)(done) + 5 * (0.5 < done < 0.505), 4000, {}),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", GOOD)
def test_no_false_alarm(name: str, seed: int) -> None:
    curve, steps, settings = GOOD[name]
    found = judged(curve, steps, seed=seed, **settings)
    assert found.kind == "reached" and not found.advice, found


def test_a_run_that_diverged() -> None:
    """At the end, in the middle, from the start of a finetune; with a rate that suits the model, in one digit."""
    early = judged(lambda done: 8.3 - 50 * done if done < 0.12 else 74, 100, noise=0.1)
    assert early.text == "diverged by step 12: the loss rose from 4.44 to 74", early
    assert early.advice == ("--learning-rate", "0.003")
    late = judged(lambda done: falling(2.5)(done) if done < 0.9 else 3.6, 5000)
    assert late.kind == "diverged" and "the loss rose from 2.5" in late.text and late.text.endswith(" to 3.6"), late
    back = judged(lambda done: 60.0 if 0.1 < done < 0.8 else 7.0, 400)
    assert back.kind == "diverged" and "to 60, and fell to 6.9" in back.text, back
    tuned = judged(lambda done: 2.0 + 9 * done, 40, noise=0.3, init_from="gpt2", learning_rate=2e-3)
    assert tuned.kind == "diverged" and tuned.advice == ("--learning-rate", "0.0006"), "a third of its own"


def test_a_run_that_learnt_nothing() -> None:
    """It goes on with more steps, or starts with a higher rate if its own is far below the usual one."""
    few = judged(lambda done: UNIFORM - 0.2 * done, 20, noise=0.01)
    assert few.kind == "learnt nothing" and few.advice == ("--steps", "200", "--allow-changes"), few
    assert few.text.startswith("learnt nothing: the loss fell by 0.2, from 8.3") and few.text.endswith(", in 20 steps")
    risen = judged(lambda done: UNIFORM + 0.2 * done, 20, noise=0.01)
    assert risen.text.startswith("learnt nothing: the loss rose by 0.17, from 8.3"), risen
    slow = judged(lambda done: UNIFORM - 0.2 * done, 2000, noise=0.01, learning_rate=1e-5)
    assert slow.advice == ("--learning-rate", "0.003")


def test_the_lowest_loss_is_named_if_it_was_earlier() -> None:
    turning: Curve = lambda done: 3.37 + 0.16 * abs(done - 0.7)  # noqa: E731
    found = judged(falling(3.3), 1000, validation=turning)
    assert found.text.startswith("reached validation loss 3.418") and found.text.endswith(
        " at the start, 3.3700 at step 700"
    )
    assert judged(falling(3.3), 1000, validation=falling(3.3)).text.endswith(" at the start")


def test_a_run_that_overfitted() -> None:
    rising: Curve = lambda done: 2.0 + (done - 0.4) ** 2  # noqa: E731
    found = judged(falling(0.9), 1000, validation=rising)
    assert found.text == "overfitted: the validation loss rose since step 400, from 2.0000 to 2.3600"
    assert found.advice == ("--keep-best",)
    kept = judged(falling(0.9), 1000, validation=rising, saved=(400, 2.0))
    assert kept.text.endswith("; runs/a/best is the checkpoint of step 400") and not kept.advice


def test_a_run_that_still_fell() -> None:
    for validation in (None, lambda done: 6 - 3 * done):
        found = judged(lambda done: 6 - 3 * done, 1000, validation=validation)
        assert found.kind == "still falling" and found.advice == ("--steps", "2000", "--allow-changes"), found


def test_the_result_stands_beside_the_next_command(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture, config: RunConfig
) -> None:
    """Once in the record and in `runs --json`; a run with no steps left says it again; a diverged run is not to be sampled.

    The advice, followed literally, works.
    """
    command = ["train", "tiny", "--data", str(shards), "--out", str(tmp_path / "run"), "--device", "cpu"]
    quick = ["--steps", "40", "--sample-tokens", "0", "--eval-tokens", "512", "--sequence-length", "32"]
    for _ in range(2):
        assert main([*command, *quick, "--learning-rate", "3"]) == 0
        *_, result, _, after = capsys.readouterr().out.splitlines()
        assert result.startswith("result     diverged by step ")
        advice = after.removeprefix("next       the same command with ").split()
        assert advice[0] == "--learning-rate" and advice[2:] == ["--out", str(tmp_path / "run-2")]
    (line,) = records(tmp_path / "run", ("result",))
    assert line["outcome"] == "diverged" and f"result     {line['text']}" == result
    assert main(["runs", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["outcome"] == "diverged"
    assert main(["runs", str(tmp_path)]) == 0
    assert f"finished run: {line['text']}" in capsys.readouterr().out
    assert main([*command, *quick, *advice]) == 0
    assert "diverged" not in capsys.readouterr().out


def test_a_resumed_run_is_judged_as_a_whole(config: RunConfig) -> None:
    train(replace(config, steps=6))
    train(config, allow_changes=True)
    train(replace(config, out=config.out + "-whole", steps=12))
    losses, validations = read_curves(Path(config.out))
    assert [step for step, _ in losses] == list(range(1, 13)) and [step for step, _ in validations] == [6, 12]
    assert records(Path(config.out), ("result",))[-1]["text"].endswith("at the start")
