"""The preset of first runs: calm from the first step on."""

import dataclasses
from pathlib import Path

import pytest

from handgrad.data.prepare import PrepareOptions, prepare
from handgrad.run.open import train
from handgrad.settings import presets
from tests.test_runs import records


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Bytes of a few stories: the data on which a first run is most easily upset."""
    folder = tmp_path_factory.mktemp("stories") / "shards"
    prepare(PrepareOptions("stories", folder, tokenizer="bytes", documents=1000, workers=1))
    return str(folder)


@pytest.mark.nightly(but=["1337"])
@pytest.mark.parametrize("seed", [1337, 1, 2, 3])
def test_a_first_run_has_no_spikes(stories: str, tmp_path: Path, seed: int) -> None:
    quiet = {"eval_every": 0, "sample_tokens": 0, "save_every": 0, "device": "cpu"}
    config = dataclasses.replace(presets.tiny(), data=stories, out=str(tmp_path / "run"), steps=80, seed=seed, **quiet)
    train(config)
    losses = [line["loss"] for line in records(tmp_path / "run", ("step",))]
    rises = [loss - min(losses[:at]) for at, loss in enumerate(losses) if at]
    assert max(rises) < 0.5, f"the loss rises by {max(rises):.2f} at step {rises.index(max(rises)) + 2} of {losses}"
    assert losses[-1] < losses[0] - 2
