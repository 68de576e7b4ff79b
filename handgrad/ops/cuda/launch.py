"""Launches Triton kernels, or notes the launches, to compile the kernels ahead of them."""

import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from handgrad.ops.cuda.kernel_cache import cache_error

Launch = tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]  # grid, arguments, options
Noted = dict[Any, list[Launch]]  # by kernel

_noted: ContextVar[Noted | None] = ContextVar("noted", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launches the kernel on the current stream; inside `collecting`, notes the launch instead."""
    noted = _noted.get()
    if noted is None:
        try:
            kernel[grid](*arguments, **options)
        except (OSError, RuntimeError, ValueError) as error:
            raise cache_error(error) from None
    else:
        noted.setdefault(kernel, []).append((grid, arguments, options))


@contextmanager
def collecting() -> Iterator[Noted]:
    """Notes this thread's launches instead of making them."""
    noted: Noted = {}
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def compile_ahead(*launches: Callable[[], None]) -> None:
    """Compiles all kernels of `launches` at once, a thread per kernel, instead of each at its first launch. (The compiler
    spends much of its time outside of Python's lock.)

    Calls `launches` with their kernels noted instead of launched. Products and copies in them do run: weights and moments
    are only read, but gradients, activations and scratch hold nonsense afterwards.
    """
    with collecting() as noted:
        for each in launches:
            each()

    def compile_all(kernel: Any) -> None:
        for grid, arguments, options in noted[kernel]:
            try:
                kernel.run(*arguments, grid=grid, warmup=True, **options)
            except (OSError, RuntimeError, ValueError) as error:
                raise cache_error(error) from None

    if noted:
        device = {"initializer": torch.cuda.set_device, "initargs": (torch.cuda.current_device(),)}
        with ThreadPoolExecutor(min(len(noted), os.cpu_count() or 1), **device) as threads:
            list(threads.map(compile_all, noted))


@functools.cache
def overlaps(device: torch.device) -> bool:
    """True if a kernel may begin before the one before it has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def overlapping(tensor: torch.Tensor, warps: int) -> dict[str, bool | int]:
    """The options of a launch that may overlap with the one before it: the kernel's switch, and the driver's."""
    if overlaps(tensor.device):
        return {"OVERLAPS": True, "launch_pdl": True, "num_warps": warps}
    return {"OVERLAPS": False, "num_warps": warps}
