"""Frozen parameters keep their bits and take no part in update, decay, moments or norm."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from handgrad.errors import NumericsError
from handgrad.memory.rows import count_parameters, freeze
from handgrad.models import parameter_table
from handgrad.reports.page import write_report
from handgrad.run.open import train
from handgrad.settings.config import ModelShape, RunConfig
from handgrad.training.step import TrainStep
from tests.test_runs import elsewhere, interrupt_at, records, same_bits
from tests.test_training import steps_of

FROZEN = "wte, blocks.0-0.*, blocks.1.ln?_*"


def test_patterns_name_rows() -> None:
    table = parameter_table(ModelShape(vocab_size=257, sequence_length=16, num_layers=12, num_heads=2, channels=32))

    def names(patterns: str) -> set[str]:
        return {row.name for row in freeze(table, patterns) if row.frozen}

    assert freeze(table, "") == table and names("wte,wpe") == {"wte", "wpe"}
    assert names("blocks.1") == {row.name for row in table if row.name.startswith("blocks.1.")}
    assert names("blocks.2-3.") == names("blocks.2-3") == names("blocks.2-3.*") == names("blocks.2") | names("blocks.3")
    assert names("blocks.*.ln1_*") == {f"blocks.{n}.ln1_{kind}" for n in range(12) for kind in ("weight", "bias")}
    assert names(" blocks.0-11.fc_weight, lnf_bias,") == {"lnf_bias", *(f"blocks.{n}.fc_weight" for n in range(12))}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": "bf16"},
        {"precision": "bf16", "master_weights": False},
        {"precision": "fp8", "fp8_head": "forward"},
        {"precision": "fp8"},
        {"lanes": 4, "micro_batch": 2},
    ],
    ids=["fp32", "bf16", "bf16-alone", "fp8-forward", "fp8", "lanes"],
)
def test_what_is_frozen_stays(settings: dict, config: RunConfig) -> None:
    """Bit by bit, without moments; the rest moves, and only that decays."""
    config = dataclasses.replace(config, freeze=FROZEN, weight_decay=0.5, **settings)
    fresh, _ = steps_of(config, 0)
    state, _ = steps_of(config, 3)
    table = state.design.parameters
    frozen = {row.name for row in table if row.frozen}
    assert {"wte", "blocks.0.fc_weight", "blocks.1.ln2_bias"} <= frozen and "blocks.1.fc_weight" not in frozen
    for row in table:
        for flat in (state.parameters, state.master):
            before = row.view(fresh.parameters if flat is state.parameters else fresh.master)
            assert torch.equal(before, row.view(flat)) == row.frozen, row.name
        for moments in state.optimizer.values():
            assert bool((row.stored(moments) == 0).all()) == row.frozen, row.name


def test_the_norm_is_that_of_what_is_trained(config: RunConfig) -> None:
    """Held against the unfrozen run's gradient of the same step, in float64."""
    whole, everything = steps_of(dataclasses.replace(config, clip_norm=0.0), 1)
    state, results = steps_of(dataclasses.replace(config, freeze=FROZEN, clip_norm=1e-3), 1)
    assert results[0].loss == everything[0].loss
    table = state.design.parameters

    def norm(names: set[str]) -> float:
        return math.sqrt(sum(float(row.view(whole.gradients).double().pow(2).sum()) for row in table if row.name in names))

    trained = {row.name for row in table if not row.frozen}
    # Float32 squares and sums of up to 2^16 of them, pairwise: a few units in the last place.
    assert abs(norm({row.name for row in table}) / everything[0].norm - 1) < 1e-6
    assert abs(norm(trained) / results[0].norm - 1) < 1e-6 and results[0].norm < 0.9 * everything[0].norm
    clipped = state.optimizer["m"].double().norm() / (1 - config.beta1)
    assert abs(clipped - 1e-3) < 1e-8, "clipped to its own norm"


def test_a_gradient_that_is_not_trained_may_be_anything(config: RunConfig) -> None:
    """Not finite where it is frozen: no update is skipped for it. Where it is trained: the step is, and named."""

    def losing(patch: pytest.MonkeyPatch, name: str) -> None:
        original = TrainStep.launch_norm  # in each attempt at the step

        def launch_norm(training: TrainStep, step: int) -> None:
            getattr(training.state.weight_gradients, name).fill_(math.nan)
            original(training, step)

        patch.setattr(TrainStep, "launch_norm", launch_norm)

    with pytest.MonkeyPatch.context() as patch:
        losing(patch, "wpe")
        train(dataclasses.replace(config, freeze="wpe", steps=2))
        with pytest.raises(NumericsError, match="non-finite gradients at wte, wpe, blocks"):
            train(elsewhere(config, "thawed", steps=2, max_skips=1))
    with pytest.MonkeyPatch.context() as patch:
        losing(patch, "wte")
        with pytest.raises(NumericsError, match="non-finite gradients at wte, blocks"):
            train(elsewhere(config, "other", freeze="wpe", steps=2, max_skips=1))


def test_a_frozen_run_goes_on_with_the_same_bits(config: RunConfig) -> None:
    config = dataclasses.replace(config, freeze=FROZEN)
    train(config)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at(patch, 6)
        train(elsewhere(config, "broken"))
    train(elsewhere(config, "broken"))
    same_bits(config.out, elsewhere(config, "broken").out, config.steps)
    started = records(config.out, ("run",))[0]
    table = freeze(parameter_table(config.shape(257)), FROZEN)
    assert started["parameters"] == count_parameters(table)
    assert started["trained_parameters"] == count_parameters(row for row in table if not row.frozen)
    assert f"frozen: {FROZEN}" in (Path(config.out) / "log.txt").read_text()
    page = write_report([Path(config.out)], Path(config.out) / "report.html").read_text()
    assert f"({started['trained_parameters']:,} of them not frozen)" in page


def test_nothing_frozen_launches_what_it_always_did(config: RunConfig) -> None:
    state, _ = steps_of(config, 1)
    everything, _ = steps_of(dataclasses.replace(config, freeze="lnf_bias"), 1)
    launches = [len(part) for s in (state, everything) for part in (s.frozen, s.owned)]
    assert launches == [0, 2 * config.num_layers, 1, 2 * config.num_layers]
