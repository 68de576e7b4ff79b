"""Triton's cache of compiled kernels: a damaged file, or a folder that cannot be written, ends a run with one line.

Triton makes a kernel anew only where the list of its files is damaged. It hands a kernel's code to the driver by its
address alone, and the driver reads as far as the code's headers say: of a file that was cut it runs whatever follows in
memory, and the GPU may never come back. So the code's length is compared with its headers before it is loaded.
"""

import json
import os
import struct
from pathlib import Path
from typing import Any

import triton

from handgrad.errors import StorageError

# Of a 64-bit ELF header: places of the tables of segments and sections; sizes and counts of their entries.
ELF_HEADER = struct.Struct("<32x Q Q 6x H H H H 2x")
SECTION = struct.Struct("<4x I 16x Q Q 24x")  # kind, place and size of a section; one of kind 8 has no bytes
NO_BYTES = 8


def cache_error(error: Exception) -> Exception:
    """A `StorageError` if the error is one of Triton's cache; else the error itself."""
    damaged = isinstance(error, json.JSONDecodeError) or "kernel image" in str(error)
    if not damaged and not isinstance(error, OSError):
        return error
    return unusable(str(error), "remove it" if damaged else "name a folder that can be written with TRITON_CACHE_DIR")


def unusable(found: str, remedy: str) -> StorageError:
    folder = os.environ.get("TRITON_CACHE_DIR") or "~/.triton/cache"
    return StorageError(f"the cache of compiled kernels in {folder} cannot be used ({found}); {remedy}")


def code_bytes(code: bytes) -> int:
    """Bytes of a compiled kernel as its headers say; more than it has if the headers are cut themselves."""
    if len(code) < ELF_HEADER.size:
        return ELF_HEADER.size
    segments, sections, segment_bytes, segment_count, section_bytes, section_count = ELF_HEADER.unpack_from(code)
    end = max(segments + segment_bytes * segment_count, sections + section_bytes * section_count)
    if end > len(code):
        return end
    found = (SECTION.unpack_from(code, sections + section_bytes * number) for number in range(section_count))
    return max([end, *(place + size for kind, place, size in found if kind != NO_BYTES)])


def refuse_cut_code(_module: Any, _function: Any, name: str, files: dict[str, str], _hash: str) -> None:
    """Raises `StorageError` if the code of the kernel, which is about to be loaded, ends before its headers say."""
    for path in (Path(path) for file, path in files.items() if file.endswith(".cubin")):
        expected, found = code_bytes(code := path.read_bytes()), len(code)
        if expected > found:
            raise unusable(f"the code of {name} has {found} of {expected} bytes", "remove it")


triton.knobs.runtime.kernel_load_start_hook.add(refuse_cut_code)
