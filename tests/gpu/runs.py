"""A run, the same again, and one that goes on from a checkpoint."""

import shutil
from pathlib import Path

from handgrad.config import RunConfig
from handgrad.run.start import train
from tests.test_runs import elsewhere, same_bits


def leave_the_same_bits(config: RunConfig) -> None:
    """The last one from the checkpoint of step 8 of 12."""
    again = elsewhere(config, "again")
    train(config)
    train(again)
    same_bits(config.out, again.out, config.steps)
    shutil.rmtree(Path(again.out) / "checkpoints" / "step_00000012")
    train(again)
    same_bits(config.out, again.out, config.steps)
