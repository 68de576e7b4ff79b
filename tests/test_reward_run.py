"""The benchmark of rewards on a GPU: its questions, its curves, a training at its time limit."""

import json
from pathlib import Path

import pytest

from benchmarks.reward_run import KINDS, TRIAL, Phases, curves, gather, questions
from handgrad.data.prompts import asked_questions
from handgrad.data.questions import is_held_out, kind_of

pytestmark = pytest.mark.nightly  # of a measuring script: nothing that the package promises rests on it


def test_the_questions_are_held_out() -> None:
    asked = questions(3, 400, held_out=True)
    assert {kind_of(messages) for messages in asked} == {*KINDS} and len(asked) == 400
    trained = {
        str(row["messages"]) for split, _, row in asked_questions(f"questions:{'+'.join(KINDS)}") if split == "train"
    }
    assert all(is_held_out([m["content"] for m in messages if m["role"] == "user"]) for messages in asked)
    assert not trained & {*map(str, asked)}


def test_the_curves_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        'steps = 2\ntokens_per_step = 64\nsequence_length = 16\nrollouts = 2\nprecision = "bf16"\n'
    )
    rollouts = {"answer_tokens": 3.0, "entropy": 1.0, "unended": 0.0, "equal_groups": 0.5, "passes": 1, "difference": 0.0}
    lines = [{"kind": "validation", "step": 0, "loss": -0.5, "reward": 0.5, "stderr": 0.1, "kl": 0.0}]
    for step in (1, 2):
        figures = {"sampling_seconds": 0.5, "seconds": 0.75, "reward": step / 4, **rollouts}
        lines += [{"kind": "step", "step": step, "step_ms": 1000.0}, {"kind": "rollouts", "step": step, **figures}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures = curves(tmp_path)
    medians = {"answers_per_second": 8.0, "answer_tokens_per_second": 24.0, "update_tokens_per_second": 256.0}
    assert figures["medians"] == {**medians, "share_sampling": 0.5, "seconds_of_a_step": 1.0, "passes": 1}
    assert figures["curve"][0][:2] == [1, 0.25] and figures["validation"] == [[0, 0.5, 0.1, 0.0]]
    assert figures["completed"] == 2 and figures["largest_difference"] == 0


def test_a_training_saves_at_its_time_limit(tmp_path: Path) -> None:
    phases = Phases(TRIAL, tmp_path, tmp_path, "cpu", 300)
    assert 0 < gather(300_000, tmp_path / "text") <= 300_000
    phases.run("text", f"handgrad prepare {tmp_path}/text --tokenizer bytes --out {tmp_path}/books", 60)
    rest = "--save-every 0 --sample-tokens 0 --eval-every 0 --device cpu"
    phases.run("base", f"handgrad train tiny --steps 100000 --data {tmp_path}/books --out {tmp_path}/base {rest}", 15)
    assert len([*(tmp_path / "base" / "checkpoints").glob("step_*")]) == 1
    phases.add("missing", lambda: curves(tmp_path / "missing"))
    record = json.loads((tmp_path / "cpu-reward-m12.json").read_text())["figures"]
    assert record["phases"]["text"]["exit_code"] == 0 and record["phases"]["base"]["exit_code"] == 75
    assert "FileNotFoundError" in record["missing"]["error"]
