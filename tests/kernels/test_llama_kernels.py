"""The kernels of the Llama family in float32 by Triton's interpreter, where there is no GPU."""

import os

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("a GPU runs tests/gpu/test_llama_kernels_on_gpu.py", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: it decides what @triton.jit makes of a kernel
pytest.importorskip("triton")

from handgrad.ops import reference
from handgrad.ops.cuda import attention_triton, gained_qk_norm, rotary
from handgrad.ops.cuda.attention_configs import Config
from tests.kernels import llama_checks as checks
from tests.kernels.memory_checks import Draw, check


@pytest.fixture
def draw() -> Draw:
    return Draw(torch.float32, "cpu")


@pytest.mark.parametrize(("N", "C"), [(1, 24), (7, 48), (33, 100), (5, 576), (3, 2048)])
def test_gained_rmsnorm(draw: Draw, N: int, C: int) -> None:
    check(checks.gained_rmsnorm(draw, N, C))


@pytest.mark.parametrize(("N", "F"), [(1, 1), (9, 31), (3, 1536), (2, 3000)])
def test_swiglu(draw: Draw, N: int, F: int) -> None:
    check(checks.swiglu(draw, N, F))


HEADS = [
    (1, 1, 1, 2, 1),
    (7, 4, 2, 24, 3),
    (5, 9, 3, 64, 5),
    (4, 3, 3, 96, 3),
    (3, 4, 1, 128, 2),
    (2, 4, 1, 256, 2),
]  # N, H, K, D, length


@pytest.mark.parametrize(("N", "H", "K", "D", "length"), HEADS)
def test_heads(draw: Draw, N: int, H: int, K: int, D: int, length: int) -> None:
    check(checks.heads(draw, N, H, K, D, length, 1.2 if K > 1 else 1.0))


def test_a_program_walks_several_rows(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rotary, gained_qk_norm):
        monkeypatch.setattr(module, "PROGRAMS", 3)
    monkeypatch.setattr(gained_qk_norm, "BACKWARD_PROGRAMS", 2)
    check(checks.heads(draw, 11, 4, 2, 24, 4, 1.0))


@pytest.mark.parametrize("config", [None, Config(32, 16, 4, 1), Config(16, 32, 4, 1)])
@pytest.mark.parametrize(
    ("B", "T", "H", "K", "D"), [(1, 1, 2, 1, 16), (2, 37, 6, 2, 16), (1, 70, 3, 1, 24), (1, 33, 4, 2, 64)]
)
def test_attention(config: Config | None, B: int, T: int, H: int, K: int, D: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As exact as the reference in float32, up to a factor of two and one rounding."""
    if config is not None:
        monkeypatch.setattr(attention_triton, "choose_config", lambda *_: config)
    generator = torch.Generator().manual_seed(1)
    qkv, dout = (torch.randn(B * T, n * D, generator=generator) for n in (H + 2 * K, H))
    results = []
    for dtype, ops in ((torch.float64, reference), (torch.float32, reference), (torch.float32, attention_triton)):
        out, lse, dqkv = (torch.full(s, float("nan"), dtype=dtype) for s in (dout.shape, (B, H, T), qkv.shape))
        scratch = torch.full((8 * B * H * T,), 255, dtype=torch.uint8)
        ops.attention_forward(out, lse, qkv.to(dtype))
        ops.attention_backward(dqkv, dout.to(dtype), out, lse, qkv.to(dtype), scratch=scratch)
        results.append((out, lse, *dqkv.split((H * D, K * D, K * D), 1)))
    for name, exact, plain, found in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
        floor = 2.0**-24 * (exact.norm() if T > 1 else 32)
        error, allowed = (found - exact).norm(), 2 * (plain - exact).norm() + floor
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize(
    ("positions", "H", "K", "D"), [([0], 2, 1, 16), ([5, 0, 31], 6, 2, 24), ([17, 2], 4, 4, 64), ([19, 3], 4, 1, 256)]
)
def test_generation(draw: Draw, positions: list[int], H: int, K: int, D: int) -> None:
    check(checks.attention_decode(draw, positions, H, K, D, 32))
    check(checks.heads_decode(draw, positions, H, K, D))
