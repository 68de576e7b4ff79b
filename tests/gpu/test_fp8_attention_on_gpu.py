"""Attention with quantised outputs on a CUDA GPU: bit for bit what the reference makes of the 16-bit outputs."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs a GPU that computes in fp8", allow_module_level=True)

from handgrad.joins.fp8.formats import E4M3, E5M2
from tests.documents import document_starts
from tests.kernels import fp8_attention_checks as checks
from tests.kernels.memory_checks import Draw

SHAPES = [(3, 4, 200, 64), (2, 3, 77, 32), (1, 1, 1, 16), (1, 2, 128, 128), (2, 2, 333, 96), (4, 12, 1024, 64)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("counting", [True, False])
@pytest.mark.parametrize(("B", "H", "T", "D"), SHAPES)
def test_bits(B: int, H: int, T: int, D: int, kind: torch.dtype, counting: bool, dtype: torch.dtype) -> None:
    checks.run(Draw(dtype, "cuda"), B, T, H, D, kind, counting=counting)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(
    ("H", "lengths", "D"), [(4, [[80, 1, 119]], 64), (12, [[181, 22, 821], [1024]], 64), (2, [[333]], 96)]
)
def test_bits_within_documents(H: int, lengths: list[list[int]], D: int, kind: torch.dtype, dtype: torch.dtype) -> None:
    starts = document_starts(lengths)
    checks.run(Draw(dtype, "cuda"), *starts.shape, H, D, kind, counting=True, starts=starts)


def test_bits_of_columns_in_another_format() -> None:
    checks.run(Draw(torch.bfloat16, "cuda"), 3, 200, 4, 64, E4M3, counting=True, columns=E5M2)
