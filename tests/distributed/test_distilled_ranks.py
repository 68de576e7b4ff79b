"""Runs that learn from a teacher: the same bits on any number of ranks, on text and on the student's own answers."""

import json
from dataclasses import replace
from pathlib import Path

from handgrad.run.open import train
from tests.conftest import small_run
from tests.distributed.runs import Launcher, arguments, same_run
from tests.test_rewards import LENGTH, ROWS
from tests.test_runs import records


def test_ranks_do_not_matter(launcher: Launcher, shards: Path, tmp_path: Path) -> None:
    teacher = replace(
        small_run(shards, tmp_path / "teacher"), architecture="modern", sample_tokens=0, steps=6, eval_every=0
    )
    train(teacher)
    for ranks, zero, micro_batch in ((1, 1, 4), (2, 0, 4), (4, 2, 4)):
        settings = {"teacher": teacher.out, "zero": zero, "micro_batch": micro_batch}
        launcher.run(ranks, arguments(shards, tmp_path / str(ranks), **settings))
    for ranks in (2, 4):
        same_run(tmp_path / "1", tmp_path / str(ranks), 8)


def test_ranks_do_not_matter_on_own_answers(launcher: Launcher, shards: Path, tmp_path: Path) -> None:
    """Nor for the answers, their rewards and the divergence on held-out prompts."""
    base = replace(small_run(shards, tmp_path / "base"), sequence_length=LENGTH, sample_tokens=0, steps=6, eval_every=0)
    train(replace(base, num_heads=2, channels=64, tokens_per_step=8 * LENGTH))
    train(replace(base, out=str(tmp_path / "teacher"), architecture="modern", tokens_per_step=8 * LENGTH, steps=20))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    settings = {"sequence_length": LENGTH, "init_from": base.out, "teacher": tmp_path / "teacher", "reward": "exact"}
    settings |= {"objective": "distill", "rollouts": 4, "answer_tokens": 12, "tokens_per_step": 16 * LENGTH}
    for ranks, zero in ((1, 1), (2, 0), (4, 1)):
        launcher.run(ranks, arguments(tmp_path / "rows.jsonl", tmp_path / str(ranks), **settings, zero=zero))
    validations = [records(tmp_path / str(ranks), ("validation",)) for ranks in (1, 2, 4)]
    for line in (line for each in validations for line in each):
        line.pop("seconds", None)
    assert validations[0] == validations[1] == validations[2] and validations[0][0]["divergence"] > 0
    for ranks in (2, 4):
        same_run(tmp_path / "1", tmp_path / str(ranks), 8)
        for path in (tmp_path / "1" / "rollouts").iterdir():
            assert path.read_text() == (tmp_path / str(ranks) / "rollouts" / path.name).read_text()
