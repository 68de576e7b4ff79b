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


@pytest.mark.parametrize(("rows", "outputs", "few"), [(1, 2051, True), (8, 2051, True), (9, 2051, False), (1, 51, False)])
def test_few_rows_of_a_large_weight(rows: int, outputs: int, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go to oneDNN beside MKL, and no bit depends on the number of threads. A sum of K products loses at most K + 1
    times 2^-24 of their sizes: Higham, Accuracy and Stability of Numerical Algorithms, section 3.1."""
    monkeypatch.setattr(linear, "MKL_IS_AS_FAST", True)
    asked, product = [], linear.product
    monkeypatch.setattr(linear, "product", lambda *given: asked.append(given) or product(*given))
    draw = torch.Generator().manual_seed(0)
    inp, weight, bias = (torch.randn(size, generator=draw) for size in ((rows, 515), (outputs, 515), (outputs,)))
    found, threads = [], torch.get_num_threads()
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        found.append(torch.full((rows, outputs), torch.nan))
        linear.linear_forward(found[-1], inp, weight, bias)
    torch.set_num_threads(threads)
    assert len(asked) == (3 if few else 0)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    wanted = torch.addmm(bias.double(), inp.double(), weight.double().t())
    sizes = torch.addmm(bias.abs(), inp.abs(), weight.abs().t()).double()
    assert ((found[0].double() - wanted).abs() <= 516 * 2.0**-24 * sizes).all()
