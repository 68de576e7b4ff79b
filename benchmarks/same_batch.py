"""Steps of handgrad on one random batch that is already in place: reading data is not what is measured."""

import time
from typing import Any

import torch

from handgrad.machine import devices
from handgrad.run.assemble import Assembly, allocate, bind
from handgrad.training.design import Design


class SameBatch:
    """A feed that leaves the batch as it is."""

    def fill(self, first_sample: int) -> None:
        pass


def assemble_on_one_batch(design: Design, vocab_size: int) -> Assembly:
    """Initial weights, and random ones in the place of those that a run with adapters would load."""
    training, generator = bind(*allocate(design), feed=SameBatch()), torch.Generator().manual_seed(0)
    for row in design.frozen:
        training.load_frozen_weight(row, 0.02 * torch.randn(row.stored_shape, generator=generator))
    for tokens in (training.state.activations.tokens, training.state.activations.targets):
        tokens.copy_(torch.randint(vocab_size, tokens.shape, generator=generator))
    return training


def timed_step(training: Assembly, step: int) -> dict[str, Any]:
    """Makes a step, from an idle device to an idle device: its seconds, loss and gradient norm."""
    devices.synchronize(training.design.device)
    begun = time.perf_counter()
    result = training.stepper.step(step)
    devices.synchronize(training.design.device)
    return {"seconds": time.perf_counter() - begun, "loss": result.loss, "norm": result.norm}
