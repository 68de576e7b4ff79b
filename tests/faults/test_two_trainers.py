"""A second trainer in a run's folder."""

from pathlib import Path

import pytest

from handgrad.run.open import train
from handgrad.settings.config import RunConfig, to_toml
from handgrad.training.step import TrainStep
from tests.distributed.runs import Launcher, Started
from tests.test_runs import elsewhere, same_bits


@pytest.mark.fault(12)
def test_the_first_does_not_notice(
    config: RunConfig, launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command, started while the first one is in a step."""
    (tmp_path / "run.toml").write_text(to_toml(config))
    original, second = TrainStep.begin, list[Started]()

    def begin(training: TrainStep, step: int) -> None:
        if step == 6:
            second.append(launcher.start(1, ["train", "--config", str(tmp_path / "run.toml")]))
            assert second[0].wait() == [78], second[0].errors
        original(training, step)

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "begin", begin)
        train(config)
    (told,) = second[0].ranks[0].told
    assert "another process is training in" in told
    alone = elsewhere(config, "alone")
    train(alone)
    same_bits(alone.out, config.out, config.steps)
