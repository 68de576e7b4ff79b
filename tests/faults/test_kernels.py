"""Kernels whose libraries are there and do not work, or whose cache is damaged: a run names the cause, and never turns slow
unasked."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from handgrad import backend
from handgrad.backend import choose_backend
from handgrad.errors import StorageError, UsageError
from handgrad.ops.cuda.launch import launch


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
