"""Spikes of losses and gradient norms: the window before a step, its limit on the device, norms that rise for good."""

import dataclasses
import math

import pytest
import torch

from handgrad.settings.config import RunConfig
from handgrad.training.step import WINDOW, SpikeWindow
from tests.test_training import assembly_of


def test_outliers_are_judged_against_the_window_before_them() -> None:
    window = SpikeWindow()
    for i in range(WINDOW - 1):
        window.add(float(i % 2))
    assert window.z_score(100.0) is None, "no verdict before the window is full"
    window.add(1.0)
    assert window.z_score(0.5) == 0.0
    spike = window.z_score(100.0)
    assert spike is not None and abs(spike - 199) < 1e-9, "(100 - 0.5) / 0.5: not capped by its own weight"
    window.add(math.nan)
    window.add(math.inf)
    assert window.z_score(100.0) == spike, "a NaN must not blind the detector"
    assert window.z_score(math.nan) is window.z_score(math.inf) is None, "a number that is none has no deviation"


def test_a_spike_is_skipped_and_leaves_the_weights_alone(config: RunConfig) -> None:
    config = dataclasses.replace(config, skip_norm_z=3.0, steps=WINDOW + 8)
    training = assembly_of(config)
    state, stepper = training.state, training.stepper
    stepper.norm_window = SpikeWindow([1e-6 * (i % 2) for i in range(WINDOW)])
    before = state.master.clone()
    result = stepper.step(0)
    assert result.skipped is not None and "norm" in result.skipped
    assert torch.equal(state.master, before) and (state.optimizer["m"] == 0).all()
    stepper.norm_window = SpikeWindow()
    assert stepper.step(1).skipped is None
    assert not torch.equal(state.master, before)


def test_norms_that_have_risen_for_good_are_soon_no_spikes(config: RunConfig) -> None:
    """Each raises the limit by some 6 % here, where it is 20 % too low; one that is not finite raises nothing."""
    norm = assembly_of(config).stepper.step(0).norm
    step, before = (
        assembly_of(dataclasses.replace(config, skip_norm_z=4.0)).stepper,
        [norm - 1.2, norm - 0.8] * (WINDOW // 2),
    )
    step.norm_window = SpikeWindow(before)
    skips = 0
    while (result := step.step(0)).skipped and skips < 20:
        step.raise_norm_limit(result.norm)
        skips += 1
        assert skips > 1 or step.norm_window.values[-1] == pytest.approx(norm - 0.2), "as the limit"
    assert skips == 4
    step.norm_window = SpikeWindow(before)
    for value in (math.inf, math.nan, norm - 0.3):
        step.raise_norm_limit(value)
    assert list(step.norm_window.values) == before


def test_a_value_exceeds_the_limit_where_its_z_score_exceeds_z() -> None:
    """The limit that goes to the device: mean + z deviations of the window, which the step itself has not entered."""
    values = [2.0, 4.0] * (WINDOW // 2)
    window = SpikeWindow(values)
    assert window.limit(4.0) == 7.0 and window.z_score(7.0) == 4.0
    assert window.limit(0.0) == SpikeWindow(values[1:]).limit(4.0) == math.inf, "switched off, or not yet full"


def test_a_window_is_the_last_128_values() -> None:
    """Fewer judge nothing, older ones are forgotten; beside a value that never moved any other is infinitely far."""
    assert SpikeWindow(range(127)).z_score(1.0) is None
    window = SpikeWindow([5.0, *[1.0] * 127])
    assert window.z_score(1.0) == pytest.approx(-1 / math.sqrt(127))
    window.add(1.0)
    assert [window.z_score(value) for value in (1.0, 1.1, 0.9)] == [0.0, math.inf, -math.inf]


@pytest.mark.parametrize(("z", "skipped"), [(4.1, False), (3.9, True)])
@pytest.mark.parametrize("series", ["loss", "norm"])
def test_the_device_judges_by_that_limit(config: RunConfig, series: str, z: float, skipped: bool) -> None:
    """A loss or a norm four deviations above its window, under limits just above and just below."""
    found = getattr(assembly_of(config).stepper.step(0), series)
    step = assembly_of(dataclasses.replace(config, **{f"skip_{series}_z": z})).stepper
    window = SpikeWindow([found - 5, found - 3] * (WINDOW // 2))
    setattr(step, f"{series}_window", window)
    before = list(step.loss_window.values), list(step.norm_window.values)
    result = step.step(0)
    assert getattr(result, f"{series}_z") == pytest.approx(4.0)
    assert (result.skipped is not None) == skipped
    after = list(step.loss_window.values), list(step.norm_window.values)
    if skipped:
        assert after == before, "neither number of a skipped step enters its window"
    else:
        assert [values[-1] for values in after] == [result.loss, result.norm]
