"""Faults in a rank's own work: numbers that are not finite, an assert that fails on the device, slowness."""

import time
from collections.abc import Callable

import torch

from handgrad.joins.parallel.step import ParallelStep
from handgrad.training.step import TrainStep
from tests.faults.firing import fired

SLOW_SECONDS = 0.2  # a lane


def in_every_step(first: int, act: Callable[[TrainStep], object], *, last: int | None = None) -> None:
    """`act` at the beginning of the steps from `first` to `last`."""
    original = TrainStep.begin

    def begin(training: TrainStep, step: int) -> None:
        if step == first:
            fired()
        if step >= first and (last is None or step <= last):
            act(training)
        original(training, step)

    TrainStep.begin = begin


def poison(training: TrainStep) -> None:
    training.state.weights.lnf_bias[0] = float("nan")


def fail_on_device(training: TrainStep) -> None:
    """Nothing is noticed before the host waits for the device the next time."""
    torch._assert_async(torch.zeros(1, dtype=torch.bool, device=training.design.device))


def slow(first: int) -> None:
    original = ParallelStep.run_lane

    def run_lane(training: ParallelStep, step: int, lane: int) -> None:
        if step >= first:
            time.sleep(SLOW_SECONDS)
        original(training, step, lane)

    fired()
    ParallelStep.run_lane = run_lane


FAULTS: dict[str, Callable[[int], None]] = {
    "poison": lambda step: in_every_step(step, poison),
    "assert": lambda step: in_every_step(step, fail_on_device, last=step),
    "sleep": slow,
}
