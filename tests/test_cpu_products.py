"""Float32 products on a CPU by either library, also with the instructions of other CPUs: values, and sums added to."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from handgrad.machine import processor
from handgrad.ops.cpu import linear

ROOT = Path(__file__).parents[1]
LIBRARIES = {"oneDNN": False, "MKL": True}
SIZES = [(5, 7, 3), (130, 33, linear.ACCUMULATE_ROWS + 76)]
NUMBERS = (1, 2, 3, 4)  # of threads
# Libraries take at most these. `ATEN_CPU_CAPABILITY` is no limit but an order, so it names nothing that a CPU may lack.
INSTRUCTIONS = {
    "AVX-512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "default"},
}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def drawn(N: int, I: int, O: int) -> list[Tensor]:
    """Input, weight, bias, and the output's gradient."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=draw) for size in ((N, I), (O, I), (O,), (N, O))]


def products(N: int, I: int, O: int) -> list[Tensor]:
    """Output, and gradients of input, weight and bias, the last two onto ones."""
    inp, weight, bias, dout = drawn(N, I, O)
    out, dinp = torch.full((N, O), torch.nan), torch.full((N, I), torch.nan)
    dweight, dbias = torch.ones(O, I), torch.ones(O)
    linear.linear_forward(out, inp, weight, bias)
    linear.linear_backward(dinp, dweight, dbias, dout, inp, weight)
    return [out, dinp, dweight, dbias]


def check_values(values: list[Tensor], N: int, I: int, O: int) -> None:
    """A sum of K products and one more number errs by at most n u / (1 - n u) of the sum of their magnitudes, in any order:
    n = K + 1, u = 2^-24; Higham, Accuracy and Stability of Numerical Algorithms, section 3.1."""
    inp, weight, bias, dout = (t.double() for t in drawn(N, I, O))

    def sums(inp: Tensor, weight: Tensor, bias: Tensor, dout: Tensor) -> list[Tensor]:
        return [inp @ weight.t() + bias, dout @ weight, 1 + dout.t() @ inp, 1 + dout.sum(0)]

    exact, magnitudes = sums(inp, weight, bias, dout), sums(inp.abs(), weight.abs(), bias.abs(), dout.abs())
    for value, wanted, magnitude, K in zip(values, exact, magnitudes, (I, O, N, N), strict=False):
        nu = (K + 1) * 2.0**-24
        assert ((value.double() - wanted).abs() <= nu / (1 - nu) * magnitude).all()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("library", LIBRARIES)
def test_either_library(library: str, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's bits do not depend on the number of threads; MKL's do not on Intel CPUs, in the mode of `threads.choose`."""
    monkeypatch.setattr(linear, "MKL_IS_AS_FAST", LIBRARIES[library])
    first: list[Tensor] = []
    for number in NUMBERS:
        torch.set_num_threads(number)
        values = products(*sizes)
        check_values(values, *sizes)
        first = first or values
        if library == "oneDNN" or processor.is_intel():
            assert all(map(torch.equal, first, values)), f"other bits with {number} threads"


@pytest.mark.parametrize(("rows", "outputs", "few"), [(1, 2051, True), (8, 2051, True), (9, 2051, False), (1, 51, False)])
def test_few_rows_of_a_large_weight(rows: int, outputs: int, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go to oneDNN beside MKL, where torch has oneDNN."""
    few = few and torch.backends.mkldnn.is_available()
    monkeypatch.setattr(linear, "MKL_IS_AS_FAST", True)
    calls, product = [], linear.gemm
    monkeypatch.setattr(linear, "gemm", lambda *arguments: calls.append(arguments) or product(*arguments))
    inp, weight, bias, _ = drawn(rows, 515, outputs)
    outputs_by_threads = []
    for number in NUMBERS:
        torch.set_num_threads(number)
        out = torch.full((rows, outputs), torch.nan)
        linear.linear_forward(out, inp, weight, bias)
        check_values([out], rows, 515, outputs)
        outputs_by_threads.append(out)
    assert len(calls) == few * len(NUMBERS)
    if few or processor.is_intel():
        assert all(torch.equal(outputs_by_threads[0], out) for out in outputs_by_threads)


@pytest.mark.nightly(but=["AVX2"])
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_the_instructions_of_other_cpus(instructions: str) -> None:
    """The tests above once more, as this CPU would run them with fewer instructions."""
    tests = ["-k", "either_library or few_rows", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    environment = {**os.environ, **INSTRUCTIONS[instructions]}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *tests], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout
