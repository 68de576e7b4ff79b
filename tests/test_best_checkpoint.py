"""The checkpoint of the lowest validation loss: kept, found, and still there after a run has ended in the middle."""

import dataclasses
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from handgrad.cli import main
from handgrad.errors import DataError
from handgrad.evaluation.loss import HeldOut, perplexity
from handgrad.run import evaluating
from handgrad.run.checks import most_checkpoints
from handgrad.run.evaluating import Evaluations
from handgrad.run.log import RunLog
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from handgrad.storage import checkpoint
from tests.test_commands import refused
from tests.test_runs import elsewhere, interrupt_at, same_bits


def scripted(patch: pytest.MonkeyPatch, losses: dict[int, float]) -> None:
    """Validations that find these losses after these steps."""
    validate = Evaluations.validate

    def validate_as_scripted(run: Evaluations, step: int, is_best: Callable[[float], bool]) -> bool:
        with pytest.MonkeyPatch.context() as inner:
            found = HeldOut(losses[step], perplexity(losses[step]), None, 1)
            inner.setattr(evaluating, "held_out_loss", lambda *_, **__: found)
            return validate(run, step, is_best)

    patch.setattr(Evaluations, "validate", validate_as_scripted)


def steps_kept(run: RunConfig) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (Path(run.out) / "checkpoints").glob("step_*"))


LOSSES = {2: 5.0, 4: 3.0, 6: 2.0, 8: 2.5, 10: 2.0, 12: 4.0}


@pytest.mark.parametrize(
    ("losses", "keep", "best", "kept"),
    [
        (LOSSES, 1, 6, [6, 12]),
        (LOSSES, 2, 6, [6, 8, 12]),
        ({step: 9.0 - step / 2 for step in LOSSES}, 1, 12, [12]),
        ({step: 1.0 + step for step in LOSSES}, 1, 2, [2, 12]),
        ({**LOSSES, 2: math.nan, 4: math.inf}, 0, 6, [4, 6, 8, 12]),
        (dict.fromkeys(LOSSES, math.nan), 1, None, [12]),
    ],
    ids=["in the middle", "two kept", "better and better", "worse and worse", "all kept", "never a number"],
)
def test_the_best_checkpoint_is_kept(
    losses: dict[int, float], keep: int, best: int | None, kept: list[int], config: RunConfig
) -> None:
    config = dataclasses.replace(config, eval_every=2, keep_checkpoints=keep, keep_best=True)
    most, original = [0], checkpoint.prune

    def counting(*given: object) -> None:
        most.append(len(steps_kept(config)))
        original(*given)

    with pytest.MonkeyPatch.context() as patch:
        scripted(patch, losses)
        patch.setattr(checkpoint, "prune", counting)
        train(config)
    assert steps_kept(config) == kept and max(most) <= most_checkpoints(config)
    if best is None:
        with pytest.raises(DataError, match="no checkpoint of a validated step"):
            checkpoint.find(f"{config.out}/best")
        return
    assert checkpoint.find(f"{config.out}/best").step == best
    assert checkpoint.find(config.out).step == 12
    said = (Path(config.out) / "log.txt").read_text()
    assert f"step {best}: validation loss {losses[best]:.4f}, the best so far" in said


def test_the_disk_that_a_plan_counts_is_taken(config: RunConfig) -> None:
    """The worst case, one best after another: the newest, the best before, and the one being written."""
    config = dataclasses.replace(config, eval_every=3, save_every=4, keep_checkpoints=1, keep_best=True)
    most, original = [], checkpoint.prune
    with pytest.MonkeyPatch.context() as patch:
        scripted(patch, {3: 3.0, 6: 2.0, 9: 1.0, 12: 4.0})
        patch.setattr(checkpoint, "prune", lambda *given: (most.append(len(steps_kept(config))), original(*given)))
        train(config)
    assert max(most) == most_checkpoints(config) == 3


@pytest.mark.parametrize(("best", "kept"), [(False, [6, 10, 12]), (True, [4, 6, 10, 12])])
def test_major_checkpoints_stay(best: bool, kept: list[int], config: RunConfig) -> None:
    """Beside the newest and the best; a later start without the option removes them."""
    config = dataclasses.replace(config, eval_every=2, save_every=2, keep_checkpoints=2, keep_every=6, keep_best=best)
    with pytest.MonkeyPatch.context() as patch:
        scripted(patch, {2: 5.0, 4: 1.0, 6: 2.0, 8: 2.5, 10: 2.0, 12: 4.0, 14: 3.0})
        train(config)
        assert steps_kept(config) == kept
        train(dataclasses.replace(config, steps=14, keep_every=0, keep_best=False), allow_changes=True)
    assert steps_kept(config) == [12, 14]


@pytest.mark.parametrize("steps", [1, 5, 12, 13, 24])
@pytest.mark.parametrize(("save", "major"), [(0, 0), (1, 3), (2, 2), (2, 6), (5, 10)])
@pytest.mark.parametrize("keep", [0, 1, 2, 4])
def test_the_count_of_checkpoints_on_the_disk_is_exact(
    steps: int, save: int, major: int, keep: int, config: RunConfig
) -> None:
    """Beside a count of every save and every removal."""
    config = dataclasses.replace(config, steps=steps, save_every=save, keep_checkpoints=keep, keep_every=major)
    there, most = list[int](), 0
    for step in range(1, steps + 1):
        if step == steps or (save and step % save == 0):
            there.append(step)
            most = max(most, len(there))
            there = [s for s in there if not keep or s in there[-keep:] or checkpoint.is_major(s, major)]
    assert most_checkpoints(config) == most


def test_major_checkpoints_are_saved_ones(shards: Path, capsys: pytest.CaptureFixture) -> None:
    command = ["train", "tiny", "--data", str(shards), "--out", "nowhere", "--keep-every"]
    told = "keep_every must be a multiple of save_every, found 70 and 50; try --keep-every 50"
    assert told in refused(capsys, 64, *command, "70", "--save-every", "50")
    assert "try --save-every 70" in refused(capsys, 64, *command, "70", "--save-every", "0")


def test_without_asking_nothing_more_is_saved(finished: RunConfig) -> None:
    assert steps_kept(finished) == [8, 12]
    assert checkpoint.find(f"{finished.out}/best").step == 12, "the best of those that are there"


@pytest.mark.nightly(but=["before its record"])
@pytest.mark.parametrize("moment", ["before its record", "a step later"])
def test_the_best_checkpoint_survives(moment: str, config: RunConfig) -> None:
    """Ended between the checkpoint and the record of its loss, or later: the resumed run has the same checkpoints."""
    config = dataclasses.replace(config, eval_every=2, keep_checkpoints=1, keep_best=True)
    broken = elsewhere(config, "broken")
    with pytest.MonkeyPatch.context() as patch:
        scripted(patch, LOSSES)
        train(config)
        with pytest.MonkeyPatch.context() as fault, pytest.raises(KeyboardInterrupt):
            if moment == "a step later":
                interrupt_at(fault, 7)
            else:
                original = RunLog.validation

                def ended(log: RunLog, step: int, *given: object) -> None:
                    if step == 6:
                        raise KeyboardInterrupt
                    original(log, step, *given)

                fault.setattr(RunLog, "validation", ended)
            train(broken)
        assert steps_kept(broken) == ([4, 6] if moment == "before its record" else [6])
        train(broken)
    assert steps_kept(broken) == steps_kept(config) == [6, 12]
    same_bits(config.out, broken.out, 12)
    assert checkpoint.find(f"{broken.out}/best").step == 6


def test_a_damaged_best_checkpoint_is_named(config: RunConfig) -> None:
    config = dataclasses.replace(config, eval_every=2, keep_checkpoints=0, keep_best=True)
    with pytest.MonkeyPatch.context() as patch:
        scripted(patch, LOSSES)
        train(config)
    weights = Path(config.out) / "checkpoints" / "step_00000006" / checkpoint.WEIGHTS_FILE
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(DataError, match="step_00000006"):
        checkpoint.find(f"{config.out}/best")
    shutil.rmtree(weights.parent)
    assert checkpoint.find(f"{config.out}/best").step == 8, "the best of those that are there"


@pytest.mark.parametrize(
    "line", ['{"kind": "validation", "step": [], "loss": 1}', '{"kind": "validation", "st', '"validation"']
)
def test_a_record_with_odd_lines(line: str, finished: RunConfig) -> None:
    with (Path(finished.out) / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    assert checkpoint.find(f"{finished.out}/best").step == 12


def test_the_best_checkpoint_is_taken_by_commands(
    finished: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    best = f"{finished.out}/best"
    assert main(["sample", best, "--max-tokens", "3"]) == 0
    assert main(["export", best, "--to", "hf", str(tmp_path / "hf")]) == 0
    capsys.readouterr()
    assert main(["evaluate", best]) == 0
    assert "(step 12)" in capsys.readouterr().out
