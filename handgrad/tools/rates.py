"""The rates of this machine under load: of launches, of its memory, of its GEMMs."""

import time
from collections.abc import Callable

import torch

from handgrad.machine import devices
from handgrad.ops import reference


def seconds_of(device: torch.device, launch: Callable[[], object], seconds: float, burst: int) -> float:
    """Mean seconds of a launch under load: the second half of `seconds` of nothing else."""
    count, started, first = 0, time.perf_counter(), 0.0
    while (now := time.perf_counter() - started) < seconds or count == 0:
        if now >= seconds / 2 and not first:
            first, count = now, 0
        for _ in range(burst):
            launch()
        devices.synchronize(device)
        count += burst
    return (time.perf_counter() - started - first) / count


def launch_milliseconds(launch: Callable[[], object], count: int) -> float:
    """Mean milliseconds of one of `count` launches in a row, by the events of a CUDA GPU."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        launch()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / count


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy of 2 GB on the device (64 MB on a CPU)."""
    source = torch.ones(2_000_000_000 if device.type == "cuda" else 64_000_000, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    large = device.type == "cuda"
    return 2 * source.numel() / seconds_of(device, lambda: target.copy_(source), 0.5 if large else 0.1, 10 if large else 1)


def gemm_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """FLOP/s of a square `linear_forward` under load for `seconds`: of 1024 rows on a CPU, of 8192 elsewhere."""
    size, burst = 1024 if device.type == "cpu" else 8192, 20 if device.type == "cuda" else 1
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / seconds_of(device, lambda: reference.linear_forward(out, a, b, None), seconds, burst)
