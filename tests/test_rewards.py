"""Training on rewards: its gradient beside autograd's, exact rollouts, rewards in processes, runs."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import handgrad
from handgrad.cli import main
from handgrad.data.prompts import asked, open_prompts, prompts_of
from handgrad.errors import AuditError, ConfigError, DataError, NumericsError, UsageError
from handgrad.evaluation import rewards
from handgrad.evaluation.answers import Answers
from handgrad.evaluation.load import machine
from handgrad.generation import rollouts as sampling
from handgrad.generation.rollouts import ExactSampler, Rollout
from handgrad.interop.sources import open_weights
from handgrad.joins import policy
from handgrad.joins.parallel.ranks import Ranks
from handgrad.reports import reading
from handgrad.run.loop import Run
from handgrad.run.open import open_run, train
from handgrad.run.rollouts import Rollouts
from handgrad.settings.config import RunConfig, read_toml
from tests.conftest import small_run, train_in_two
from tests.test_operations import close, randn
from tests.test_runs import records, same_bits

LENGTH = 48
ROWS = [{"prompt": f"{word} {n}?", "answer": word} for word in ("up", "on", "so") for n in range(40)]
REWARD = """
def share(row, answer):
    "The share of e among the letters, and a little for an end."
    return answer.count("e") / max(1, len(answer))


def has_e(row, answer):
    return float("e" in answer)
"""


@pytest.fixture(scope="module")
def base(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A model of bytes, barely trained."""
    config = replace(small_run(shards, tmp_path_factory.mktemp("base") / "run"), sequence_length=LENGTH, sample_tokens=0)
    config = replace(config, tokens_per_step=8 * LENGTH)
    train(replace(config, steps=6, eval_every=0))
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (folder / "reward.py").write_text(REWARD)
    return folder


def rewarded(base: RunConfig, folder: Path, out: Path, **settings: object) -> RunConfig:
    more = {
        "objective": "reward",
        "reward": f"{folder / 'reward.py'}:share",
        "data": str(folder / "rows.jsonl"),
        "init_from": base.out,
        "rollouts": 4,
        "answer_tokens": 12,
        "steps": 6,
        "tokens_per_step": 16 * LENGTH,
        "micro_batch": 4,
        "eval_every": 3,
        "learning_rate": 3e-3,
        "warmup_steps": 0,
    }
    return replace(base, out=str(out), **{**more, **settings})


# The gradient.


@pytest.mark.parametrize("clip", [0.05, 0.2])
def test_the_weights_are_the_objectives_gradient(clip: float) -> None:
    """PPO's clipped objective through autograd, for tokens on both sides of the clip."""
    N = 64
    losses, sampled = randn(N).abs().requires_grad_(), randn(N, seed=2).abs()
    advantages = randn(N, seed=3)
    ratio = torch.exp(sampled - losses)
    clipped = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    (-clipped.sum()).backward()
    assert losses.grad is not None and 0 < (losses.grad == 0).sum() < N
    weights = torch.empty(N, dtype=torch.float64)
    policy.weigh(weights, losses.detach(), advantages, sampled, torch.full((1,), 4.0, dtype=torch.float64), clip)
    close(weights, 4 * losses.grad)


# Prompts.


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"text": "a"}, "expected a prompt, found the keys text in row 1"),
        ({"prompt": ""}, "expected a prompt, found an empty message 1 in row 1; take the row out"),
        ({"prompt": []}, "expected a prompt, found the keys prompt in row 1"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "ends with the user's message, found the assistant's"),
    ],
)
def test_a_row_without_a_prompt(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        asked(row, "row 1")


def test_prompts_of_rows_and_of_questions(base: RunConfig, folder: Path) -> None:
    dataset = open_prompts(str(folder / "rows.jsonl"), base.out)
    (train_split,), (held_out,) = prompts_of(dataset, "train"), prompts_of(dataset, "validation")
    assert len(train_split.rows) + len(held_out.rows) == len(ROWS) and len(held_out.rows) >= 1
    assert str(train_split.rows[0]["prompt"]) in dataset.tokenizer.decode(train_split.prompts[0])
    assert train_split.rows[0]["answer"] in ("up", "on", "so")
    count = len(train_split.rows)
    for epoch in range(2):
        groups = [train_split.of_group(g, 7) for g in range(epoch * count, (epoch + 1) * count)]
        assert sorted(groups) == list(range(count)) != groups
    built_in = open_prompts("questions:edge+count", base.out)
    (shard,) = prompts_of(built_in, "train")
    assert {row["kind"] for row in shard.rows} == {"edge", "count"}
    assert rewards.right(shard.rows[0], "no") == 0.0
    with pytest.raises(UsageError, match="kind of question"):
        open_prompts("questions:rhymes", base.out)
    assert built_in.identity != dataset.identity == open_prompts(str(folder / "rows.jsonl"), base.out).identity


# Exact rollouts.


def test_answers_do_not_depend_on_the_drafts(base: RunConfig, folder: Path, tmp_path: Path) -> None:
    """Drafts of nonsense, and none at all, lead to the same answers and log-probabilities: the training forward's."""
    answers = []
    for name, draft in {"good": None, "wrong": 7, "none": -1}.items():
        with open_run(rewarded(base, folder, tmp_path / name)) as run:
            source = run.rollouts
            assert isinstance(run, Run) and isinstance(source, Rollouts)
            if draft is not None:

                def nonsense(self: ExactSampler, rollouts: list[Rollout], most: int, token: int = draft) -> None:
                    for rollout in rollouts:
                        rollout.answer = [*rollout.answer, *[token] * (most - len(rollout.answer) if token > 0 else 1)]

                source.sampler.draft = nonsense.__get__(source.sampler)  # type: ignore[method-assign]
            source.before_step(0)
            block = source.block(0)
            answers.append([(one.answer, one.losses) for one in block.rollouts])
            for first in range(0, 16, 4):
                group, advantages = block.rewards[first : first + 4], block.advantages[first : first + 4]
                assert advantages == pytest.approx([reward - sum(group) / 4 for reward in group])
                assert len({tuple(one.answer) for one in block.rollouts[first : first + 4]}) > 1
            assert block.figures["passes"] == 1 if draft is None else block.figures["passes"] > 1
    assert answers[0] == answers[1] == answers[2]
    assert all(len(losses) == len(answer) <= 12 for answer, losses in answers[0]) and len(answers[0]) == 16


def test_sampled_tokens_have_the_models_probabilities(base: RunConfig, folder: Path, tmp_path: Path) -> None:
    """The losses are -log p of a plain forward, and the first tokens of many seeds have about these frequencies."""
    with open_run(rewarded(base, folder, tmp_path / "run")) as run:
        assert run.rollouts is not None
        sampler, prompt = run.rollouts.sampler, run.rollouts.prompts.prompts[0]
        many = [Rollout(list(prompt), seed) for seed in range(400)]
        sampler.answer([many[first : first + 4] for first in range(0, 400, 4)], 1)
        chances = {one.answer[0]: math.exp(-one.losses[0]) for one in many}
        likely = max(chances, key=chances.__getitem__)
        share, p = sum(one.answer[0] == likely for one in many) / 400, chances[likely]
        assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / 400)
        assert sum(chances.values()) <= 1 + 1e-4 and len(chances) > 5


def test_a_model_that_has_diverged_gives_no_answers() -> None:
    rollout = Rollout([1], 0, answer=[5])
    with pytest.raises(NumericsError, match="logits are not finite while it answers"):
        sampling.accept(rollout, [-1], [0.0])


# Runs.


def test_a_run_learns_what_earns_a_reward(base: RunConfig, folder: Path, tmp_path: Path) -> None:
    train(rewarded(base, folder, tmp_path / "run", steps=40, eval_every=40, learning_rate=1e-2))
    lines = records(tmp_path / "run", ("rollouts",))
    earned = [line["reward"] for line in lines]
    assert sum(earned[-5:]) > sum(earned[:5]) + 1.0, earned
    assert all(line["difference"] == 0 for line in lines) and [line["step"] for line in lines] == list(range(1, 41))
    before, after = records(tmp_path / "run", ("validation",))
    assert after["reward"] > before["reward"] and after["loss"] == -after["reward"]
    sampled = (tmp_path / "run" / "rollouts" / "step_00000039.jsonl").read_text().splitlines()
    assert len(sampled) == 16 and json.loads(sampled[0])["text"].count("e") > 0
    step = records(tmp_path / "run", ("step",))[0]
    assert step["trained_tokens"] == round(lines[0]["answer_tokens"] * 16)
    assert step["loss"] == pytest.approx(lines[0]["entropy"], rel=1e-5)


def test_a_micro_batch_whose_groups_are_equal_needs_no_pass(
    base: RunConfig, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the pass and without it: the same weights, losses, norms and log."""
    settings = {"reward": f"{folder / 'reward.py'}:has_e", "rollouts": 2, "micro_batch": 2, "steps": 4}
    passed, skipping = (rewarded(base, folder, tmp_path / name, **settings) for name in ("passed", "skipping"))
    answers, decide = list[bool](), Rollouts.has_gradient
    monkeypatch.setattr(Rollouts, "has_gradient", lambda *at: answers.append(decide(*at)) or answers[-1])
    train(skipping)
    assert len(answers) == 4 * 8 and 0 < sum(answers) < len(answers)
    monkeypatch.setattr(Rollouts, "has_gradient", lambda *at: True)
    train(passed)
    same_bits(Path(passed.out), Path(skipping.out), 4)


@pytest.mark.nightly(but=["3-", "1-rank=8,alpha=16"])
@pytest.mark.parametrize(("updates", "lora"), [(1, ""), (3, ""), (1, "rank=8,alpha=16")])
def test_a_stopped_run_ends_at_the_same_bits(
    updates: int, lora: str, base: RunConfig, folder: Path, tmp_path: Path
) -> None:
    """Also between two updates on the same rollouts, which lie in the run's folder."""
    settings = {"updates": updates, "lora": lora, "save_every": 2}
    whole, stopped = (rewarded(base, folder, tmp_path / name, **settings) for name in ("whole", "stopped"))
    train(whole)
    train_in_two(stopped, 4)
    same_bits(Path(whole.out), Path(stopped.out), 6)
    assert records(whole.out, ("rollouts",))[-1]["reward"] == records(stopped.out, ("rollouts",))[-1]["reward"]


def test_rollouts_between_updates_must_be_there(base: RunConfig, folder: Path, tmp_path: Path) -> None:
    config = rewarded(base, folder, tmp_path / "run", updates=4)
    with open_run(config) as run:
        run.begin()
        run.advance(2)
        run.save()
    (path,) = (tmp_path / "run" / "rollouts").iterdir()
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]) + '{"prompt": 1')
    with pytest.raises(DataError, match="expected the 16 rollouts of the step in progress, found 0 in"):
        train(config)


def test_a_replay_finds_other_rewards(base: RunConfig, folder: Path, tmp_path: Path, capsys: Any) -> None:
    """A function that gives other bits twice, and one that was replaced. No code runs that the user has not named."""
    (tmp_path / "own.py").write_text(
        "import pathlib\n\ndef mine(row, answer):\n    return len(answer) + pathlib.Path(__file__ + '.more').exists()\n"
    )
    config = rewarded(base, folder, tmp_path / "run", reward=f"{tmp_path / 'own.py'}:mine", audit_every=1, steps=3)
    train(config)
    capsys.readouterr()
    own = {"reward": config.reward}
    assert main(["verify", config.out]) == 64 and "code that runs only if you name it" in capsys.readouterr().err
    assert main(["evaluate", config.out]) == 64 and f"--reward {config.reward}" in capsys.readouterr().err
    assert main(["verify", config.out, "--reward", config.reward]) == 0
    path = min(Path(config.out, "rollouts").iterdir())
    whole = path.read_text()
    path.write_text(whole.replace('"reward": ', '"reward": 1', 1))
    assert main(["verify", config.out, "--reward", config.reward]) == 77
    assert f"{path} was changed: the replay has other answers or rewards" in capsys.readouterr().err
    path.write_text(whole)
    (tmp_path / "own.py.more").touch()
    from handgrad.tools.record import open_record
    from handgrad.tools.verify import replay, spans_of

    record = open_record(Path(config.out), None)
    (tmp_path / "scratch").mkdir()
    with pytest.raises(AuditError, match="equal answers were given other rewards"):
        replay(record, spans_of(record, None, None, 0, 0)[0], own, tmp_path / "scratch", writes=True)
    (tmp_path / "own.py").write_text("def mine(row, answer):\n    return 0\n")
    capsys.readouterr()
    assert main(["verify", config.out, "--reward", config.reward]) == 65
    told = capsys.readouterr().err
    assert "trained on reward " in told and told.count(":mine") == 3 and "; give --reward with the run's function" in told
    with pytest.raises(ConfigError, match=r"has learnt from another function than .*own.py:mine holds now; restore it"):
        train(config)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"init_from": ""}, "objective reward needs init_from: the model that answers first, found ''"),
        ({"reward": ""}, "objective reward needs reward: a name or FILE.py:FUNCTION, found ''"),
        ({"objective": "tokens"}, "objective tokens needs reward: none; answers are rewarded by objective reward, found"),
        ({"dropout": 0.1}, "needs dropout: 0, found 0.1"),
        ({"rollouts": 3}, r"needs tokens_per_step: a multiple of rollouts \* sequence_length, found 768"),
        ({"batch_schedule": "3:1536"}, "needs batch_schedule: one size for all steps, found '3:1536'"),
        (
            {"answer_tokens": 40},
            r"expected prompts and answers of at most 49 tokens, found a prompt of \d+ and answers of up",
        ),
    ],
)
def test_a_run_refuses(settings: dict, problem: str, base: RunConfig, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=problem), open_run(rewarded(base, folder, tmp_path / "run", **settings)):
        pass


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["tiny"], "a reward improves a model that answers already, found none; name it: --init-from RUN"),
        ([], "a reward improves a model that answers already, found none; name it: --init-from RUN"),
        (["--init-from", "{base}", "--data", "{shards}"], "expected prompts in .jsonl files, found shards in"),
    ],
)
def test_what_a_reward_lacks_is_said_first(
    arguments: list[str], problem: str, base: RunConfig, folder: Path, shards: Path, tmp_path: Path, capsys: Any
) -> None:
    more = [argument.format(base=base.out, shards=shards) for argument in arguments]
    data = ["--data", str(folder / "rows.jsonl")]
    assert main(["train", *data, "--reward", "exact", "--out", str(tmp_path / "run"), "--device", "cpu", *more]) == 64
    assert problem in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_the_command_chooses_the_rest(base: RunConfig, folder: Path, tmp_path: Path, capsys: Any) -> None:
    """Rows hold the longest prompt and an answer; the header, the report and the plan speak of rollouts."""
    out = tmp_path / "run"
    asked_for = ["--reward", "exact", "--data", str(folder / "rows.jsonl"), "--init-from", base.out]
    assert main(["train", *asked_for, "--steps", "2", "--answer-tokens", "8", "--out", str(out)]) == 0
    settings = read_toml(str(out / "config.toml"))
    assert settings["sequence_length"] == 32 and settings["answer_tokens"] == 8
    assert settings["tokens_per_step"] == 64 * 32 and settings["learning_rate"] == pytest.approx(base.learning_rate / 20)
    log = (out / "log.txt").read_text()
    assert "objective  reward exact: 8 prompts x 8 answers of up to 8 tokens a sampling" in log and "generation " in log
    assert "held-out prompts" in log and " (reward 0)" in log and re.search(r"^step 2/2 .* \| reward 0\.0000 \|", log, re.M)
    assert main(["report", str(out)]) == 0
    page = (out / "report.html").read_text()
    assert "Tokens per answer" in page and "on held-out prompts" in page and "Perplexity" not in page
    assert "KL divergence from the start" in page and "times the training data" not in page
    assert reading.read_run(out, "run").rollouts.step.tolist() == [1, 2]
    capsys.readouterr()
    assert main(["plan", *asked_for]) == 0
    told = capsys.readouterr().out
    assert "generation" in told and "rollouts   each step samples its answers first" in told
    assert main(["runs", str(tmp_path)]) == 0 and "reward 0.0000" in capsys.readouterr().out
    with pytest.raises(UsageError, match="the model knows no data"):  # prompts have no loss
        handgrad.evaluate(str(out))


def test_evaluations_ask_for_answers(base: RunConfig, folder: Path, tmp_path: Path, capsys: Any) -> None:
    """A run's own held-out prompts, or all prompts of a file; in Python a function is the reward."""
    config = rewarded(base, folder, tmp_path / "run", steps=2, eval_every=0)
    with handgrad.Training(config, reward=lambda row, answer: 0.25) as training:
        training.steps()
    last = records(tmp_path / "run", ("validation",))[-1]
    assert last["reward"] == 0.25 and 'reward = "python:' in (tmp_path / "run" / "config.toml").read_text()
    with pytest.raises(UsageError, match=r"was started with the function python:.*; give it again"):
        rewards.load("python:mine")
    capsys.readouterr()
    asked_for = ["evaluate", str(tmp_path / "run"), "--reward", "exact", "--answer-tokens", "8"]
    assert main(asked_for) == 0
    held_out = int(capsys.readouterr().out.split("prompts")[1].split()[0])
    assert main([*asked_for, "--data", str(folder / "rows.jsonl")]) == 0
    said = capsys.readouterr().out
    assert f"prompts           {len(ROWS)} in" in said and "reward            0.0000 ± 0.0000 (exact)" in said
    assert held_out == last["prompts"] < len(ROWS)
    (said_first,) = re.findall(r"-> (.).* \(reward 0\.25\)", (tmp_path / "run" / "log.txt").read_text())[:1]
    assert main([*asked_for, "--data", str(folder / "rows.jsonl"), "--answer-stop", said_first]) == 0
    lengths = [float(out.split("answers           ")[1].split()[0]) for out in (said, capsys.readouterr().out)]
    assert lengths[1] < lengths[0]
    (tmp_path / "few.jsonl").write_text(json.dumps({"prompt": "up 2?"}))
    source, machine_here = open_weights(base.out), machine(torch.device("cpu"), "fp32", "auto")
    lonely = replace(source, config=replace(source.config, data=str(tmp_path / "few.jsonl")))
    with pytest.raises(UsageError, match=r"expected held-out prompts in .*few.jsonl, found none; give other prompts"):
        Answers(lonely, "", "exact", 8, None, source.shape, machine_here, Ranks())
