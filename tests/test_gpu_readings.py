"""Readings of the GPU's sensors in a run's record, and their panels in the report."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from handgrad.errors import UsageError
from handgrad.machine import power
from handgrad.reports.plots import choose_plots
from handgrad.reports.reading import read_run
from handgrad.run.open import train
from handgrad.settings.config import RunConfig
from tests.test_report import make_run, report, run_lines
from tests.test_runs import records

READING = {"watts": 612.5, "sm_megahertz": 1500, "celsius": 61, "throttle": ["power cap"]}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices whose sensors were read; there is a GPU to read."""
    devices: list[torch.device] = []

    def snapshot(device: torch.device) -> dict[str, Any]:
        devices.append(device)
        return READING

    monkeypatch.setattr(power, "snapshot", snapshot)
    return devices


def test_readings_come_with_their_steps(config: RunConfig, asked: list[torch.device]) -> None:
    train(dataclasses.replace(config, gpu_every=5))
    assert records(config.out, ("gpu",)) == [{"kind": "gpu", "step": step, **READING} for step in (5, 10)]
    assert asked == [torch.device("cpu")] * 2, "one reading for each, of the run's own device"
    gpu = read_run(Path(config.out), "run").gpu
    assert [gpu.step.tolist(), gpu.watts.tolist(), gpu.sm_megahertz.tolist()] == [[5, 10], [612.5] * 2, [1500.0] * 2]


def test_no_readings_if_unwanted(config: RunConfig, asked: list[torch.device]) -> None:
    train(dataclasses.replace(config, gpu_every=0))
    assert asked == [] and records(config.out, ("gpu",)) == []


def test_no_readings_without_a_gpu(config: RunConfig) -> None:
    train(dataclasses.replace(config, gpu_every=1))
    assert records(config.out, ("gpu",)) == []


def test_the_interval_is_checked(config: RunConfig) -> None:
    with pytest.raises(UsageError, match="gpu_every must be a finite number, 0 or more"):
        train(dataclasses.replace(config, gpu_every=-1))


def with_readings(watts: float | None = 612.5) -> list[dict[str, Any]]:
    gpu = [{"kind": "gpu", "step": step, **READING, "watts": watts} for step in range(10, 61, 10)]
    return [*run_lines(), *gpu]


def test_panels_only_where_there_are_readings(tmp_path: Path) -> None:
    plain, read = make_run(tmp_path / "plain"), make_run(tmp_path / "read", with_readings())
    assert "GPU" not in report(tmp_path, plain).text
    page = report(tmp_path, plain, read)
    assert "GPU power, watts" in page.text and "GPU clock, MHz" in page.text
    assert (tmp_path / "report" / "page_gpu_watts.png").exists()
    names = [plot.name for plot in choose_plots([read_run(read, "read")])]
    assert names[-2:] == ["gpu_watts", "gpu_sm_megahertz"]


def test_a_quantity_that_is_not_reported_has_no_panel(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", with_readings(None)), "run")
    assert np.isnan(run.gpu.watts).all()
    names = [plot.name for plot in choose_plots([run])]
    assert "gpu_watts" not in names and names[-1] == "gpu_sm_megahertz"
