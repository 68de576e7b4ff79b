"""Gradients a thousand times as large as usual: skipped, and the detector's windows travel with the run."""

import pytest

from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from handgrad.training import step as spikes
from handgrad.training.step import TrainStep
from tests.test_runs import elsewhere, interrupt_at, records, same_bits

SPIKE = 9


def spiked(patch: pytest.MonkeyPatch) -> None:
    """A window of six values, and gradients that are a thousand times as large in one step."""
    original = TrainStep.launch_norm

    def launch_norm(training: TrainStep, step: int) -> None:
        if step == SPIKE:  # however often it is made
            training.state.gradients.mul_(1000)
        original(training, step)

    patch.setattr(spikes, "WINDOW", 6)
    patch.setattr(TrainStep, "launch_norm", launch_norm)


@pytest.mark.nightly(but=["8"])
@pytest.mark.fault(37)
@pytest.mark.parametrize("stopped_at", [SPIKE - 1, SPIKE + 1])
def test_a_spike_is_skipped_in_a_resumed_run(config: RunConfig, stopped_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed before the spike, the windows find it as in the whole run; resumed after it, they have not taken it in."""
    settings = {"skip_norm_z": 50.0, "save_every": 2, "eval_every": 0, "sample_tokens": 0}
    control, whole, pieces = (elsewhere(config, name, **settings) for name in ("control", "whole", "pieces"))
    with monkeypatch.context() as patch:
        patch.setattr(spikes, "WINDOW", 6)
        train(control)
    assert not any(step["skipped"] for step in records(control.out, ("step",)))
    spiked(monkeypatch)
    train(whole)
    skipped = {step["step"]: step["skipped"] for step in records(whole.out, ("step",)) if step["skipped"]}
    assert list(skipped) == [SPIKE + 1] and "norm" in skipped[SPIKE + 1]
    with monkeypatch.context() as patch:
        interrupt_at(patch, stopped_at)
        with pytest.raises(KeyboardInterrupt):
            train(pieces)
    train(pieces)
    same_bits(whole.out, pieces.out, config.steps)
