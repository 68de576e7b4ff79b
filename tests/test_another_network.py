"""A network takes a record and a file: one that handgrad lacks, in gemma_network.py and gemma_model.py, with an operation
of its own, trains, resumes, is evaluated, and has the right gradients."""

import copy
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from torch import Tensor

from handgrad.cli import main
from handgrad.errors import UsageError
from handgrad.networks import NETWORKS
from handgrad.run.open import open_run, train
from handgrad.settings.config import FIELDS, ModelShape, RunConfig, check
from handgrad.tools.gradient_checks import TOLERANCE, check_model
from tests import gemma_model, gemma_operations
from tests.gemma_network import GEMMA

SMALL = {"num_layers": 2, "num_heads": 4, "channels": 32}


@pytest.fixture(autouse=True)
def gemma(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network among the others: an entry in `NETWORKS`, a file in `handgrad/models`."""
    monkeypatch.setitem(NETWORKS, "gemma", GEMMA)
    monkeypatch.setitem(sys.modules, "handgrad.models.gemma", gemma_model)
    field = copy.copy(FIELDS["architecture"])
    field.metadata = MappingProxyType({**field.metadata, "choices": tuple(NETWORKS)})  # type: ignore[misc]
    monkeypatch.setitem(FIELDS, "architecture", field)


@pytest.fixture
def another(config: RunConfig) -> RunConfig:
    settings: dict[str, Any] = {"architecture": "gemma", "steps": 60, "learning_rate": 1e-2, "sample_tokens": 0}
    return replace(config, **SMALL, **settings, eval_every=30, save_every=20)


def losses_of(config: RunConfig) -> dict[int, float]:
    records = map(json.loads, (Path(config.out) / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if record.get("kind") == "step"}


def test_it_is_another_network() -> None:
    shape = ModelShape(57, 5, architecture="gemma", **SMALL)
    assert (shape.head_width, shape.kv_heads, shape.feed_forward) == (16, 2, 96)
    names = {row.name for row in gemma_model.parameters(shape)}
    assert {"blocks.1.after1_gain", "blocks.1.after2_gain"} <= names and len(names) == 2 + 2 * 8


def test_its_gradients_are_those_of_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ModelShape(57, 5, architecture="gemma", **SMALL)
    checked = list(check_model(shape))
    assert len(checked) == 18 and max(found.error for found in checked) < TOLERANCE

    def wrong(dhidden: Tensor, dout: Tensor, hidden: Tensor, right: Any = gemma_operations.geglu_backward) -> None:
        right(dhidden, dout, hidden)
        dhidden.mul_(1 + 1e-4)

    monkeypatch.setattr(gemma_operations, "geglu_backward", wrong)
    assert max(found.error for found in check_model(shape)) > TOLERANCE


def test_it_learns_resumes_and_is_evaluated(another: RunConfig, capsys: pytest.CaptureFixture) -> None:
    with open_run(another) as run:
        run.begin()
        run.advance(20)
    train(another)  # from its checkpoint
    losses = losses_of(another)
    assert list(losses) == list(range(1, 61))
    assert losses[1] == pytest.approx(math.log(257), abs=0.1) and losses[60] < 0.7 * losses[1]
    capsys.readouterr()
    assert main(["evaluate", another.out, "--precision", "fp32"]) == 0
    assert "loss" in capsys.readouterr().out


@pytest.mark.nightly(but=["bf16"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_whole_blocks_recomputed_have_the_same_bits(another: RunConfig, precision: str, tmp_path: Path) -> None:
    short = replace(another, steps=4, eval_every=0, save_every=0, precision=precision)
    runs = [replace(short, recompute=level, out=str(tmp_path / str(level))) for level in range(4)]
    for run in runs:
        train(run)
    assert len({tuple(losses_of(run).values()) for run in runs}) == 1


def test_what_it_has_not_is_refused(another: RunConfig) -> None:
    for settings, told in (
        ({"precision": "fp8"}, "architecture gemma has no forms in fp8"),
        ({"dropout": 0.1}, "architecture gemma has no dropout"),
        ({"lora": "rank=4", "init_from": "weights"}, "lora is for architecture gpt2 or llama or gemma3 or ol"),
        ({"llama": "tied"}, "llama is for --architecture llama, found 'tied' with gemma"),
    ):
        with pytest.raises(UsageError, match=told):
            check(replace(another, **settings))
