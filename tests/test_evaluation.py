"""Held-out loss counts every sample once."""

from pathlib import Path

from handgrad.config import ModelShape
from handgrad.data.batches import Batches
from handgrad.data.shards import open_dataset
from handgrad.evaluation.loss import mean_loss
from handgrad.ops import reference as ops
from tests.conftest import make_model


def test_the_loss_does_not_depend_on_the_micro_batch(shards: Path) -> None:
    """Six samples in micro-batches of 4, 1 and 6: the padding of the last one does not count."""
    batches = Batches(open_dataset(shards).splits["validation"], 16, 0, shuffle=False)
    found = []
    for batch in (4, 1, 6):
        model = make_model(ModelShape(257, 16, 2, 2, 32), batch, 16)
        found.append(mean_loss(model.shape, ops, model.weights, model.act, batches, samples=6))
    assert max(found) - min(found) < 1e-12
