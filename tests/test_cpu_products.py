"""Float32 products on a CPU by either library, whatever CPU this is: the values, and sums that are added to."""

import pytest
import torch
from torch import Tensor

from handgrad.ops import reference
from handgrad.ops.cpu import linear

LIBRARIES = {"oneDNN": False, "MKL": True}


def products(ops, N: int, I: int, O: int, dtype: torch.dtype) -> list[Tensor]:
    """Output, and gradients of input, weight and bias, the last two onto what is there."""
    draw = torch.Generator().manual_seed(0)
    inp, weight, bias, dout = (torch.randn(size, generator=draw).to(dtype) for size in ((N, I), (O, I), (O,), (N, O)))
    out, dinp = torch.full((N, O), torch.nan, dtype=dtype), torch.full((N, I), torch.nan, dtype=dtype)
    dweight, dbias = torch.ones(O, I, dtype=dtype), torch.ones(O, dtype=dtype)
    ops.linear_forward(out, inp, weight, bias)
    ops.linear_backward(dinp, dweight, dbias, dout, inp, weight)
    return [out, dinp, dweight, dbias]


@pytest.mark.parametrize("sizes", [(5, 7, 3), (130, 33, linear.ACCUMULATE_ROWS + 76)], ids=str)
@pytest.mark.parametrize("library", LIBRARIES)
def test_either_library(library: str, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "MKL_IS_AS_FAST", LIBRARIES[library])
    exact = products(reference, *sizes, torch.float64)
    by_formula, found = (products(ops, *sizes, torch.float32) for ops in (reference, linear))
    for value, formula, wanted in zip(found, by_formula, exact, strict=True):
        bound = 2 * (formula.double() - wanted).abs().max() + torch.finfo(torch.float32).eps * wanted.abs().max()
        assert (value.double() - wanted).abs().max() <= bound
