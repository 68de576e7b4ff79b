"""All Triton kernels of a step compiled at once, instead of each at its first launch, one after the other."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from triton.runtime.jit import JITFunction

Call = tuple[tuple[Any, ...], dict[str, Any]]


def compile_ahead(*launches: Callable[[], None]) -> None:
    """Calls `launches` with every Triton launch in them noted instead of made, then compiles what was noted, a thread per
    kernel. (The compiler spends much of its time outside of Python's lock.) Products and copies in them do run: weights and
    moments are only read, but gradients, activations and scratch hold nonsense afterwards."""
    noted: dict[JITFunction, list[Call]] = {}
    launch = JITFunction.run

    def note(function: JITFunction, *arguments: Any, **settings: Any) -> None:
        noted.setdefault(function, []).append((arguments, settings))

    JITFunction.run = note
    try:
        for each in launches:
            each()
    finally:
        JITFunction.run = launch

    def compile_all(function: JITFunction) -> None:
        for arguments, settings in noted[function]:
            launch(function, *arguments, **{**settings, "warmup": True})

    if noted:
        device = {"initializer": torch.cuda.set_device, "initargs": (torch.cuda.current_device(),)}
        with ThreadPoolExecutor(min(len(noted), os.cpu_count() or 1), **device) as threads:
            list(threads.map(compile_all, noted))
