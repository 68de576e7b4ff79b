"""Freezing, starting weights and the best checkpoint on several ranks: as on one."""

from pathlib import Path

import pytest

from handgrad.storage import checkpoint
from tests.distributed.runs import Launcher, Started, arguments, same_run, saved_steps
from tests.test_runs import records, tensors

FROZEN = {"freeze": "wte,blocks.0.*,blocks.1.ln?_*", "clip_norm": 0.05, "weight_decay": 0.5}
BEST = {"keep_best": "true", "eval_every": 2, "save_every": 8, "keep_checkpoints": 1}


@pytest.fixture(scope="module")
def weights(launcher: Launcher, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run whose weights the others start from, with longer contexts than theirs."""
    out = tmp_path_factory.mktemp("weights") / "run"
    launcher.run(1, arguments(shards, out, steps=2, sequence_length=64, tokens_per_step=1024))
    return out


@pytest.fixture(scope="module")
def alone(launcher: Launcher, shards: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    launcher.run(1, arguments(shards, out, init_from=weights, **FROZEN))
    return out


@pytest.mark.parametrize("zero", [0, 1])
def test_ranks_do_not_matter_to_what_is_frozen(
    zero: int, launcher: Launcher, shards: Path, tmp_path: Path, weights: Path, alone: Path
) -> None:
    launcher.run(2, arguments(shards, tmp_path / "run", init_from=weights, zero=zero, **FROZEN))
    same_run(alone, tmp_path / "run", 8)
    assert min(record["norm"] for record in records(alone, ("step",))) > 0.05, "every step must clip"
    before, after = tensors(weights, 2), tensors(alone, 8)
    assert before["wte"].equal(after["wte"]) and before["blocks.0.fc_weight"].equal(after["blocks.0.fc_weight"])
    assert not before["blocks.1.fc_weight"].equal(after["blocks.1.fc_weight"]) and not after["m.wte"].any()


def test_shared_gradients_do_not_matter_to_what_is_frozen(
    launcher: Launcher, shards: Path, tmp_path: Path, weights: Path
) -> None:
    """zero 2: what is frozen is a part of what a rank owns."""
    settings = {**FROZEN, "init_from": weights, "lanes": 2, "micro_batch": 8}
    launcher.run(1, arguments(shards, tmp_path / "alone", **settings))
    launcher.run(2, arguments(shards, tmp_path / "run", zero=2, **settings))
    same_run(tmp_path / "alone", tmp_path / "run", 8)


def test_a_start_that_does_not_fit_is_told_once(launcher: Launcher, shards: Path, tmp_path: Path, weights: Path) -> None:
    for settings, code, line in (
        ({"init_from": weights, "channels": 32}, 64, "channels is 64 in"),
        ({"init_from": tmp_path / "nothing"}, 65, "expected weights at"),
    ):
        started = launcher.start(2, arguments(shards, tmp_path / "run", **settings))
        assert started.wait() == [code, code], started.errors
        told = [told for rank in started.ranks for told in rank.told]
        assert len(told) == 1 and line in told[0], started.errors


def test_the_best_checkpoint_survives_a_kill(launcher: Launcher, shards: Path, tmp_path: Path) -> None:
    """Rank 0 is killed when the checkpoint of a best validation stands and its record does not: as if it had not been."""
    launcher.run(2, arguments(shards, tmp_path / "whole", **BEST))
    command = arguments(shards, tmp_path / "broken", **BEST)
    started: Started = launcher.start(2, command, "kill-record:0:4")
    codes = started.wait()
    assert started.fired == [True, False] and codes[0] != 0 and codes[1] == 75, started.errors
    assert saved_steps(tmp_path / "broken") == [2, 4]
    assert [record["step"] for record in records(tmp_path / "broken", ("validation",))] == [2]
    launcher.run(1, command)
    same_run(tmp_path / "whole", tmp_path / "broken", 8)
    assert saved_steps(tmp_path / "broken") == saved_steps(tmp_path / "whole")
    found = [checkpoint.find(f"{tmp_path / name}/best").step for name in ("whole", "broken")]
    losses = {record["step"]: record["loss"] for record in records(tmp_path / "whole", ("validation",))}
    assert found[0] == found[1] == min(losses, key=losses.__getitem__)
