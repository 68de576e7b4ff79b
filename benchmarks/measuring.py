"""The cost of launches on a CUDA GPU: milliseconds by its events, joules by its driver."""

import itertools
from collections.abc import Callable
from typing import Any

import torch

from handgrad.machine.power import Reading, Sampler


def launch_milliseconds(launch: Callable[[], object], count: int) -> float:
    """Mean milliseconds of one of `count` launches in a row, by the events of a CUDA GPU."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        launch()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / count


class EnergySampler(Sampler):
    """A sampler whose `summary` also has the joules of the `with` block."""

    def __enter__(self) -> "EnergySampler":
        self.joules_before = self.joules()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self.summary is not None:
            self.summary |= energy(self.readings, self.joules_before, self.joules())

    def joules(self) -> float | None:
        """Energy since the driver was loaded: only differences mean something."""
        return None if self.sensors is None else self.sensors.ask("nvmlDeviceGetTotalEnergyConsumption", unit=1e3)


def energy(
    readings: list[tuple[float, Reading]], joules_before: float | None, joules_after: float | None
) -> dict[str, Any]:
    """The joules (None if unsupported) and their source: the driver's counter, or else watts integrated over time."""
    if joules_before is not None and joules_after is not None:
        return {"joules": joules_after - joules_before, "energy_from": "counter"}
    power = [(seconds, values["watts"]) for seconds, values in readings if values["watts"] is not None]
    pairs = itertools.pairwise(power)
    joules = sum((later - start) * (first + second) / 2 for (start, first), (later, second) in pairs)
    return {"joules": joules if len(power) > 1 else None, "energy_from": "watts over time"}
