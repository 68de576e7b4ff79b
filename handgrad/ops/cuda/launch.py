"""Launches Triton kernels, or records the launches to compile the kernels ahead of time.

A damaged file in Triton's cache of compiled kernels, or a folder that cannot be written, ends a run with a one-line error.
Triton recompiles a kernel only if the list of its files is damaged. It passes the driver only the address of a kernel's
code, and the driver reads as far as the code's headers say: from a truncated file it runs whatever follows in memory, and
the GPU may hang for good. So this module compares the code's length with its headers before Triton loads it.
"""

import functools
import json
import os
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import triton
from triton.runtime.cache import triton_key

from handgrad.errors import StorageError

Launch = tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]  # grid, arguments, options
Noted = dict[Any, list[Launch]]  # by kernel

# From a 64-bit ELF header: offsets of the segment and section tables; sizes and counts of their entries.
ELF_HEADER = struct.Struct("<32x Q Q 6x H H H H 2x")
SECTION = struct.Struct("<4x I 16x Q Q 24x")  # type, offset and size of a section; type 8 has no bytes in the file
NO_BYTES = 8

_noted: ContextVar[Noted | None] = ContextVar("noted", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launches the kernel on the current stream; inside `collecting`, records the launch instead. Raises `StorageError`."""
    noted = _noted.get()
    if noted is None:
        try:
            kernel[grid](*arguments, **options)
        except (OSError, RuntimeError, ValueError) as error:
            raise cache_error(error) from None
    else:
        noted.setdefault(kernel, []).append((grid, arguments, options))


@functools.cache
def load_ahead() -> Thread:
    """Does, once and beside the loading of weights, what Triton does at a process's first launch: it hashes its own files,
    which takes half a second, and imports Gluon."""

    def load() -> None:
        triton_key()
        import triton.experimental.gluon.nvidia.hopper  # noqa: F401

    thread = Thread(target=load, daemon=True)
    thread.start()
    return thread


@contextmanager
def collecting() -> Iterator[Noted]:
    """Records this thread's launches instead of running them."""
    noted: Noted = {}
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def compile_ahead(*launches: Callable[[], None]) -> None:
    """Compiles all kernels of `launches` at once, one thread per kernel, instead of each at its first launch. (The compiler
    spends much of its time outside Python's lock.)

    Calls `launches` but records their kernels instead of running them. What is not Triton's does run: it leaves nonsense in
    gradients, activations and scratch, and without a verdict it does not change weights and moments."""
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
    """True if a kernel may begin before its predecessor has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def overlapping(tensor: torch.Tensor, warps: int) -> dict[str, bool | int]:
    """Options for a launch that may overlap with the previous one: the kernel's switch and the driver's."""
    if overlaps(tensor.device):
        return {"OVERLAPS": True, "launch_pdl": True, "num_warps": warps}
    return {"OVERLAPS": False, "num_warps": warps}


def cache_error(error: Exception) -> Exception:
    """A `StorageError` if the error comes from Triton's cache; else the error itself."""
    damaged = isinstance(error, json.JSONDecodeError) or "kernel image" in str(error)
    if not damaged and not isinstance(error, OSError):
        return error
    return unusable(str(error), "remove it" if damaged else "name a folder that can be written with TRITON_CACHE_DIR")


def unusable(fault: str, remedy: str) -> StorageError:
    folder = os.environ.get("TRITON_CACHE_DIR") or "~/.triton/cache"
    return StorageError(f"the cache of compiled kernels in {folder} cannot be used ({fault}); {remedy}")


def code_bytes(code: bytes) -> int:
    """Bytes of a compiled kernel according to its headers; more than it has if the headers themselves are truncated."""
    if len(code) < ELF_HEADER.size:
        return ELF_HEADER.size
    segments, sections, segment_bytes, segment_count, section_bytes, section_count = ELF_HEADER.unpack_from(code)
    end = max(segments + segment_bytes * segment_count, sections + section_bytes * section_count)
    if end > len(code):
        return end
    headers = (SECTION.unpack_from(code, sections + section_bytes * number) for number in range(section_count))
    return max([end, *(offset + size for kind, offset, size in headers if kind != NO_BYTES)])


def refuse_cut_code(_module: Any, _function: Any, name: str, files: dict[str, str], _hash: str) -> None:
    """Before Triton loads a kernel, raises `StorageError` if its code is shorter than its headers say."""
    for path in (Path(path) for file, path in files.items() if file.endswith(".cubin")):
        expected, actual = code_bytes(code := path.read_bytes()), len(code)
        if expected > actual:
            raise unusable(f"the code of {name} has {actual} of {expected} bytes", "remove it")


triton.knobs.runtime.kernel_load_start_hook.add(refuse_cut_code)
