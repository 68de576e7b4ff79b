"""Tasks are shared by ranks and measured as by one: every likelihood is the same number."""

import json
import random
from pathlib import Path

from tests.distributed.runs import Launcher, arguments
from tests.test_runs import records
from tests.test_tasks import hellaswag_row


def test_every_rank_count_gives_the_same_numbers(launcher: Launcher, shards: Path, tmp_path: Path) -> None:
    """While it trains, on 1 and 4 ranks, and afterwards on 1, 2 and 4."""
    draw = random.Random(2)
    rows = [json.dumps(hellaswag_row(draw, words=2)) + "\n" for _ in range(25)]
    (tmp_path / "h.jsonl").write_text("".join(rows))
    spec = f"hellaswag={tmp_path / 'h.jsonl'}"
    settings = {"sequence_length": 64, "tokens_per_step": 1024, "steps": 2, "eval_every": 1, "eval_tasks": spec}
    for ranks in (1, 4):
        launcher.run(ranks, arguments(shards, tmp_path / f"run{ranks}", **settings))
    first, second = (records(tmp_path / f"run{ranks}", ("evaluation",)) for ranks in (1, 4))
    assert first == second and len(first) == 2
    for ranks in (1, 2, 4):
        out = ["--out", str(tmp_path / f"out{ranks}"), "--device", "cpu", "--micro-batch", "2"]
        launcher.run(ranks, ["evaluate", str(tmp_path / "run1"), "--tasks", spec, *out])
    alone, two, four = ((tmp_path / f"out{ranks}").read_text() for ranks in (1, 2, 4))
    assert alone == two == four and len(alone.splitlines()) == 25
