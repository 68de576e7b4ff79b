"""Kernels whose libraries are there and do not work, or whose cache is damaged: a run names the cause, and never turns slow
unasked."""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from handgrad.errors import StorageError, UsageError
from handgrad.machine import backend
from handgrad.machine.backend import choose_backend
from handgrad.ops.cuda.launch import launch, refuse_cut_code


def no_driver() -> None:
    raise RuntimeError("CUDA driver version is insufficient\nfor this library")


def no_library(name: str) -> None:
    raise OSError("libcublasLt.so.13: cannot open")


@pytest.mark.fault(42)
@pytest.mark.parametrize(
    ("imports", "cause"),
    [
        (no_library, "OSError: libcublasLt.so.13: cannot open"),
        (lambda name: SimpleNamespace(versions=no_driver), "RuntimeError: CUDA driver version is insufficient for this"),
    ],
    ids=["cannot be loaded", "cannot be launched"],
)
def test_a_slower_path_is_asked_for(imports: object, cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "why_no_kernels", lambda device: "")
    with monkeypatch.context() as patch:
        patch.setattr(backend.importlib, "import_module", imports)
        for name in ("auto", "kernels"):
            with pytest.raises(UsageError, match="the kernels cannot run here") as raised:
                choose_backend(name, torch.device("cuda"))
            assert cause in str(raised.value) and str(raised.value).endswith("or use --backend reference")
    asked = choose_backend("reference", torch.device("cuda"))
    assert asked.__name__ == "handgrad.ops.reference"


def raising(error: Exception) -> Callable[..., None]:
    def launched(*_: object) -> None:
        raise error

    return launched


@pytest.mark.fault(43)
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (json.JSONDecodeError("Expecting value", "{", 1), "Expecting value.*; remove it"),
        (RuntimeError("Triton Error [CUDA]: device kernel image is invalid"), "image is invalid.*; remove it"),
        (OSError(30, "Read-only file system"), "Read-only file system.*; name a folder .* TRITON_CACHE_DIR"),
    ],
    ids=["description", "code", "folder"],
)
def test_a_damaged_cache_is_named(error: Exception, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a launch; compiling ahead needs a GPU."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "/there")
    kernel: Any = {(1,): raising(error)}
    with pytest.raises(StorageError, match=f"the cache of compiled kernels in /there cannot be used .*{told}") as raised:
        launch(kernel, (1,))
    assert raised.value.exit_code == 74
    other = RuntimeError("a bug")
    with pytest.raises(RuntimeError) as passed:
        launch({(1,): raising(other)}, (1,))
    assert passed.value is other


def compiled_code() -> bytes:
    """A 64-bit ELF file as a compiler of kernels writes it: header, code, table of sections, table of segments. Its second
    section takes memory, and no bytes of the file."""
    code, sections, segments = bytes(range(200)), 64 + 200, 64 + 200 + 2 * 64
    header = struct.pack("<16s HHI QQQ I HHHHHH", b"\x7fELF\2\1", 2, 190, 1, 0, segments, sections, 0, 64, 56, 1, 64, 2, 0)
    table = b"".join(
        struct.pack("<II QQQQ II QQ", 0, kind, 0, 0, 64, size, 0, 0, 1, 0) for kind, size in ((1, 200), (8, 1 << 30))
    )
    return header + code + table + bytes(56)


@pytest.mark.fault(43)
def test_cut_code_is_not_loaded(tmp_path: Path) -> None:
    """The driver would read beyond its end, and the GPU would run what it finds there."""
    path, code = tmp_path / "forward.cubin", compiled_code()
    files = {"forward.json": "/nowhere", "forward.cubin": str(path)}
    path.write_bytes(code)
    refuse_cut_code(None, None, "forward", files, "")
    for length in (0, 10, 63, 64, len(code) // 2, len(code) - 57, len(code) - 1):
        path.write_bytes(code[:length])
        with pytest.raises(StorageError, match=rf"the code of forward has {length} of \d+ bytes\); remove it") as raised:
            refuse_cut_code(None, None, "forward", files, "")
        assert int(re.findall(r"of (\d+) bytes", str(raised.value))[0]) > length
