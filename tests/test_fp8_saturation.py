"""A tensor whose numbers are too large for its scale, step after step: it is named, its margin widened, or its part of the
block goes on in bf16, with the same bits wherever the run was stopped in between."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from handgrad.cli import main
from handgrad.config import RunConfig
from handgrad.fp8.formats import INVERSE, MARGIN, SCALE
from handgrad.fp8.scaling import Scaling
from handgrad.run import loop
from handgrad.run.start import train
from handgrad.training.step import TrainStep
from tests.conftest import small_run
from tests.test_fp8_runs import manifest, same, train_until
from tests.test_runs import elsewhere, launch_ahead, records

STEPS = 8
# The first step has calibrated scales. From the second on the tensor saturates; with fp8_saturation_steps 2 that is said
# after step 3, and under the policy "bf16" step 4 is the last in fp8.
SAID, LAST = 3, 4


def make_saturate(patch: pytest.MonkeyPatch, names: tuple[str, ...], factor: float) -> None:
    """After every update, these tensors' scales are `factor` times too large."""
    original = Scaling.update

    def update(scaling: Scaling, controls: Tensor) -> None:
        original(scaling, controls)
        for place, row in enumerate(scaling.fp8.table):
            if row.name in names:
                scaling.scaling[place, SCALE] *= factor
                scaling.scaling[place, INVERSE] /= factor

    patch.setattr(Scaling, "update", update)


@pytest.fixture(scope="module")
def saturated(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunConfig]:
    """Makes the configurations of runs, saved after every step."""
    settings = {"steps": STEPS, "save_every": 1, "keep_checkpoints": 0, "eval_every": 7, "sample_tokens": 0}
    fp8 = {"precision": "fp8", "fp8_saturation_steps": 2, "fp8_window": 4, "fp8_count_every": 1}

    def make(policy: str, **more: object) -> RunConfig:
        out = tmp_path_factory.mktemp("saturated") / "run"
        return dataclasses.replace(small_run(shards, out), **(settings | fp8 | {"fp8_on_saturation": policy} | more))

    return make


@pytest.fixture
def saturating(monkeypatch: pytest.MonkeyPatch) -> None:
    make_saturate(monkeypatch, ("blocks.1.ln2",), 64.0)


def events(config: RunConfig) -> list[tuple[int, str]]:
    return [(line["step"], line["text"]) for line in records(config.out, ("event",))]


def classes(config: RunConfig, step: int) -> set[str]:
    """The tensors of the checkpoint of a step that have scales."""
    return set(manifest(config, step)["fp8"])


@pytest.mark.usefixtures("saturating")
def test_a_tensor_that_saturates_is_named_once(saturated: Callable[..., RunConfig]) -> None:
    config = saturated("warn")
    train(config)
    ((step, told),) = events(config)
    assert step == SAID and told.startswith("step 3: blocks.1.ln2 clipped numbers in 2 steps in a row (largest ")
    assert "--fp8-keep-bf16 1.mlp" in told and "--fp8-margin" in told
    clipped = {line["step"]: line["tensors"]["ln2"]["clipped_fraction"] for line in records(config.out, ("fp8",))}
    assert clipped[1] == 0 and all(clipped[step] > 0.3 for step in range(2, STEPS + 1))


def test_a_tensor_that_recovers_is_not_named(saturated: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second step: no two in a row."""
    original = Scaling.update

    def every_second(scaling: Scaling, controls: Tensor) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Scaling, "update", original)
            if controls[0] % 2:
                make_saturate(patch, ("blocks.1.ln2",), 64.0)
            scaling.update(controls)

    monkeypatch.setattr(Scaling, "update", every_second)
    config = saturated("bf16")
    train(config)
    clipped = [line["tensors"]["ln2"]["clipped_fraction"] > 0 for line in records(config.out, ("fp8",))]
    assert clipped == [False, True] * (STEPS // 2)
    assert events(config) == []


def test_widening_adds_a_binade_until_nothing_is_clipped(
    saturated: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale that is four times too large takes two of them."""
    make_saturate(monkeypatch, ("blocks.1.ln2",), 4.0)
    config = saturated("widen", steps=12, learning_rate=0.0)  # so that no number grows
    train(config)
    assert [step for step, _ in events(config)] == [3, 5]
    assert all("blocks.1.ln2" in told and "one binade of margin more" in told for _, told in events(config))
    margins = [manifest(config, step)["fp8"]["blocks.1.ln2"][0][MARGIN] for step in range(1, 13)]
    assert margins == [0, 0, 1, 1, *[2] * 8]
    last = manifest(config, 12)["fp8"]
    assert all(scaling[MARGIN] == 0 for name, (scaling, _, _) in last.items() if name != "blocks.1.ln2")
    clipped = [line["tensors"]["ln2"]["clipped_fraction"] for line in records(config.out, ("fp8",))]
    assert min(clipped[1:5]) > max(clipped[5:])


@pytest.fixture(scope="module")
def switched(saturated: Callable[..., RunConfig]) -> RunConfig:
    """An unbroken run that moves a part to bf16."""
    config = saturated("bf16")
    with pytest.MonkeyPatch.context() as patch:
        make_saturate(patch, ("blocks.1.ln2",), 64.0)
        train(config)
    return config


def test_its_part_goes_on_in_bf16(switched: RunConfig) -> None:
    """One step after it was named: that step may be on its way already."""
    (named, told), (left, told_too) = events(switched)
    assert (named, left) == (SAID, LAST)
    assert told.endswith("1.mlp goes to bf16 after the next step") and told_too == "step 4: 1.mlp goes on in bf16"
    part = {"ln2", "gelu", "dhidden", "dresidual_out", "fc_weight", "fcproj_weight"}
    before, after = classes(switched, LAST), classes(switched, LAST + 1)
    assert after == classes(switched, STEPS) and len(before) == 26
    assert manifest(switched, SAID)["left_fp8"] == {"left": [], "leaving": {"1.mlp": LAST}}
    assert manifest(switched, LAST)["left_fp8"] == {"left": ["1.mlp"], "leaving": {}}
    assert before - after <= {f"blocks.1.{name}" for name in part} and len(before - after) == len(part)
    clipped = [line["tensors"]["ln2"]["clipped_fraction"] for line in records(switched.out, ("fp8",))]
    assert max(clipped[LAST:]) < 0.01 < min(clipped[1:LAST])


@pytest.mark.usefixtures("saturating")
@pytest.mark.parametrize("ahead", [False, True])
def test_the_switch_is_the_same_every_time(
    switched: RunConfig, tmp_path: Path, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another rhythm of checkpoints, too: launched ahead, no step but the first waits for its result."""
    again = dataclasses.replace(switched, out=str(tmp_path / "again"), save_every=0 if ahead else 1)
    if ahead:
        launch_ahead(monkeypatch)
    train(again)
    same(switched, again)


@pytest.mark.usefixtures("saturating")
@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_stopped_around_the_switch_and_resumed_gives_the_same_bits(
    switched: RunConfig, tmp_path: Path, crash: bool, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ahead:
        launch_ahead(monkeypatch)
    for step in range(SAID - 1, LAST + 2):
        save_every = 1 if crash else 0
        again = dataclasses.replace(switched, out=str(tmp_path / f"stopped{step}"), save_every=save_every)
        train_until(again, step, crash=crash)
        train(again)
        same(switched, again)


@pytest.mark.usefixtures("saturating")
def test_a_switch_that_fails_is_made_again(switched: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends before the new plan is allocated."""
    again = dataclasses.replace(switched, out=str(tmp_path / "again"))
    original = loop.Run.leave_fp8

    def failing(run: loop.Run) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop.Run, "leave_fp8", failing)
    with pytest.raises(KeyboardInterrupt):
        train(again)
    monkeypatch.setattr(loop.Run, "leave_fp8", original)
    train(again)
    same(switched, again)


def test_two_parts_and_the_head_can_leave(saturated: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is in fp8: what is left is a run in bf16."""
    make_saturate(monkeypatch, ("blocks.0.dqkv", "blocks.1.qkv_weight", "wte"), 64.0)
    config = saturated("bf16", fp8_keep_bf16="proj,mlp", fp8_head="forward,dgrad")
    train(config)
    assert "0.qkv, 1.qkv, head goes on in bf16" in events(config)[-1][1]
    assert manifest(config, LAST)["left_fp8"]["left"] == ["0.qkv", "1.qkv", "head"]
    assert "fp8" in manifest(config, LAST) and "fp8" not in manifest(config, LAST + 1)
    assert [line["step"] for line in records(config.out, ("fp8",))] == list(range(1, LAST + 1))
    resumed = elsewhere(config, "resumed")
    train_until(resumed, 6, crash=True)
    train(resumed)
    same(config, resumed)


@pytest.mark.usefixtures("saturating")
def test_a_switch_waits_for_a_step_whose_numbers_are_finite(
    saturated: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TrainStep.result

    def poisoned(training: TrainStep, step: int) -> object:
        result = original(training, step)
        return dataclasses.replace(result, norm=float("inf"), skipped="norm is inf") if step == LAST - 1 else result

    monkeypatch.setattr(TrainStep, "result", poisoned)
    config = saturated("bf16")
    train(config)
    assert [step for step, told in events(config) if "goes on in bf16" in told] == [LAST + 1]


@pytest.mark.usefixtures("saturating")
def test_a_replay_leaves_fp8_where_the_run_did(saturated: Callable[..., RunConfig]) -> None:
    """From the beginning, from before the step, from the state at it and from behind."""
    config = saturated("bf16", audit_every=1)
    train(config)
    assert any("goes on in bf16" in told for _, told in events(config))
    for first in (0, LAST - 1, LAST, LAST + 1):
        assert main(["verify", config.out, "--from", str(first)]) == 0
