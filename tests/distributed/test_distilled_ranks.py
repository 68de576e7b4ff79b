"""Runs that learn from a teacher: the same bits on any number of ranks."""

from dataclasses import replace
from pathlib import Path

from handgrad.run.open import train
from tests.conftest import small_run
from tests.distributed.runs import Launcher, arguments, same_run


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
