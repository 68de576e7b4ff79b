"""A tensor whose numbers are too large for its scale, step after step: it is named, or its margin widened."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from handgrad.errors import ConfigError
from handgrad.joins.fp8.formats import CLIPPED, INVERSE, MARGIN, REPORT_PLACES, SCALE, USED_SCALE, VANISHED
from handgrad.joins.fp8.scaling import Scaling, findings
from handgrad.joins.fp8.tables import WEIGHT
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from handgrad.storage.manifest import MANIFEST, content_sha256
from tests.conftest import small_run
from tests.test_fp8_runs import manifest, train_until
from tests.test_runs import elsewhere, records, same_bits

STEPS = 8
# The first step has calibrated scales. From the second on the tensor saturates; with fp8_saturation_steps 2 the run says so
# after step 3.
SAID = 3


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
    config = saturated("warn")
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


def moved_to_bf16(config: RunConfig, step: int, part: str) -> None:
    """Makes the checkpoint one of an earlier version, whose run moved `part` to bf16 by itself."""
    path = Path(config.out) / "checkpoints" / f"step_{step:08d}" / MANIFEST
    content = json.loads(path.read_text())
    del content["sha256"]
    content |= {"left_fp8": {"left": [part], "leaving": {}}}
    content["config"] |= {"fp8_on_saturation": "bf16", "fp8_keep_bf16": ""}
    path.write_text(json.dumps({"sha256": content_sha256(content), **content}))


@pytest.mark.usefixtures("saturating")
def test_a_run_that_moved_a_part_to_bf16_keeps_it_there(saturated: Callable[..., RunConfig]) -> None:
    """The refusal names the settings with which the run goes on, with the bits of a run that began with them."""
    kept = saturated("warn", fp8_keep_bf16="1.mlp")
    train_until(kept, 4, crash=True)
    earlier = elsewhere(kept, "earlier")
    shutil.copytree(kept.out, earlier.out)
    train(kept)
    moved_to_bf16(earlier, 4, "1.mlp")
    with pytest.raises(ConfigError) as refused:
        train(dataclasses.replace(earlier, fp8_keep_bf16=""), allow_changes=True)
    assert "has moved 1.mlp from fp8 to bf16" in str(refused.value)
    assert str(refused.value).endswith("resume with --allow-changes --fp8-keep-bf16 '1.mlp'")
    train(earlier, allow_changes=True)
    same_bits(kept.out, earlier.out, STEPS)


def test_a_share_is_of_the_numbers_that_a_step_rounds() -> None:
    """A weight is rounded once a step, an activation in each of four micro-steps: 20 of 100 numbers, and of 400."""
    rows = [SimpleNamespace(kind=kind, name=kind, part="", format=torch.float8_e4m3fn) for kind in (WEIGHT, "activation")]
    scaling = SimpleNamespace(fp8=SimpleNamespace(table=rows, delayed=True), numbers=[100, 100])
    report = torch.zeros(2, REPORT_PLACES)
    report[:, USED_SCALE], report[:, CLIPPED], report[:, VANISHED] = 1.0, 20.0, 40.0
    found = findings(cast(Scaling, scaling), report, 4, counted=True)
    assert [(each.clipped, each.vanished) for each in found] == [(0.2, 0.4), (0.05, 0.1)]
