"""A checkpoint is judged before it is written: its numbers are finite, and no tensor has jumped by orders of magnitude."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from handgrad.errors import NumericsError
from handgrad.run import saves
from handgrad.run.loop import Run
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from handgrad.storage import checkpoint
from handgrad.training.state import TrainingState
from handgrad.training.step import TrainStep
from tests.distributed.runs import Launcher, arguments, same_run, saved_steps
from tests.test_runs import elsewhere, same_bits


def flip_bit_30(tensor: Tensor) -> None:
    """Of a number below 2 this is a multiplication by 2 ** 128."""
    assert 0 < tensor.view(-1)[0].abs() < 2
    tensor.view(-1).view(torch.int32)[0] ^= 1 << 30


def before_save(patch: pytest.MonkeyPatch, step: int, act: Callable[[TrainingState], None]) -> None:
    original = Run.save

    def save(run: Run) -> None:
        if run.completed == step and run.saves.last_saved != step:
            act(run.training.state)
        original(run)

    patch.setattr(Run, "save", save)


def flip_weight(state: TrainingState) -> None:
    flip_bit_30(state.plain_weights.blocks[1].fc_weight)


FAULTS: dict[str, tuple[str, Callable[[TrainingState], None]]] = {
    "weight": ("blocks.1.fc_weight", flip_weight),
    "moment": ("m.wte", lambda state: flip_bit_30(state.optimizer["m"][:1])),
    "nan": ("v.wte", lambda state: state.optimizer["v"][3:4].fill_(float("nan"))),
}


@pytest.mark.fault(36)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_save_is_refused_and_the_older_checkpoint_goes_on(
    finished: RunConfig, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = elsewhere(finished, "flipped")
    name, act = FAULTS[fault]
    with monkeypatch.context() as patch, pytest.raises(NumericsError) as raised:
        before_save(patch, 8, act)
        train(run)
    assert raised.value.exit_code == 76
    assert str(raised.value).startswith(f"step 8 is not saved: the norm of {name} is ")
    assert "the checkpoint of step 4" in str(raised.value)
    assert saved_steps(Path(run.out)) == [4]
    train(run)
    same_bits(finished.out, run.out, 12)


def test_diverged_weights_are_not_saved(config: RunConfig) -> None:
    """The first update makes all weights infinite, with a finite loss and gradient before it."""
    run = dataclasses.replace(config, learning_rate=1e39, warmup_steps=0, save_every=1, sample_tokens=0)
    with pytest.raises(NumericsError, match=r"step 1 is not saved: .*; the same of \d+ more: .* no checkpoint"):
        train(run)
    assert not saved_steps(Path(run.out))


def test_without_a_checkpoint_none_is_recommended(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    original = TrainStep.begin

    def poisoned(training: TrainStep, step: int) -> None:
        training.state.weights.lnf_bias[0] = float("nan")
        original(training, step)

    monkeypatch.setattr(TrainStep, "begin", poisoned)
    with pytest.raises(NumericsError, match=r"2 updates in a row .*; there is no checkpoint yet: lower --learning-rate"):
        train(dataclasses.replace(config, max_skips=2))


def test_a_jump_is_by_a_thousand() -> None:
    """Of what the norm was, or of one per element: a run may have large weights if they were as large before."""
    before, now = {"a": 5e6, "b": 0.0}, {"a": 5e7, "b": 900.0}
    assert not saves.unsound(before, now, {"a": 1, "b": 1})
    assert saves.unsound(before, {**now, "a": 6e9}, {"a": 1, "b": 1}) == ["a"]
    assert saves.unsound(before, {**now, "b": 1100.0}, {"a": 1, "b": 1}) == ["b"]
    assert saves.unsound(before, {"a": float("nan"), "b": float("inf")}, {"a": 1, "b": 1}) == ["a", "b"]


@pytest.mark.nightly(but=["0-0", "1-2"])
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_refuse(launcher: Launcher, shards: Path, tmp_path: Path, zero: int, rank: int) -> None:
    """Each judges its share, and all know the verdict: one line, the tensor's name, 76."""
    run, settings = (
        tmp_path / "run",
        {"zero": zero, "precision": "bf16", "micro_batch": 4, "lanes": 2, "tokens_per_step": 256},
    )
    command = arguments(shards, run, check_ranks_every=0, eval_every=0, **settings)
    started = launcher.start(2, command, f"flip-save:{rank}:7")
    assert started.wait() == [76, 76], started.errors
    (told,) = (line for one in started.ranks for line in one.told)
    assert "step 8 is not saved: the norm of m." in told and "from the checkpoint of step 4" in told
    assert saved_steps(run) == [4] and started.fired[rank]


def test_a_checkpoint_that_fails_twice_is_passed_over(finished: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was saved with a flipped bit, and from which each start ends at the same step: the third one goes on from
    the checkpoint before."""
    run = elsewhere(finished, "failing", max_skips=2, skip_norm_z=0.0)
    with monkeypatch.context() as patch:
        before_save(patch, 8, flip_weight)
        patch.setattr(saves.SaveCheck, "compare", lambda *given: None)
        with pytest.raises(NumericsError, match="2 updates in a row"):
            train(run)
    assert saved_steps(Path(run.out)) == [4, 8]
    with pytest.raises(NumericsError, match="2 updates in a row"):
        train(run)
    assert saved_steps(Path(run.out)) == [4, 8]
    train(run)
    log = (Path(run.out) / "log.txt").read_text()
    failing = Path(run.out) / "checkpoints" / "failing" / "step_00000008"
    assert (
        "passed over step_00000008: the run failed at step 10 each time it resumed from it" in log and str(failing) in log
    )
    assert json.loads((failing / "manifest.json").read_text())["step"] == 8
    same_run(Path(finished.out), Path(run.out), 12)
    assert checkpoint.find(run.out).step == 12


def test_the_worst_of_the_copies_of_a_norm_counts() -> None:
    assert saves.worst((1.0, 3.0, 2.0)) == 3.0 and math.isnan(saves.worst((1.0, math.nan))) and saves.worst((0.0,)) == 0
