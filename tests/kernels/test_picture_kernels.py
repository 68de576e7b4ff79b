"""Group norm in float32 by Triton's interpreter, where there is no GPU (tests/gpu has the same on one)."""

import os

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("a GPU runs tests/gpu/test_vqvae_on_gpu.py", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: it decides what @triton.jit makes of a kernel
pytest.importorskip("triton")

from handgrad.ops.cuda import groupnorm
from tests.kernels.memory_checks import Draw, both, check


@pytest.mark.parametrize(
    ("B", "Y", "X", "C", "Q"), [(2, 3, 5, 8, 2), (1, 1, 1, 1, 1), (3, 8, 8, 64, 8), (2, 4, 4, 36, 3), (1, 2, 3, 12, 1)]
)
def test_groupnorm(B: int, Y: int, X: int, C: int, Q: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program walks over several tiles of places, of which the last is not full."""
    monkeypatch.setattr(groupnorm, "ELEMENTS", 64)
    for each in both(Draw(torch.float32), "groupnorm", B=B, Y=Y, X=X, H=1, D=C, Q=Q):
        check(each)
