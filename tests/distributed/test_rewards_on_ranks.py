"""Runs on rewards: the same answers, rewards and bits on any number of ranks, also after kills."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from handgrad.run.open import train
from tests.conftest import small_run
from tests.distributed.runs import Launcher, arguments, same_run
from tests.test_rewards import LENGTH, REWARD, ROWS
from tests.test_runs import records


@pytest.mark.nightly(but=["4-1"])
@pytest.mark.parametrize(("ranks", "zero"), [(4, 1), (2, 0)])
def test_ranks_do_not_matter(ranks: int, zero: int, launcher: Launcher, shards: Path, tmp_path: Path) -> None:
    """Two samplings, each for two updates; the last prompts are validated before, between and behind them."""
    base = replace(small_run(shards, tmp_path / "base"), sequence_length=LENGTH, sample_tokens=0, steps=6, eval_every=0)
    train(replace(base, num_heads=2, channels=64, tokens_per_step=8 * LENGTH))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "own.py").write_text(REWARD)
    settings = {"sequence_length": LENGTH, "init_from": base.out, "objective": "reward", "rollouts": 4, "updates": 2}
    settings |= {
        "reward": f"{tmp_path / 'own.py'}:share",
        "answer_tokens": 12,
        "tokens_per_step": 16 * LENGTH,
        "steps": 4,
        "eval_every": 2,
    }
    for size, stage in ((1, 1), (ranks, zero)):
        out = tmp_path / str(size)
        launcher.run(size, arguments(tmp_path / "rows.jsonl", out, **settings, zero=stage))
    for kind in ("validation", "rollouts"):
        lines = [records(tmp_path / str(size), (kind,)) for size in (1, ranks)]
        for line in (line for each in lines for line in each):
            for name in ("seconds", "sampling_seconds", "passes"):  # of this machine; passes: of rank 0's rows
                line.pop(name, None)
        assert lines[0] == lines[1] and lines[0]
    same_run(tmp_path / "1", tmp_path / str(ranks), 4)
    for path in (tmp_path / "1" / "rollouts").iterdir():
        assert path.read_text() == (tmp_path / str(ranks) / "rollouts" / path.name).read_text()
