"""Attention's kernels over long rows, in the interpreter: 32,768 positions, and offsets just below 2^31 in one row."""

import math
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("a GPU runs tests/gpu/test_long_attention_on_gpu.py", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: it decides what @triton.jit makes of a kernel
pytest.importorskip("triton")

from handgrad.ops import cpu
from handgrad.ops.cuda import attention_triton as kernels
from handgrad.ops.reference.attention import Mask
from handgrad.ops.sizes import AttentionTile
from tests.documents import document_starts

D = 16
SPAN = 1 << 14  # positions that the search for a document's end tries in one turn: one document below is longer


def test_a_row_of_32768_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles of 1024, which the interpreter takes faster than small ones. torch's flash attention in float64 is exact, in
    float32 it is the error that the kernels are allowed twice."""
    monkeypatch.setattr(kernels, "choose_config", lambda *_: AttentionTile(1024, 1024, 4, 1))
    starts = document_starts([[3, SPAN + 1, 2380, *(1000,) * 14]])
    T = starts.shape[1]
    assert T == 32768
    draw = torch.Generator().manual_seed(0)
    qkv, dout = torch.randn(T, 3 * D, generator=draw), torch.randn(T, D, generator=draw)

    def torch_has(dtype: torch.dtype) -> tuple[Tensor, ...]:
        out, dqkv, lse = (torch.empty(shape, dtype=dtype) for shape in ((T, D), (T, 3 * D), (1, 1, T)))
        inputs = qkv.to(dtype), dout.to(dtype)
        cpu.attention_forward(out, lse, inputs[0], mask=Mask(starts))
        cpu.attention_backward(dqkv, inputs[1], out, lse, inputs[0], mask=Mask(starts))
        return out, lse, *dqkv.split(D, 1)

    out, dqkv, lse = (torch.full(shape, math.nan) for shape in ((T, D), (T, 3 * D), (1, 1, T)))
    scratch = torch.empty(kernels.attention_scratch_bytes(batch=1, length=T, num_heads=1), dtype=torch.uint8)
    kernels.attention_forward(out, lse, qkv, mask=Mask(starts))
    kernels.attention_backward(dqkv, dout, out, lse, qkv, scratch=scratch, mask=Mask(starts))
    found = out, lse, *dqkv.split(D, 1)
    names = "out", "lse", "dq", "dk", "dv"
    for name, f, plain, exact in zip(names, found, torch_has(torch.float32), torch_has(torch.float64), strict=True):
        error, allowed = (f - exact).norm(), 2 * (plain - exact).norm()
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize("group", [1, 2])
def test_offsets_up_to_two_to_the_31(group: int, tmp_path: Path) -> None:
    """Rows so far apart that the last element of a sample is the last that 32 bits reach, in a file with holes: the same
    bits as from rows side by side."""
    T, H = 128, 2
    row_stride = ((1 << 31) - 1) // T // 16 * 16
    C, columns = H * D, (H + 2 * H // group) * D
    draw = torch.Generator().manual_seed(0)
    qkv, dout = torch.randn(T, columns, generator=draw), torch.randn(T, C, generator=draw)

    whole = torch.from_file(str(tmp_path / "rows"), shared=True, size=T * row_stride, dtype=torch.float32)
    far, far_gradient = whole.view(T, row_stride)[:, : 2 * columns].split(columns, 1)

    def run(qkv: Tensor, dqkv: Tensor) -> list[Tensor]:
        out, lse, sums = torch.full((T, C), math.nan), torch.full((1, H, T), math.nan), torch.empty(2 * H * T)
        sizes = H, T, C, qkv.stride(0)
        options = {"D": D, "WIDTH": D, "QUERIES": 16, "KEYS": 16, "TAIL": False, **({"GROUP": group} if group > 1 else {})}
        kernels.forward_kernel[(H * T // 16,)](out, lse, qkv, None, *sizes, **options)
        kernels.dq_kernel[(H * T // 16,)](dqkv, sums, dout, out, lse, qkv, None, *sizes, **options)
        dkdv = kernels.dkdv_kernel if group == 1 else kernels.grouped_dkdv_kernel
        dkdv[(H // group * T // 16,)](dqkv, sums, dout, qkv, None, *sizes, **options)
        return [out, lse, dqkv.clone()]

    far.copy_(qkv)
    found = run(far, far_gradient)
    expected = run(qkv, torch.full_like(qkv, math.nan))
    assert all(map(torch.equal, found, expected))
