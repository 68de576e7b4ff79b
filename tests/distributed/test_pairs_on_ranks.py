"""Runs on pairs of answers: the same bits on any number of ranks, also of their validations."""

import json
from dataclasses import replace
from pathlib import Path

import handgrad
from handgrad.run.open import train
from tests.conftest import small_run
from tests.distributed.runs import Launcher, arguments, same_run
from tests.test_preference import LENGTH, PAIRS
from tests.test_runs import records


def test_ranks_do_not_matter(launcher: Launcher, shards: Path, tmp_path: Path) -> None:
    base = replace(small_run(shards, tmp_path / "base"), sequence_length=LENGTH, sample_tokens=0, steps=6, eval_every=0)
    train(replace(base, num_heads=2, channels=64))
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    handgrad.prepare(tmp_path / "pairs.jsonl", tmp_path / "pairs", preferences=True, reference=base.out)
    settings = {"sequence_length": LENGTH, "init_from": base.out, "eval_tokens": 1 << 20}
    for ranks, zero in ((1, 1), (2, 0), (4, 2)):
        out = tmp_path / str(ranks)
        launcher.run(ranks, arguments(tmp_path / "pairs", out, **settings, zero=zero))
    found = [records(tmp_path / str(ranks), ("validation",)) for ranks in (1, 2, 4)]
    assert found[0] == found[1] == found[2] and found[0][0]["accuracy"] <= 1
    for ranks in (2, 4):
        same_run(tmp_path / "1", tmp_path / str(ranks), 8)
