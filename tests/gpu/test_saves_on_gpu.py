"""Saves behind training on a GPU: the bytes of those that training waits for, from pinned memory."""

import dataclasses
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from handgrad.storage import checkpoint
from tests.test_runs import elsewhere, records, same_bits


def contents(run: RunConfig, step: int) -> dict[str, bytes]:
    folder = checkpoint.folder_of(Path(run.out) / "checkpoints", step)
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("settings", [{"precision": "bf16"}, {"precision": "bf16", "master_weights": False}])
def test_the_bytes_are_those_of_a_save_that_training_waits_for(settings: dict, config: RunConfig) -> None:
    settings = {"channels": 256, "num_heads": 4, "save_every": 3, "keep_checkpoints": 0, "sample_tokens": 0, **settings}
    behind = dataclasses.replace(config, device="cuda", **settings)
    train(behind)
    still = elsewhere(behind, "still", async_save=False)
    train(still)
    same_bits(behind.out, still.out, 12)
    for step in (3, 6, 9, 12):
        assert contents(behind, step) == contents(still, step) and len(contents(behind, step)) == 2
    assert " in pinned host memory" in (Path(behind.out) / "log.txt").read_text()
    assert len(records(behind.out, ("save",))) == 4
