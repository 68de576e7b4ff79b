"""The kernels of the Llama family on a CUDA GPU, real sizes and odd ones: as exact as the reference, the same bits every
time. Attention of grouped heads is among the operations of `handgrad doctor`."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from handgrad.machine import devices
from tests.kernels import llama_checks as checks
from tests.kernels.memory_checks import Draw, both, check_all

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """No TF32 and no reduced-precision sums: neither in the kernels nor in the reference they are held against."""
    devices.set_arithmetic(torch.device("cuda"), "fp32")


@pytest.fixture(params=[BF16, FP16, FP32], ids=str)
def draw(request: pytest.FixtureRequest) -> Draw:
    return Draw(request.param, "cuda")


@pytest.mark.parametrize(
    ("N", "C"), [(65536, 576), (32768, 1024), (16384, 2048), (1, 24), (7, 48), (333, 100), (9999, 640)]
)
def test_gained_rmsnorm(draw: Draw, N: int, C: int) -> None:
    for each in both(draw, "rmsnorm", N=N, C=C, plus=int(C == 640)):
        check_all(each)


@pytest.mark.parametrize("name", ["swiglu", "geglu"])
@pytest.mark.parametrize(("N", "F"), [(65536, 1536), (16384, 3072), (1, 1), (9, 31)])
def test_gates(draw: Draw, N: int, F: int, name: str) -> None:
    for each in both(draw, name, N=N, F=F):
        check_all(each)


@pytest.mark.parametrize(
    ("N", "H", "K", "D", "length"),
    [
        *((32768, 9, 3, 64, 2048), (8192, 16, 8, 128, 1024), (8192, 32, 8, 64, 8192), (1, 1, 1, 2, 1), (333, 4, 2, 24, 7)),
        (8192, 16, 8, 256, 4096),
        (8192, 4, 1, 256, 2048),
    ],
)
def test_heads(draw: Draw, N: int, H: int, K: int, D: int, length: int) -> None:
    for each in checks.heads(draw, N, H, K, D, length, 1.2 if K > 1 else 1.0, plus=D == 256):
        check_all(each)


@pytest.mark.parametrize(
    ("positions", "H", "K", "D"),
    [([0], 2, 1, 16), ([5, 0, 31], 6, 2, 24), ([17, 2], 4, 4, 64), ([1023], 9, 3, 64), ([700, 3], 8, 1, 256)],
)
def test_generation(draw: Draw, positions: list[int], H: int, K: int, D: int) -> None:
    check_all(checks.attention_decode(draw, positions, H, K, D, max(positions) + 1))
    check_all(checks.heads_decode(draw, positions, H, K, D))
