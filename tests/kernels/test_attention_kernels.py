"""Attention's kernels are right in the interpreter (float32).

The interpreter's products of 16-bit inputs are garbage: those are checked on a GPU.
"""

import math
import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from handgrad.joins.dropout import cuda as dropout_kernels, reference as dropout_reference
from handgrad.joins.dropout.reference import Dropout
from handgrad.ops import reference
from handgrad.ops.cuda import attention_triton
from handgrad.ops.sizes import AttentionTile, attention_scratch_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = 2.0**-24
GARBAGE = 255  # bytes that are NaN as float32

# Queries per tile more and fewer than keys; and the shipped ones, as many of both.
TILES = {"wide": AttentionTile(32, 16, 4, 1), "tall": AttentionTile(16, 32, 4, 1), "shipped": None}


@pytest.fixture(params=TILES)
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TILES[request.param]
    if config is not None:
        monkeypatch.setattr(attention_triton, "choose_config", lambda *_: config)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def run(dtype: torch.dtype, B: int, T: int, H: int, D: int, *, kernels: bool, p: float = 0.0, K: int = 0) -> list[Tensor]:
    """out, lse and dqkv over NaN-filled buffers, from the same random inputs, of float32's precision. `p`: dropout's."""
    N, C, K = B * T, H * D, K or H
    packed = C + 2 * K * D
    site = (Dropout(torch.arange(B, device=DEVICE) + (1 << 32) - 1, p, 1337, 4),) if p else ()
    qkv, dout = (randn(*shape, seed=seed).float().to(DEVICE, dtype) for seed, shape in enumerate([(N, packed), (N, C)]))
    out, lse, dqkv = (torch.full(s, math.nan, dtype=dtype, device=DEVICE) for s in [(N, C), (B, H, T), (N, packed)])
    if kernels:
        ops = dropout_kernels if p else attention_triton
        size = attention_scratch_bytes(batch=B, length=T, num_heads=H)
        scratch = torch.full((size + 16,), GARBAGE, dtype=torch.uint8, device=DEVICE)
        ops.attention_forward(out, lse, qkv, *site)
        ops.attention_backward(dqkv, dout, out, lse, qkv, *site, scratch=scratch)
        assert (scratch[size:] == GARBAGE).all()
    else:
        ops = dropout_reference if p else reference
        ops.attention_forward(out, lse, qkv, *site)
        ops.attention_backward(dqkv, dout, out, lse, qkv, *site)
    return [out, lse, *dqkv.split((C, K * D, K * D), 1)]


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(
    ("B", "T", "H", "D"),
    [
        *((1, 1, 1, 16), (2, 37, 3, 16), (1, 96, 2, 64), (2, 70, 2, 24), (1, 33, 1, 128), (1, 128, 1, 16), (3, 64, 1, 8)),
        *((1, 70, 1, 80), (2, 33, 1, 96), (1, 64, 2, 112), (1, 130, 1, 256), (2, 33, 1, 192)),
    ],
)
def test_float32(B: int, T: int, H: int, D: int) -> None:
    check_float32(B, T, H, D, 0.0)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(("B", "T", "H", "D"), [(2, 37, 3, 16), (1, 70, 2, 24), (1, 33, 1, 128), (1, 33, 1, 256)])
def test_float32_with_dropout(B: int, T: int, H: int, D: int) -> None:
    check_float32(B, T, H, D, 0.3)


@pytest.mark.nightly(but=["shipped-2-37-6-2-16", "tall-1-70-3-1-24"])
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(
    ("B", "T", "H", "K", "D"), [(1, 1, 2, 1, 16), (2, 37, 6, 2, 16), (1, 70, 3, 1, 24), (1, 33, 4, 2, 64)]
)
def test_float32_of_grouped_heads(B: int, T: int, H: int, K: int, D: int) -> None:
    check_float32(B, T, H, D, 0.0, K)


def check_float32(B: int, T: int, H: int, D: int, p: float, K: int = 0) -> None:
    """As exact as the reference in float32, up to a factor of two and one rounding."""
    exact = run(torch.float64, B, T, H, D, kernels=False, p=p, K=K)
    plain = run(torch.float32, B, T, H, D, kernels=False, p=p, K=K)
    found = run(torch.float32, B, T, H, D, kernels=True, p=p, K=K)
    for name, e, p, f in zip(("out", "lse", "dq", "dk", "dv"), exact, plain, found, strict=True):
        # One token attends to itself alone: dq and dk are zero but for rounding, relative to nothing.
        floor = ROUNDING * (e.norm() if T > 1 else math.sqrt(D) * 8)
        error, allowed = (f - e).norm(), 2 * (p - e).norm() + floor
        assert torch.isfinite(f).all() and error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.usefixtures("tiles")
def test_masks_are_the_references() -> None:
    """Queries of zero look at all keys alike: values that are unit vectors show which keys were kept, and output gradients
    that are unit vectors show the same in the values' gradient."""
    B, T, H, D = 2, 64, 2, 64
    site = Dropout(torch.arange(B, device=DEVICE) + (1 << 32) - 1, 0.3, 1337, 4)
    unit = torch.eye(D, device=DEVICE)[None, :, None].expand(B, T, H, D)
    qkv = torch.stack([torch.zeros_like(unit), torch.zeros_like(unit), unit], 2).reshape(B * T, 3 * H * D)
    out, dqkv, lse = torch.empty(B * T, H * D), torch.empty(B * T, 3 * H * D), torch.empty(B, H, T)
    out, dqkv, lse = (t.fill_(math.nan).to(DEVICE) for t in (out, dqkv, lse))
    size = attention_scratch_bytes(batch=B, length=T, num_heads=H)
    scratch = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
    dropout_kernels.attention_forward(out, lse, qkv, site)
    dropout_kernels.attention_backward(dqkv, unit.reshape(B * T, H * D), out, lse, qkv, site, scratch=scratch)
    mask = (
        torch.stack([dropout_reference.attention_mask(torch.empty(H, T, T, device=DEVICE), site, b) for b in range(B)]) > 0
    )
    mask &= torch.ones(T, T, dtype=torch.bool, device=DEVICE).tril()
    assert torch.equal(out.view(B, T, H, D).transpose(1, 2) > 0, mask)
    assert torch.equal(dqkv.view(B, T, 3, H, D)[:, :, 2].permute(0, 2, 3, 1) > 0, mask)


def test_scratch_is_checked() -> None:
    tensors = [torch.zeros(shape, device=DEVICE) for shape in [(16, 48), (16, 16), (16, 16), (1, 1, 16), (16, 48)]]
    with pytest.raises(AssertionError, match="scratch holds"):
        attention_triton.attention_backward(*tensors, scratch=torch.zeros(64, dtype=torch.uint8, device=DEVICE))
