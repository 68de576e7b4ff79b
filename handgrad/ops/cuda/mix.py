"""The mixture of streams at the input of a block, and the RMS norm after it: one kernel forward and one backward.

Both read the stream x and the first block's input x0. The backward recomputes the mixture from them, since it needs both
for the scalars' gradients; it sums these in two stages, over the rows of each program, then over the programs.
"""

import triton
import triton.language as tl
from torch import Tensor

from handgrad.ops.cuda.column_sums import add_partials, float32_of
from handgrad.ops.cuda.launch import launch
from handgrad.ops.cuda.layernorm import forward_places
from handgrad.ops.cuda.rmsnorm import rstd_of
from handgrad.ops.sizes import backward_tile, forward_tile


def mix_forward(
    out: Tensor, inp: Tensor, first: Tensor | None, residual_scalar: Tensor | None, input_scalar: Tensor | None
) -> None:
    mix_rmsnorm_forward(out, None, None, inp, first, residual_scalar, input_scalar)


def mix_rmsnorm_forward(
    mixed: Tensor | None,
    out: Tensor | None,
    rstd: Tensor | None,
    inp: Tensor,
    first: Tensor | None,
    residual_scalar: Tensor | None,
    input_scalar: Tensor | None,
) -> None:
    """Without `out` it stores only the mixture, without `mixed` only the norm."""
    N, C = inp.shape
    block, rows, warps = forward_tile(C)
    tensors = mixed, out, rstd, inp, first, residual_scalar, input_scalar
    launch(_forward, (triton.cdiv(N, rows),), *tensors, N, C, block, rows, num_warps=warps)


def mix_rmsnorm_backward(
    dstream_inout: Tensor,
    dfirst_inout: Tensor | None,
    dresidual_scalar_acc: Tensor | None,
    dinput_scalar_acc: Tensor | None,
    dout: Tensor,
    inp: Tensor,
    first: Tensor | None,
    rstd: Tensor,
    residual_scalar: Tensor | None,
    input_scalar: Tensor | None,
    *,
    scratch: Tensor,
) -> None:
    """Rounds the gradient once, after norm and scalars."""
    N, C = inp.shape
    programs, *tile, warps, stages = backward_tile(N, C, inp.element_size())
    accumulators = [acc for acc in (dresidual_scalar_acc, dinput_scalar_acc) if acc is not None]
    partials = float32_of(scratch, programs * len(accumulators))
    tensors = dstream_inout, dfirst_inout, partials, dout, inp, first, rstd, residual_scalar, input_scalar
    launch(_backward, (programs,), *tensors, N, C, *tile, stages, num_warps=warps)
    add_partials(accumulators, partials, programs)


@triton.jit
def _forward(
    mixed, out, rstd, inp, first, residual_scalar, input_scalar, N, C: tl.constexpr, BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    start, row, column, in_rows, in_row = forward_places(N, C, BLOCK_C, ROWS)
    offset, inside = start * C + (row * C + column), in_rows & in_row
    m, _, _ = mixture((inp, first, residual_scalar, input_scalar), offset, inside)
    if mixed is not None:
        tl.store(mixed + offset, m, mask=inside)
    if out is not None:
        m = m.to(tl.float32)
        row_rstd = rstd_of(tl.sum(m * m, 1, keep_dims=True), C)
        tl.store(out + offset, (m * row_rstd).to(out.dtype.element_ty), mask=inside)
        tl.store(rstd + start + row, row_rstd, mask=in_rows)


@triton.jit
def mixture(tensors, offset, inside):
    """(m in the stream's dtype, x and x0 in float32) for a tile of rows."""
    inp, first, residual_scalar, input_scalar = tensors
    x = tl.load(inp + offset, mask=inside, other=0.0).to(tl.float32)
    x0 = x
    if input_scalar is not None:
        x0 = tl.load(first + offset, mask=inside, other=0.0).to(tl.float32)
    return mixture_of(x, x0, residual_scalar, input_scalar).to(inp.dtype.element_ty), x, x0


@triton.jit
def mixture_of(x, x0, residual_scalar, input_scalar):
    """r x + s x0 in float32. A fused multiply-add rounds one product and the sum together: same bits in every kernel."""
    if input_scalar is None:
        m = x * tl.load(residual_scalar).to(tl.float32)
    else:
        s = tl.zeros_like(x0) + tl.load(input_scalar).to(tl.float32)
        if residual_scalar is None:
            m = tl.fma(x0, s, x)
        else:
            m = tl.fma(x, tl.zeros_like(x) + tl.load(residual_scalar).to(tl.float32), x0 * s)
    return m


@triton.jit
def _backward(
    dstream, dfirst, partials, dout, inp, first, rstd, residual_scalar, input_scalar, N, C: tl.constexpr,
    BLOCK_C: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program p takes the blocks of rows p, p + P, p + 2 P, ... and writes row p of partials."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_C)[None, :]
    dr, ds = tl.zeros((ROWS, 1), tl.float32), tl.zeros((ROWS, 1), tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS, num_stages=STAGES):
        in_rows = start + row < N
        inside = in_rows & (column < C)
        offset = tl.cast(start, tl.int64) * C + (row * C + column)
        tensors = dstream, dfirst, dout, inp, first, rstd, residual_scalar, input_scalar
        updated, dr_rows, ds_rows = backward_rows(tensors, offset, start + row, in_rows, inside, C)
        dr += dr_rows
        ds += ds_rows
        tl.store(dstream + offset, updated, mask=inside)
    store_sums(partials, dr, ds, residual_scalar, input_scalar)


@triton.jit
def backward_rows(tensors, offset, row, in_rows, inside, C: tl.constexpr):
    """(gradient of inp in its dtype, per-row terms of dr, of ds) for a tile of rows; adds the tile's term to dfirst."""
    dstream, dfirst, dout, inp, first, rstd, residual_scalar, input_scalar = tensors
    dy = tl.load(dout + offset, mask=inside, other=0.0).to(tl.float32)
    dm = tl.load(dstream + offset, mask=inside, other=0.0).to(tl.float32)
    row_rstd = tl.load(rstd + row, mask=in_rows, other=0.0)
    m, x, x0 = mixture((inp, first, residual_scalar, input_scalar), offset, inside)
    normal = m.to(tl.float32) * row_rstd
    along = tl.sum(dy * normal, 1, keep_dims=True) / C
    dm += row_rstd * (dy - normal * along)
    dr, ds = tl.zeros_like(row_rstd), tl.zeros_like(row_rstd)
    if input_scalar is not None:
        ds = tl.sum(dm * x0, 1, keep_dims=True)
        dx0 = tl.load(dfirst + offset, mask=inside, other=0.0).to(tl.float32)
        dx0 += dm * tl.load(input_scalar).to(tl.float32)
        tl.store(dfirst + offset, dx0.to(dfirst.dtype.element_ty), mask=inside)
    if residual_scalar is not None:
        dr = tl.sum(dm * x, 1, keep_dims=True)
        dm *= tl.load(residual_scalar).to(tl.float32)
    return dm.to(dstream.dtype.element_ty), dr, ds


@triton.jit
def store_sums(partials, dr, ds, residual_scalar, input_scalar):
    """Stores a program's row of partials (P, 1 or 2), one number per scalar."""
    if residual_scalar is None:
        tl.store(partials + tl.program_id(0), tl.sum(ds))
    elif input_scalar is None:
        tl.store(partials + tl.program_id(0), tl.sum(dr))
    else:
        tl.store(partials + 2 * tl.program_id(0), tl.sum(dr))
        tl.store(partials + 2 * tl.program_id(0) + 1, tl.sum(ds))
