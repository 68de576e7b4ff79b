"""GPU sensor readings from NVIDIA's driver: watts, clock, temperature, throttle reasons.

They come from NVML through the optional package `nvidia-ml-py`. Without the package, without a driver or on another device
there are no readings, and callers show none.
"""

import functools
import importlib
import threading
import time
from statistics import fmean
from types import ModuleType
from typing import Any, NamedTuple

import torch

# NVML's "clocks event reasons": bit to word (nvml.h, nvmlClocksEventReason*).
REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal limit",
    0x40: "hardware thermal limit",
    0x80: "power brake",
    0x100: "display clocks",
}
Reading = dict[str, Any]  # watts, sm_megahertz, celsius (each None if unsupported), and throttle, a list of words


class Sensors(NamedTuple):
    """The NVML library and its handle for one GPU."""

    nvml: ModuleType
    handle: Any

    def ask(self, name: str, *arguments: int, unit: float = 1) -> Any:
        """Calls the NVML function `name`; the result in units of `unit`, or None if this GPU or driver lacks it."""
        try:
            value = getattr(self.nvml, name)(self.handle, *arguments)
        except (self.nvml.NVMLError, AttributeError):  # an older nvidia-ml-py lacks the newer names
            return None
        return value if unit == 1 else value / unit

    def read(self) -> Reading:
        bits = self.ask("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:
            bits = self.ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        return {
            # Board power; on Ampere and later the driver averages it over the last second.
            "watts": self.ask("nvmlDeviceGetPowerUsage", unit=1e3),
            "sm_megahertz": self.ask("nvmlDeviceGetClockInfo", self.nvml.NVML_CLOCK_SM),
            "celsius": self.ask("nvmlDeviceGetTemperature", self.nvml.NVML_TEMPERATURE_GPU),
            "throttle": [word for bit, word in REASONS.items() if (bits or 0) & bit],
        }


@functools.cache
def sensors(device: torch.device) -> Sensors | None:
    """The sensors of a torch device, or None.

    NVML numbers all GPUs of the machine, torch only the GPUs in CUDA_VISIBLE_DEVICES, so this matches them by UUID, or by
    PCI address if NVML does not know the UUID."""
    if device.type != "cuda":
        return None
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        properties: Any = torch.cuda.get_device_properties(device)
        try:
            return Sensors(nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}"))
        except nvml.NVMLError:
            domain, bus, slot = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
            return Sensors(nvml, nvml.nvmlDeviceGetHandleByPciBusId(f"{domain:08X}:{bus:02X}:{slot:02X}.0"))
    except (nvml.NVMLError, AttributeError):
        return None


def snapshot(device: torch.device) -> Reading | None:
    """The current reading; None without an NVIDIA GPU or without the package nvidia-ml-py."""
    monitor = sensors(device)
    return None if monitor is None else monitor.read()


class Sampler:
    """Reads the sensors every `interval_seconds` in a thread while a `with` block runs; `summary` has the result.

    with Sampler(device) as sampler: ...
    sampler.summary["watts"]["mean"]"""

    def __init__(self, device: torch.device, interval_seconds: float = 0.1):
        self.sensors = sensors(device)
        self.interval_seconds = interval_seconds
        self.readings: list[tuple[float, Reading]] = []  # (seconds on the clock, reading)
        self.summary: dict[str, Any] | None = None

    def __enter__(self) -> "Sampler":
        if self.sensors is not None:
            self.stopped = threading.Event()
            self.sample()
            self.thread = threading.Thread(target=self.sample_until_stopped, daemon=True)
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.sensors is not None:
            self.stopped.set()
            self.thread.join()
            self.sample()
            self.summary = summarize(self.readings)

    def sample_until_stopped(self) -> None:
        while not self.stopped.wait(self.interval_seconds):
            self.sample()

    def sample(self) -> None:
        assert self.sensors is not None
        self.readings.append((time.perf_counter(), self.sensors.read()))


def summarize(readings: list[tuple[float, Reading]]) -> dict[str, Any]:
    """Mean, min and max of each quantity (None if unsupported), and the share of readings with each throttle reason."""
    summary: dict[str, Any] = {"readings": len(readings), "seconds": readings[-1][0] - readings[0][0]}
    for name in ("watts", "sm_megahertz", "celsius"):
        values = [values[name] for _, values in readings if values[name] is not None]
        summary[name] = {"mean": fmean(values), "min": min(values), "max": max(values)} if values else None
    words = [word for _, values in readings for word in values["throttle"]]
    summary["throttle"] = {word: words.count(word) / len(readings) for word in REASONS.values() if word in words}
    return summary
