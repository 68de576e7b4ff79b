"""Faults of `worker`: single bits that flip in one rank's memory."""

from collections.abc import Callable

import torch

from handgrad.joins.parallel.gradient_sync import GradientSync
from handgrad.joins.parallel.step import ParallelStep
from handgrad.training.step import TrainStep
from tests.faults.firing import fired

EXPONENT = 30  # the highest bit of a float32's exponent


def flipped(step: int) -> None:
    """The lowest bit of one weight that rank 0 updates, after the step's weights have come from their owners."""
    original = TrainStep.finish

    def finish(training: ParallelStep, now: int) -> None:
        original(training, now)
        if now == step:
            training.sync.await_all_weights()
            state = training.state
            bits = state.parameters.view(torch.int16 if state.parameters.itemsize == 2 else torch.int32)
            bits[state.design.buckets[2].start + 5] ^= 1
            fired()

    TrainStep.finish = finish


def flipped_gradient(*, times: int = 1000, element: int | None = None) -> Callable[[int], None]:
    """The highest bit of the exponent of one of this rank's own gradients, before it is sent, in the first `times` attempts
    at a step: of another one in each, or always of the same `element`."""

    def install(step: int) -> None:
        original, left = GradientSync.send_gradients, [times]

        def send(sync: GradientSync, name: str) -> None:
            if sync.step == step and name == "blocks.1" and left[0]:
                left[0] -= 1
                gradients = sync.gradients[sync.gradient_ranges[name]].view(torch.int32)
                gradients[int(gradients.nonzero()[left[0] if element is None else element])] ^= 1 << EXPONENT
                fired()
            original(sync, name)

        GradientSync.send_gradients = send

    return install


FAULTS: dict[str, Callable[[int], None]] = {
    "flip": flipped,
    "flip-gradient": flipped_gradient(times=1),
    "flip-gradients": flipped_gradient(times=2),
    "flip-gradient-always": flipped_gradient(element=100),
}
