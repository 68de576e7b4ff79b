"""A step that looks wrong is made again: the same bits are the data's fault, other bits the hardware's.

`ahead` is the loop of a GPU, one step behind the device: there the next step has begun when a result is read.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from handgrad.cli import main
from handgrad.errors import HardwareError
from handgrad.run import loop
from handgrad.run.loop import Run
from handgrad.run.open import open_run, train
from handgrad.run.step_check import is_overflow
from handgrad.settings.config import RunConfig, to_toml
from handgrad.storage import checkpoint
from handgrad.training.step import WINDOW, SpikeWindow, StepResult, TrainStep
from tests.test_runs import elsewhere, records, same_bits

FAULTY = 6  # the 0-based step: nothing is due after it
EXPONENT = 1 << 30  # the highest bit of a float32's exponent


def flip(patch: pytest.MonkeyPatch, attempts: dict[int, int], *, value: float | None = None) -> list[int]:
    """Flips a bit of a gradient in these attempts at the step, which makes its norm infinite, or gives it a `value`. Keys
    count attempts from 0; their values are elements. Returns the steps of all attempts, as they are made."""
    original, made = TrainStep.accumulate_gradients, list[int]()

    def accumulate_gradients(training: TrainStep, step: int) -> None:
        original(training, step)
        element = attempts.get(made.count(FAULTY)) if step == FAULTY else None
        made.append(step)
        if element is not None:
            gradients = training.state.gradients
            place = int(gradients.nonzero()[element])
            gradients.view(torch.int32)[place] ^= EXPONENT
            if value is not None:
                gradients[place] = value

    patch.setattr(TrainStep, "accumulate_gradients", accumulate_gradients)
    return made


def run_ahead(patch: pytest.MonkeyPatch) -> None:
    """The loop pauses where something is due, and nowhere else."""

    def pauses_after(run: Run, step: int) -> bool:
        due = run.due(run.config.save_every, step + 1) or run.due(run.config.eval_every, step + 1)
        return due or step in (run.first_step, run.until - 1)

    patch.setattr(Run, "pauses_after", pauses_after)


@pytest.fixture(params=[False, True], ids=["waits", "ahead"])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param:
        run_ahead(monkeypatch)
    return request.param


def same_state(a: RunConfig, b: RunConfig) -> None:
    """Weights, moments, windows, records, scales of fp8 and fp16."""
    same_bits(a.out, b.out, a.steps)
    folders = [Path(run.out) / "checkpoints" / f"step_{run.steps:08d}" for run in (a, b)]
    states = [checkpoint.open_checkpoint(folder).manifest for folder in folders]
    assert all(states[0].get(key) == states[1].get(key) for key in ("fp8", "loss_scale"))


def events(config: RunConfig) -> list[str]:
    return [record["text"] for record in records(config.out, ("event",))]


@pytest.mark.nightly(but=["waits-fp32", "ahead-fp8"])
@pytest.mark.fault(38)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_a_transient_fault_leaves_no_trace(
    precision: str, ahead: bool, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    if precision == "fp8":  # whose weights grow by so much in every step that their scales change
        config = dataclasses.replace(config, learning_rate=0.1, fp8_window=1)
    config = dataclasses.replace(config, precision=precision)
    train(config)
    struck = elsewhere(config, "struck")
    made = flip(monkeypatch, {0: 100})
    train(struck)
    assert made.count(FAULTY) == 3 and made.count(FAULTY + 1) == (2 if ahead else 1)
    (told,) = events(struck)
    assert told.startswith("step 7: loss ") and " and norm inf, made again loss " in told
    assert "the first was a fault of the hardware in the gradients of rank 0; the run continues" in told
    same_state(config, struck)


@pytest.mark.nightly(but=["waits-fp32", "ahead-fp8"])
@pytest.mark.parametrize("precision", ["fp32", "fp8"])
def test_a_lasting_fault_is_skipped_as_without_a_second_attempt(
    precision: str, ahead: bool, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data or the model is at fault. The control takes every first result as it is."""
    config = dataclasses.replace(config, precision=precision)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "checked_result", lambda training, ranks, step, result: (result, ""))
        flip(patch, dict.fromkeys(range(9), 100))
        train(config)
    struck = elsewhere(config, "struck")
    made = flip(monkeypatch, dict.fromkeys(range(9), 100))
    train(struck)
    assert made.count(FAULTY) == 2
    (told,) = events(struck)
    assert told.startswith("step 7 made no update: gradient norm is inf; non-finite gradients at ")
    assert [told] == events(config)
    same_state(config, struck)


def test_a_fault_in_the_second_attempt_changes_nothing(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the third are the same: the data is at fault, and the hardware as well."""
    made = flip(monkeypatch, {0: 100, 1: 200, 2: 100})
    train(config)
    first, second = events(config)
    assert made.count(FAULTY) == 3 and "the second was a fault of the hardware" in first
    assert second.startswith("step 7 made no update: gradient norm is inf")


def test_three_results_end_the_run(config: RunConfig, capsys: pytest.CaptureFixture) -> None:
    recipe = Path(config.out).with_name("run.toml")
    recipe.write_text(to_toml(config))
    with pytest.MonkeyPatch.context() as patch:
        flip(patch, {0: 100, 1: 200})
        assert main(["train", "--config", str(recipe)]) == HardwareError.exit_code == 79
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("handgrad: step 7 was made three times and gave three results (loss ")
    assert main(["train", "--config", str(recipe)]) == 0
    control = elsewhere(config, "control")
    train(control)
    same_bits(config.out, control.out, config.steps)


def outlier(config: RunConfig, before: Callable[[], object]) -> None:
    """A run whose detector has a full window when it begins, of the norms that it meets."""
    with open_run(config) as run:
        run.begin()
        run.training.stepper.norm_window = SpikeWindow([1.0, 3.0] * (WINDOW // 2))
        before()
        run.advance(config.steps)


@pytest.mark.nightly(but=["ahead"])
def test_an_outlier_is_made_again(ahead: bool, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its z-score; the windows of both runs end alike."""
    config = dataclasses.replace(config, skip_norm_z=50.0)
    outlier(config, lambda: None)
    struck = elsewhere(config, "struck")
    outlier(struck, lambda: flip(monkeypatch, {0: 100}, value=1000.0))
    (told,) = events(struck)
    assert "the first was a fault of the hardware" in told and "inf" not in told
    same_state(config, struck)


def test_an_overflow_of_loss_scaling_is_no_suspicion() -> None:
    """Down to the smallest scale, where a gradient that is not finite has another cause."""
    result = StepResult(3.0, float("inf"), 0.1, None, None, "gradient norm is inf", loss_scale=2.0)
    assert is_overflow(result) and not is_overflow(dataclasses.replace(result, loss_scale=1.0))
    assert not is_overflow(dataclasses.replace(result, loss=float("nan")))


def test_an_overflow_is_not_made_again(ahead: bool, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(config, precision="fp16")
    made = flip(monkeypatch, {0: 100}, value=math.inf)
    train(config)
    assert made == list(range(config.steps))
    assert any(text.startswith("step 7 made no update: a gradient overflowed at loss scale ") for text in events(config))


@pytest.mark.fault(38)
def test_good_steps_are_made_once(ahead: bool, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    made = flip(monkeypatch, {})
    train(config)
    assert made == list(range(config.steps)) and not events(config)


def test_norms_that_have_risen_for_good_do_not_end_a_run(config: RunConfig) -> None:
    """They are skipped until the limit has risen to them, else the sixth would end the run."""
    config = dataclasses.replace(config, skip_norm_z=5.0, max_skips=6)
    with open_run(config) as run:
        run.begin()
        run.training.stepper.norm_window = SpikeWindow([1.38, 1.62] * (WINDOW // 2))
        run.advance(config.steps)
    skipped = [step["skipped"] is not None for step in records(config.out, ("step",))]
    assert skipped == [True] * 5 + [False] * (config.steps - 5)
