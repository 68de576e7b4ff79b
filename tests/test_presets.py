"""The preset of first runs: calm from the first step on."""

import dataclasses
from pathlib import Path

import pytest

from handgrad import presets
from handgrad.run.start import train
from tests.test_runs import records


@pytest.mark.parametrize("seed", [1337, 1])
def test_a_first_run_has_no_spikes(shards: Path, tmp_path: Path, seed: int) -> None:
    quiet = {"eval_every": 0, "sample_tokens": 0, "save_every": 0, "device": "cpu"}
    config = dataclasses.replace(presets.tiny(), data=str(shards), out=str(tmp_path / "run"), steps=150, seed=seed, **quiet)
    train(config)
    losses = [line["loss"] for line in records(tmp_path / "run", ("step",))]
    rises = [loss - sum(losses[at - 3 : at]) / 3 for at, loss in enumerate(losses) if at >= 3]
    assert max(rises) < 0.3, f"the loss rises by {max(rises):.2f} at step {rises.index(max(rises)) + 4}"
