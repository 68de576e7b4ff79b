"""An audited run on several ranks: its chain is that of one rank, and any number of ranks verifies it."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from handgrad.cli import main
from handgrad.joins.audit.chain import content_of, linked, links, read_chain
from handgrad.storage.run_files import AUDIT_FILE
from tests.distributed.runs import Launcher, arguments

SETTINGS = {"audit_every": 1, "eval_every": 0, "keep_checkpoints": 0}
KINDS = {
    "fp32": {},
    "bf16": {"precision": "bf16", "dropout": 0.1},
    "fp8": {"precision": "fp8"},
    "no masters": {"precision": "bf16", "master_weights": False},
    "moments": {"precision": "bf16", "moments": "bf16"},
    "muon": {"optimizer": "muon", "num_layers": 3},
    "modern": {"architecture": "modern", "optimizer": "muon", "precision": "bf16"},
}


def chain_of(run: Path) -> list[dict]:
    return [content_of(link) for link in links(read_chain(run / AUDIT_FILE))]


@pytest.mark.nightly(but=["fp8", "muon"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_verifies_four(kind: str, launcher: Launcher, shards: Path, tmp_path: Path, capsys) -> None:
    run, settings = tmp_path / "run", {**SETTINGS, **KINDS[kind], "steps": 6, "save_every": 3}
    launcher.run(4, arguments(shards, run, **settings))
    assert main(["verify", str(run)]) == 0
    assert "6 links and 2 checkpoints equal" in capsys.readouterr().out


@pytest.mark.nightly(but=["2-2"])
@pytest.mark.parametrize(("ranks", "zero"), [(1, 1), (2, 0), (2, 2)])
def test_the_chain_does_not_depend_on_the_ranks(
    ranks: int, zero: int, launcher: Launcher, shards: Path, tmp_path: Path
) -> None:
    settings = {**SETTINGS, "lanes": 4, "steps": 4, "save_every": 2, "micro_batch": 8 if zero == 2 else 2}
    settings |= {"lanes": 2} if zero == 2 else {}
    for size, stage in ((1, 1), (ranks, zero)) if ranks > 1 else ((4, 1), (1, 1)):
        launcher.run(size, arguments(shards, tmp_path / f"{size}-{stage}", zero=stage, **settings))
    chains = [chain_of(folder) for folder in sorted(tmp_path.iterdir())]
    assert len(chains) == 2 and chains[0] == chains[1] and len(chains[0]) == 5


def test_several_ranks_verify_one(launcher: Launcher, shards: Path, tmp_path: Path) -> None:
    """Started by a launcher; and what they find, one of them says."""
    run, settings = tmp_path / "run", {**SETTINGS, "steps": 6, "save_every": 3}
    launcher.run(1, arguments(shards, run, **settings))
    (tmp_path / "scratch").mkdir()
    found = launcher.run(2, ["verify", str(run), "--from", "3", "--scratch", str(tmp_path / "scratch")])
    assert "3 links and 1 checkpoint equal" in found.ranks[0].output


def test_verify_starts_ranks(launcher: Launcher, shards: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    run, settings = tmp_path / "run", {**SETTINGS, "steps": 4, "save_every": 2}
    launcher.run(1, arguments(shards, run, **settings))
    monkeypatch.setenv("PYTHON_EXEC", str(launcher.write_program(tmp_path / "python")))
    monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(2)  # as a terminal's process has: its ranks have one each, like the run's
    try:
        assert main(["verify", str(run), "--ranks", "2", "--segments", "2"]) == 0
    finally:
        torch.set_num_threads(1)
    assert "4 links and 2 checkpoints equal, bit by bit, of steps 0 to 2, 2 to 4" in capsys.readouterr().out


def test_a_difference_is_told_once(launcher: Launcher, shards: Path, tmp_path: Path) -> None:
    """The chain says another loss, and was hashed anew."""
    run, settings = tmp_path / "run", {**SETTINGS, "steps": 4, "save_every": 2}
    launcher.run(1, arguments(shards, run, **settings))
    contents = chain_of(run)
    contents[3]["loss"] = (1.0).hex()
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").unlink()  # which has the true loss
    forged, previous = [], ""
    for content in contents:
        forged.append(linked(content, previous))
        previous = forged[-1]["link"]
    (run / AUDIT_FILE).write_text("".join(json.dumps(line) + "\n" for line in forged))
    (tmp_path / "scratch").mkdir()
    started = launcher.start(2, ["verify", str(run), "--scratch", str(tmp_path / "scratch")])
    assert started.wait() == [77, 77], started.errors
    assert "step 3: the forward pass gave another loss" in started.errors, started.errors
