"""The kernel of a divergence from a teacher, in float32 by Triton's interpreter, where there is no GPU
(tests/gpu/test_distill_on_gpu.py has the same on one)."""

import os

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("a GPU runs tests/gpu/test_distill_on_gpu.py", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: it decides what @triton.jit makes of a kernel
pytest.importorskip("triton")

from tests.kernels.memory_checks import Draw, case, check

SIZES = [(5, 2, 128), (3, 57, 128), (2, 128, 128), (2, 20011, 20096), (2, 4096, 4096)]  # N, V, Vp


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
