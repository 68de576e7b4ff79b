"""Distillation on the student's own answers: its loss by both models' logits, exact rollouts, learning, runs."""

# ruff: noqa: F811 (fixtures)
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from handgrad.api.model import load
from handgrad.cli import main
from handgrad.data.batches import mix
from handgrad.data.prepare import prepare
from handgrad.data.prompts import open_prompts, prompts_of
from handgrad.data.recipe import PrepareOptions
from handgrad.errors import AuditError, ConfigError, DataError, NumericsError, UsageError
from handgrad.generation.rollouts import Rollout
from handgrad.run.loop import Run
from handgrad.run.open import open_run, train
from handgrad.run.rollouts import HELD_OUT
from handgrad.settings.config import RunConfig, check, read_toml
from tests.conftest import small_run, train_in_two
from tests.test_distill import divergence
from tests.test_rewards import LENGTH, base, folder, rewarded  # noqa: F401 (fixtures)
from tests.test_runs import records, same_bits


@pytest.fixture(scope="module")
def teacher(base: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A wider model with other positions, trained for longer than its student."""
    config = replace(base, out=str(tmp_path_factory.mktemp("teacher") / "run"), architecture="modern", num_heads=4)
    train(replace(config, channels=64, steps=60, eval_every=0, learning_rate=1e-2))
    return config.out


def taught(base: RunConfig, folder: Path, out: Path, by: str, **settings: object) -> RunConfig:
    more = {"objective": "distill", "teacher": by, "reward": "exact"}
    return rewarded(base, folder, out, **{**more, **settings})


def loss_of(config: RunConfig, student: str, rows: list[dict[str, Any]], *, reverse: bool, split: str = "train") -> float:
    """The mean divergence at the tokens of rollouts, by the models' logits."""
    (prompts,) = prompts_of(open_prompts(config.data, config.init_from), split)
    models, total, tokens = (load(student, device="cpu"), load(config.teacher, device="cpu")), 0.0, 0
    for row in rows:
        prompt = prompts.prompts[row["prompt"]]
        z, y = (model.logits([[*prompt, *row["answer"]]])[0, len(prompt) - 1 : -1].double() for model in models)
        total, tokens = total + divergence(z, y, reverse=reverse).sum().item(), tokens + len(row["answer"])
    return total / tokens


@pytest.mark.parametrize("named", ["auto", "forward"])
def test_the_loss_of_a_step(named: str, base: RunConfig, folder: Path, tmp_path: Path, teacher: str) -> None:
    """The divergence at all tokens of the step's answers, in reverse unless asked for; so is a validation's, at answers
    that were sampled too."""
    config = taught(base, folder, tmp_path / "run", teacher, steps=1, teacher_divergence=named, precision="fp32")
    train(config)
    lines = (tmp_path / "run" / "rollouts" / "step_00000000.jsonl").read_text().splitlines()
    expected = loss_of(config, base.out, [*map(json.loads, lines)], reverse=named == "auto")
    (step,) = records(config.out, ("step",))
    assert step["loss"] == pytest.approx(expected, rel=1e-4) and step["trained_tokens"] > 16
    assert read_toml(f"{config.out}/config.toml")["teacher_divergence"] == ("reverse" if named == "auto" else "forward")
    before, after = records(config.out, ("validation",))
    with open_run(replace(config, out=str(tmp_path / "other"))) as run:
        assert run.rollouts is not None
        (held_out,) = prompts_of(run.dataset, "validation")
        answers = [Rollout(prompt, mix(config.seed, HELD_OUT, row) >> 1) for row, prompt in enumerate(held_out.prompts)]
        run.rollouts.complete(run.rollouts.sampler, answers)
    asked = [{"prompt": row, "answer": one.answer} for row, one in enumerate(answers)]
    expected = loss_of(config, base.out, asked, reverse=named == "auto", split="validation")
    assert before["loss"] == before["divergence"] == pytest.approx(expected, rel=1e-4)
    assert before["prompts"] == len(answers) and "reward" in before
    assert (
        f"divergence {after['divergence']:.4f} from the teacher, reward 0.0000" in Path(config.out, "log.txt").read_text()
    )


def test_a_student_gets_nearer_to_its_teacher(base: RunConfig, folder: Path, tmp_path: Path, teacher: str) -> None:
    """On prompts that it never trained on; the sampler's log-probabilities are the trainer's in every step."""
    config = taught(base, folder, tmp_path / "run", teacher, steps=40, eval_every=20, learning_rate=1e-2)
    train(config)
    first, middle, last = (line["divergence"] for line in records(config.out, ("validation",)))
    assert last < middle < first / 2, (first, middle, last)
    assert all(line["difference"] == 0 for line in records(config.out, ("rollouts",)))
    assert main(["report", config.out]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"{last:.4f}" in page and "from the teacher" in page and "Perplexity" not in page


def test_another_log_probability_stops_the_run(base: RunConfig, folder: Path, tmp_path: Path, teacher: str) -> None:
    with open_run(taught(base, folder, tmp_path / "run", teacher)) as run:
        assert isinstance(run, Run) and run.rollouts is not None
        run.begin()
        run.rollouts.block(0).rollouts[3].losses[-1] += 1e-5
        with pytest.raises(NumericsError, match="expected the sampler's log-probabilities in training, found a difference"):
            run.advance(1)


@pytest.mark.parametrize("settings", [{}, {"updates": 3, "rollouts": 1}, {"lora": "rank=8,alpha=16"}], ids=str)
def test_a_stopped_run_ends_at_the_same_bits(
    settings: dict[str, Any], base: RunConfig, folder: Path, tmp_path: Path, teacher: str
) -> None:
    whole, stopped = (taught(base, folder, tmp_path / name, teacher, save_every=2, **settings) for name in ("a", "b"))
    train(whole)
    train_in_two(stopped, 4)
    same_bits(Path(whole.out), Path(stopped.out), 6)
    for kind in ("validation", "step"):
        ends = [records(out, (kind,))[-1]["loss"] for out in (whole.out, stopped.out)]
        assert ends[0] == ends[1]


def test_a_replay_samples_anew(base: RunConfig, folder: Path, tmp_path: Path, teacher: str, capsys: Any) -> None:
    """The chain holds the answers and the teacher's hash; a replay with another teacher or other answers fails."""
    config = taught(base, folder, tmp_path / "run", teacher, audit_every=1, steps=3)
    train(config)
    assert main(["verify", config.out]) == 0
    assert main(["verify", config.out, "--teacher", base.out]) == 65
    with pytest.raises(ConfigError, match=r"learns from a teacher with SHA-256 \w{12}, found \w{12} at"):
        train(replace(config, teacher=base.out))
    from handgrad.tools.record import open_record
    from handgrad.tools.verify import replay, spans_of

    record = open_record(Path(config.out), None)
    (tmp_path / "scratch").mkdir()
    lines = (
        (tmp_path / "run" / "audit.jsonl").read_text().splitlines() if (tmp_path / "run" / "audit.jsonl").is_file() else []
    )
    assert any('"tokens"' in line for line in lines) or not lines
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("handgrad.run.rollouts.DRAW", 77)
        with pytest.raises(AuditError, match="the model's answers before the step are others"):
            replay(record, spans_of(record, None, None, 0, 0)[0], {}, tmp_path / "scratch", writes=True)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"teacher": ""}, "objective distill needs teacher: the model to learn from, found ''"),
        ({"teacher": "", "objective": "auto", "reward": "none"}, "objective reward needs reward: a name or FILE.py"),
        ({"init_from": ""}, "objective distill needs init_from: the model that answers first, found ''"),
        ({"rollouts": 3}, r"objective distill needs tokens_per_step: a multiple of rollouts \* sequence_length, found 768"),
        ({"dropout": 0.1}, "needs dropout: 0, found 0.1"),
        ({"objective": "reward", "teacher": "", "rollouts": 1}, "objective reward needs rollouts: 2 or more, found 1"),
        ({"objective": "reward"}, "objective reward needs teacher: none; learning from one is objective distill"),
    ],
)
def test_a_run_refuses(
    settings: dict[str, Any], problem: str, base: RunConfig, folder: Path, tmp_path: Path, teacher: str
) -> None:
    with (
        pytest.raises(UsageError, match=problem),
        open_run(check(taught(base, folder, tmp_path / "run", teacher, **settings))),
    ):
        pass
    assert not (tmp_path / "run").exists()


def test_another_vocabulary_or_no_prompts(base: RunConfig, folder: Path, tmp_path: Path, teacher: str) -> None:
    (tmp_path / "text.txt").write_text("A few words, and then a few more words. " * 400)
    prepare(PrepareOptions(str(tmp_path / "text.txt"), tmp_path / "bpe", tokenizer="bpe:300"))
    other = replace(small_run(tmp_path / "bpe", tmp_path / "other"), sequence_length=LENGTH, sample_tokens=0, steps=1)
    train(replace(other, tokens_per_step=8 * LENGTH, eval_every=0))
    with pytest.raises(DataError, match=r"was trained with another tokenizer \(bpe, \d+ words\) than"):
        train(taught(base, folder, tmp_path / "run", other.out))
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(DataError, match=r"expected prompts in .*none\.jsonl, found none; write a row a line"):
        train(taught(base, folder, tmp_path / "run", teacher, data=str(tmp_path / "none.jsonl")))


def test_the_command_and_its_plan(base: RunConfig, folder: Path, tmp_path: Path, teacher: str, capsys: Any) -> None:
    """A teacher and a reward make the run; the plan holds the teacher and the rows of rollouts. Prompts need no answers."""
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": f"so {n}?"}) for n in range(160)))
    out = tmp_path / "run"
    words = ["--teacher", teacher, "--reward", "none", "--data", str(tmp_path / "rows.jsonl"), "--init-from", base.out]
    assert main(["train", *words, "--steps", "2", "--answer-tokens", "8", "--out", str(out)]) == 0
    log = (out / "log.txt").read_text()
    assert "objective  distill on own answers, reward none: 8 prompts x 8 answers of up to 8 tokens a sampling" in log
    assert "the training loss is KL(student || teacher)" in log and "from the teacher" in log
    capsys.readouterr()
    assert main(["plan", *words]) == 0
    said = capsys.readouterr().out
    assert "\n  teacher  " in said and "generation" in said
    with open_run(taught(base, folder, tmp_path / "other", teacher)) as run:
        held = {buffer.name for buffer in run.design.plan.buffers}
        assert {"own_losses", "sampled_losses", "teacher.parameters"} <= held and "advantages" not in held
        assert torch.isfinite(run.training.state.views["parameters"]).all()
