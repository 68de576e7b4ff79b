"""The kernels of the Llama family in float32 by Triton's interpreter, where there is no GPU."""

import os

import pytest
import torch
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("a GPU runs tests/gpu/test_llama_kernels_on_gpu.py", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: it decides what @triton.jit makes of a kernel
pytest.importorskip("triton")

from handgrad.ops import cuda, sizes
from tests.kernels import llama_checks as checks
from tests.kernels.memory_checks import Draw, both, check


@pytest.fixture
def draw() -> Draw:
    return Draw(torch.float32, "cpu")


@pytest.mark.parametrize(("N", "C", "plus"), [(1, 24, 0), (7, 48, 1), (33, 100, 1), (5, 576, 0), (3, 640, 1), (3, 2048, 0)])
def test_gained_rmsnorm(draw: Draw, N: int, C: int, plus: int) -> None:
    for each in both(draw, "rmsnorm", N=N, C=C, plus=plus):
        check(each)


@pytest.mark.parametrize(("N", "C", "columns"), [(1, 24, 60), (7, 48, 49), (33, 100, 301)])
@pytest.mark.parametrize("last", [False, True])
def test_gained_rmsnorm_of_columns(draw: Draw, N: int, C: int, columns: int, last: bool) -> None:
    """The first or last columns of wider tensors get the bits that they get alone; the others stay."""
    mine = slice(columns - C, columns) if last else slice(0, C)
    wide = [draw.normal(N, columns) for _ in range(4)]
    gain, sums, scratch = draw.normal(C), draw.normal(C), torch.zeros(1 << 20, dtype=torch.uint8)

    def both_ways(out: Tensor, dresidual: Tensor, inp: Tensor, dout: Tensor) -> list[Tensor]:
        rstd, dgain = torch.empty(N), sums.clone()
        cuda.rmsnorm_forward(out, rstd, inp, gain, epsilon=1e-6)
        cuda.rmsnorm_backward(dresidual, dgain, dout, inp, rstd, gain, scratch=scratch)
        return [out, dresidual, rstd, dgain]

    alone = both_ways(*(t[:, mine].clone() for t in wide))
    changed = [t.clone() for t in wide]
    assert all(torch.equal(*pair) for pair in zip(both_ways(*(t[:, mine] for t in changed)), alone, strict=True))
    for after, before in zip(changed, wide, strict=True):
        after[:, mine] = before[:, mine]
        assert torch.equal(after, before)


@pytest.mark.parametrize("name", ["swiglu", "geglu"])
@pytest.mark.parametrize(("N", "F"), [(1, 1), (9, 31), (3, 1536), (2, 3000)])
def test_gates(draw: Draw, N: int, F: int, name: str) -> None:
    for each in both(draw, name, N=N, F=F):
        check(each)


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
    for each in checks.heads(draw, N, H, K, D, length, 1.2 if K > 1 else 1.0, plus=D == 256 or K == 3):
        check(each)


def test_a_program_walks_several_rows(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "ROTARY_PROGRAMS", 3)
    monkeypatch.setattr(sizes, "QK_GAIN_PROGRAMS", 2)
    for each in checks.heads(draw, 11, 4, 2, 24, 4, 1.0):
        check(each)


@pytest.mark.parametrize(
    ("positions", "H", "K", "D"), [([0], 2, 1, 16), ([5, 0, 31], 6, 2, 24), ([17, 2], 4, 4, 64), ([19, 3], 4, 1, 256)]
)
def test_generation(draw: Draw, positions: list[int], H: int, K: int, D: int) -> None:
    check(checks.attention_decode(draw, positions, H, K, D, 32))
    check(checks.heads_decode(draw, positions, H, K, D))
