"""Readings of a GPU's power, against an NVML made up here."""

import sys
import time
from types import ModuleType, SimpleNamespace

import pytest
import torch

from benchmarks.measuring import EnergySampler, energy
from handgrad.machine import power

CUDA = torch.device("cuda", 1)


class Nvml(ModuleType):
    """Two GPUs; torch sees only the second, as its device 1. Reads what the test sets."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.unsupported: set[str] = set()
        self.milliwatts, self.millijoules, self.bits, self.starts = 650_000, 5_000_000, 0x4, 0

    def ask(self, name: str, handle: str) -> None:
        assert handle == "the second GPU", "another GPU than torch's was read"
        if name in self.unsupported:
            raise self.NVMLError(name)

    def nvmlInit(self) -> None:
        if "init" in self.unsupported:
            raise self.NVMLError("no driver")
        self.starts += 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if "uuid" in self.unsupported:
            raise self.NVMLError("not found")
        return {"GPU-aaaa": "the first GPU", "GPU-bbbb": "the second GPU"}[uuid]

    def nvmlDeviceGetHandleByPciBusId(self, address: str) -> str:
        return {"00000000:0A:00.0": "the second GPU"}[address]

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self.ask("power", handle)
        return self.milliwatts

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self.ask("energy", handle)
        self.millijoules += 1_500_000
        return self.millijoules

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        self.ask("clock", handle)
        return {self.NVML_CLOCK_SM: 1455}[kind]

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        self.ask("temperature", handle)
        return 61

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        self.ask("events", handle)
        return self.bits

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 0x40


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch):
    fake = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    properties = SimpleNamespace(uuid="bbbb", pci_domain_id=0, pci_bus_id=10, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: {CUDA: properties}[device])
    power.sensors.cache_clear()
    yield fake
    power.sensors.cache_clear()


def test_a_snapshot(nvml: Nvml) -> None:
    expected = {"watts": 650.0, "sm_megahertz": 1455, "celsius": 61, "throttle": ["power cap"]}
    assert power.snapshot(CUDA) == expected
    nvml.bits = 0x24
    assert power.snapshot(CUDA) == {**expected, "throttle": ["power cap", "thermal limit"]}
    assert nvml.starts == 1, "the library is started once, not at every reading"


def test_the_pci_address_finds_the_gpu_that_the_uuid_does_not(nvml: Nvml) -> None:
    nvml.unsupported = {"uuid"}
    found = power.snapshot(CUDA)
    assert found is not None and found["watts"] == 650.0


def test_what_a_gpu_does_not_report_is_none(nvml: Nvml) -> None:
    nvml.unsupported = {"power", "clock", "temperature", "events"}
    expected = {"watts": None, "sm_megahertz": None, "celsius": None, "throttle": ["hardware thermal limit"]}
    assert power.snapshot(CUDA) == expected


def test_without_library_driver_or_gpu_there_is_no_reading(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert power.snapshot(torch.device("cpu")) is None
    nvml.unsupported = {"init"}
    assert power.snapshot(CUDA) is None
    nvml.unsupported = set()
    power.sensors.cache_clear()
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it now raises ImportError
    assert power.snapshot(CUDA) is None
    with power.Sampler(CUDA) as sampler:
        pass
    assert sampler.summary is None


def test_a_sampler_sees_what_happens_meanwhile(nvml: Nvml) -> None:
    with power.Sampler(CUDA, interval_seconds=0.002) as sampler:
        nvml.milliwatts = 350_000
        nvml.bits = 0
        before = len(sampler.readings)
        deadline = time.monotonic() + 600
        while len(sampler.readings) < before + 4 and time.monotonic() < deadline:
            time.sleep(0.002)
    summary = sampler.summary
    assert summary is not None and summary["readings"] == len(sampler.readings) >= 6
    assert (summary["watts"]["min"], summary["watts"]["max"]) == (350.0, 650.0)
    assert 350.0 < summary["watts"]["mean"] < 650.0
    assert 0 < summary["throttle"]["power cap"] < 1 and list(summary["throttle"]) == ["power cap"]
    assert summary["sm_megahertz"] == {"mean": 1455, "min": 1455, "max": 1455}
    assert not sampler.thread.is_alive()


def reading(watts: float | None) -> power.Reading:
    return {"watts": watts, "sm_megahertz": None, "celsius": None, "throttle": []}


READINGS = [(10.0, reading(100.0)), (11.0, reading(300.0)), (11.5, reading(None)), (13.0, reading(500.0))]


def test_what_no_reading_has_is_no_mean() -> None:
    summary = power.summarize(READINGS)
    assert summary["seconds"] == 3.0 and summary["watts"]["mean"] == 300.0 and summary["sm_megahertz"] is None


@pytest.mark.nightly  # of a measuring script: nothing that the package promises rests on it
def test_energy_is_the_counters_difference(nvml: Nvml) -> None:
    with EnergySampler(CUDA) as sampler:
        pass
    assert sampler.summary is not None and sampler.summary["watts"]["mean"] == 650.0
    assert sampler.summary["joules"] == 1500.0 and sampler.summary["energy_from"] == "counter"
    with EnergySampler(torch.device("cpu")) as sampler:
        pass
    assert sampler.summary is None


@pytest.mark.nightly  # of a measuring script: nothing that the package promises rests on it
def test_energy_without_a_counter_is_the_integral_of_power() -> None:
    expected = {"joules": 1.0 * 200 + 2.0 * 400, "energy_from": "watts over time"}
    assert energy(READINGS, None, 12.0) == expected
    assert energy([(0.0, reading(None)), (1.0, reading(None))], None, None)["joules"] is None
