"""Tasks are shared by ranks and measured as by one: every likelihood is the same number."""

import json
import random
from pathlib import Path

from tests.distributed.runs import Launcher, arguments
from tests.test_runs import records
from tests.test_tasks import hellaswag_row


def test_every_rank_count_gives_the_same_numbers(launcher: Launcher, shards: Path, tmp_path: Path) -> None:
    """While it trains, on 1, 2 and 4 ranks, and afterwards on 1, 2 and 4."""
    draw = random.Random(2)
    rows = [json.dumps(hellaswag_row(draw, words=2)) + "\n" for _ in range(25)]
    (tmp_path / "h.jsonl").write_text("".join(rows))
    spec = f"hellaswag={tmp_path / 'h.jsonl'}"
    settings = {"sequence_length": 64, "tokens_per_step": 1024, "steps": 2, "eval_every": 1, "eval_tasks": spec}
    written = []
    for ranks in (1, 2, 4):
        run = tmp_path / f"run{ranks}"
        launcher.run(ranks, arguments(shards, run, **settings))
        out = ["--out", str(tmp_path / f"out{ranks}"), "--device", "cpu", "--micro-batch", "2"]
        launcher.run(ranks, ["evaluate", str(tmp_path / "run1"), "--tasks", spec, *out])
        written.append((records(run, ("evaluation",))[:2], (tmp_path / f"out{ranks}").read_text()))
    assert written[0] == written[1] == written[2]
    assert len(written[0][0]) == 2 and len(written[0][1].splitlines()) == 25
