"""Kernels whose libraries are there and do not work: a run names the cause, and never turns slow unasked."""

from types import SimpleNamespace

import pytest
import torch

from handgrad import backend
from handgrad.backend import choose_backend
from handgrad.errors import UsageError


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
