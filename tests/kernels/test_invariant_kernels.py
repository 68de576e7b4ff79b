"""Attention over a cache in the tiles of the training kernel, in float32 by Triton's interpreter. Equal bits are for a GPU:
the interpreter's GEMMs are NumPy's, whose rows depend on their place."""

import os

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("a GPU runs tests/gpu/test_invariant_on_gpu.py", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: it decides what @triton.jit makes of a kernel
pytest.importorskip("triton")

from handgrad.ops import OPERATIONS, cuda, reference, rounding
from handgrad.ops.cuda import decode, invariant
from tests.kernels import llama_checks as checks
from tests.kernels.memory_checks import Draw, copy, within

HEADS = [([0], 2, 1, 16), ([5, 0, 31], 6, 2, 24), ([17, 2], 4, 4, 64), ([19, 3], 4, 1, 256), ([40, 33, 31, 32], 8, 2, 64)]


@pytest.fixture
def draw() -> Draw:
    return Draw(torch.float32, "cpu")


@pytest.mark.parametrize(("positions", "H", "K", "D"), HEADS)
def test_attention_over_a_cache(draw: Draw, positions: list[int], H: int, K: int, D: int) -> None:
    """The cache holds NaN behind each position: nothing there is read."""
    inputs, run = checks.attention_decode(draw, positions, H, K, D, 64)
    for name in ("keys", "values"):
        for cache, position in zip(inputs[name], positions, strict=True):
            cache[:, position:] = torch.nan
    found, own, exact = (
        run(invariant, copy(inputs)),
        run(reference, copy(inputs)),
        run(reference, copy(inputs, torch.float64)),
    )
    for name, result in found.items():
        seen = [result[b, :, : p + 1] for b, p in enumerate(positions)] if name != "out" else [result]
        others = [
            [t[name][b, :, : p + 1] for b, p in enumerate(positions)] if name != "out" else [t[name]] for t in (own, exact)
        ]
        for one, mine, right in zip(seen, *others, strict=True):
            within(name, one, mine, right, rounding.floor(name, inputs, exact, result.dtype))


def test_all_other_operations_are_the_backends() -> None:
    own = {name for name in OPERATIONS if getattr(invariant, name) is not getattr(cuda, name)}
    assert {"attention_forward", "linear_forward", "linear_gelu_forward", "rmsnorm_linear_swiglu_forward"} <= own
    assert not any(name.endswith("backward") for name in own)
    assert invariant.decode.advance is decode.advance and invariant.decode.linear_forward.keywords == {"whole_sums": True}
