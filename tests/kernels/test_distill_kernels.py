"""The kernel of a divergence from a teacher, in float32 by Triton's interpreter, where there is no GPU
(tests/gpu/test_distill_on_gpu.py has the same on one)."""

import math
import os

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("a GPU runs tests/gpu/test_distill_on_gpu.py", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: it decides what @triton.jit makes of a kernel
pytest.importorskip("triton")

from tests.kernels.document_checks import check_taught_rows
from tests.kernels.memory_checks import Draw, case, check, kernels

SIZES = [(5, 2, 128), (3, 57, 128), (2, 128, 128), (2, 20011, 20096), (2, 4096, 4096), (2, 4096, 4224)]  # N, V, Vp


@pytest.fixture
def draw() -> Draw:
    return Draw(torch.float32, "cpu")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a padded column is minus infinity in both rows
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 15.0])
@pytest.mark.parametrize(("N", "V", "Vp"), SIZES)
def test_divergences(draw: Draw, N: int, V: int, Vp: int, softcap: float, reverse: bool) -> None:
    more = {"softcap": softcap, "teacher_softcap": 2 * softcap, "reverse": reverse}
    check(case(draw, "distill_forward_backward", N=N, V=V, Vp=Vp, **more))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("V", "Vp"), [(57, 128), (5000, 5120)])
def test_rows_without_a_target_and_rows_of_their_own_scale(draw: Draw, V: int, Vp: int, reverse: bool) -> None:
    check_taught_rows(draw, 5, V, Vp, reverse=reverse)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("reverse", [False, True])
def test_logits_far_apart(reverse: bool) -> None:
    """No exponential overflows, and a word that one model rules out has a finite loss."""
    logits = torch.tensor([[1e4, -1e4, 0.0, math.nan]])
    teacher, losses = torch.tensor([[-1e4, 1e4, 0.0, 6e4]]), torch.full((1,), math.nan)
    targets, scale = torch.tensor([0]), torch.ones(1)
    kernels.distill_forward_backward(losses, logits, teacher, targets, scale, vocab_size=3, reverse=reverse)
    assert losses.item() == 2e4
    assert logits.tolist() == [[0, 0, 0, 0] if reverse else [1, -1, 0, 0]]
