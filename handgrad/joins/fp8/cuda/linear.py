"""GEMMs in fp8 if both operands have the right forms, else in 16 bits. docs/operations/fp8.md has the
measurements."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from handgrad.joins.fp8.cuda.activations import (
    gelu_backward_fp8,
    gelu_forward_fp8,
    relu2_backward_fp8,
    relu2_forward_fp8,
    swiglu_backward_fp8,
    swiglu_forward_fp8,
)
from handgrad.joins.fp8.cuda.quantizing import INVERSE
from handgrad.joins.fp8.formats import Form, Operands, Quantized, fp8_operands, plain
from handgrad.ops import cuda
from handgrad.ops.cuda import linear
from handgrad.ops.cuda.cublaslt import BIAS, PLAIN, multiply, read_table, shipped_table, user_table
from handgrad.ops.cuda.launch import launch

# Hopper's fp8 tensor cores add up in fewer than 24 bits, unless told to hand over to float32 every 128 terms, which takes 6
# to 42 % longer. A 16-bit result hides the difference in sums as short as a block's (2.7e-3 off at worst, against 1.7e-3),
# not in the head's over the vocabulary (6.3e-3), nor does a float32 one over the tokens (5e-3 against 2e-4).
LONGEST_FAST_SUM = 8192

# A bias gradient: a program sums whole rows of a transposed tensor, at 4.1 of 4.2 TB/s with four loads per lane in flight.
ROWS, COLUMNS, STAGES, WARPS = 4, 1024, 4, 4


def has_fast_sums(out: Tensor, terms: int) -> bool:
    return out.dtype != torch.float32 and terms <= LONGEST_FAST_SUM


def fp8_gemm(
    out: Tensor,
    operands: Operands,
    *,
    bias: Tensor | None = None,
    added: Tensor | None = None,
    fast_sums: bool | None = None,
    scratch: Tensor,
) -> None:
    """out (M, N) = left (M, K) right (N, K)^T + bias (N) + added (M, N). K is contiguous in both, as Hopper requires."""
    left, right, (left_inverse, right_inverse) = operands
    fast_sums = has_fast_sums(out, left.shape[1]) if fast_sums is None else fast_sums
    options = {"bias": bias, "added": added, "inverse_scales": (right_inverse, left_inverse), "fast_sums": fast_sums}
    multiply(out, right, left, transpose_a=True, epilogue=PLAIN if bias is None else BIAS, **options, scratch=scratch)


def linear_forward(out: Form, inp: Form, weight: Form, bias: Tensor | None, *, scratch: Tensor) -> None:
    operands = fp8_operands(inp, "rows", weight, "rows")
    if operands is None:
        cuda.linear_forward(plain(out), plain(inp), plain(weight), bias, scratch=scratch)
    else:
        fp8_gemm(plain(out), operands, bias=bias, scratch=scratch)


def linear_backward(
    dinp: Tensor,
    dweight_acc: Tensor | None,
    dbias_acc: Tensor | None,
    dout: Form,
    inp: Form,
    weight: Form,
    *,
    scratch: Tensor,
) -> None:
    input_backward(dinp, dout, weight, scratch=scratch)
    if dweight_acc is not None:
        weight_backward(dweight_acc, dout, inp, scratch=scratch)
    if dbias_acc is not None:
        bias_backward(dbias_acc, dout, scratch=scratch)


def input_backward(dinp: Tensor, dout: Form, weight: Form, *, scratch: Tensor) -> None:
    operands = fp8_operands(dout, "rows", weight, "columns")
    if operands is None:
        linear.input_backward(dinp, plain(dout), plain(weight), scratch=scratch)
    else:
        fp8_gemm(dinp, operands, scratch=scratch)


def weight_backward(dweight_acc: Tensor, dout: Form, inp: Form, *, scratch: Tensor) -> None:
    operands = fp8_operands(dout, "columns", inp, "columns")
    if operands is None:
        linear.weight_backward(dweight_acc, plain(dout), plain(inp), scratch=scratch)
    else:
        fp8_gemm(dweight_acc, operands, added=dweight_acc, scratch=scratch)


def bias_backward(dbias_acc: Tensor, dout: Form, *, scratch: Tensor) -> None:
    if isinstance(dout, Tensor) or dout.columns is None:
        cuda.bias_backward(dbias_acc, plain(dout), scratch=scratch)
        return
    O, N = dout.columns.shape
    assert dout.columns.is_contiguous(), "columns of a chunk"
    tensors = dbias_acc, dout.columns, dout.scaling
    launch(_sum_fp8_rows, (triton.cdiv(O, ROWS),), *tensors, O, N, ROWS, COLUMNS, STAGES, num_warps=WARPS)


@triton.jit(do_not_specialize_on_alignment=["scaling"])
def _sum_fp8_rows(sums_acc, dout, scaling, O, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr):
    """sums_acc (O) += sums over the rows of dout (O, N), unscaled."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    first = dout + row.to(tl.int64) * N
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, N, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)[None, :]
        sums += tl.load(first + column, mask=(row < O) & (column < N), other=0.0).to(tl.float32)
    total = tl.sum(sums, 1, keep_dims=True) * tl.load(scaling + INVERSE)
    tl.store(sums_acc + row, tl.load(sums_acc + row, mask=row < O) + total, mask=row < O)


def linear_residual_forward(
    out: Tensor, residual: Tensor, inp: Form, weight: Form, bias: Tensor | None, *, scratch: Tensor
) -> None:
    operands = fp8_operands(inp, "rows", weight, "rows")
    if operands is None:
        cuda.linear_residual_forward(out, residual, plain(inp), plain(weight), bias, scratch=scratch)
    else:
        fp8_gemm(out, operands, bias=bias, added=residual, scratch=scratch)


def linear_gelu_forward(out: Form, hidden: Tensor, inp: Form, weight: Form, bias: Tensor, *, scratch: Tensor) -> None:
    """The library has no GELU epilogue for fp8."""
    if isinstance(out, Quantized):
        linear_forward(hidden, inp, weight, bias, scratch=scratch)
        gelu_forward_fp8(out, hidden)
    else:
        cuda.linear_gelu_forward(out, hidden, plain(inp), plain(weight), bias, scratch=scratch)


def gelu_linear_backward(
    dhidden: Form, dweight_acc: Tensor, dout: Form, inp: Form, hidden: Tensor, weight: Form, *, scratch: Tensor
) -> None:
    """The library's fp8 GEMM with the GELU's derivative in its epilogue takes 1.5 ms where the plain one takes 0.32."""
    if isinstance(dhidden, Tensor):
        operands = plain(dout), plain(inp), hidden, plain(weight)
        cuda.gelu_linear_backward(dhidden, dweight_acc, *operands, scratch=scratch)
        return
    assert dhidden.workspace is not None and isinstance(inp, Quantized)
    input_backward(dhidden.workspace, dout, weight, scratch=scratch)
    gelu_backward_fp8(dhidden, inp, dhidden.workspace, hidden)
    weight_backward(dweight_acc, dout, inp, scratch=scratch)


def linear_relu2_forward(out: Form, inp: Form, weight: Form, *, scratch: Tensor) -> None:
    if isinstance(out, Quantized):
        linear_forward(out, inp, weight, None, scratch=scratch)
        relu2_forward_fp8(out)
    else:
        cuda.linear_relu2_forward(out, plain(inp), plain(weight), scratch=scratch)


def relu2_linear_backward(
    dhidden: Form, dweight_acc: Tensor, dout: Form, inp: Form, weight: Form, *, scratch: Tensor
) -> None:
    if isinstance(dhidden, Tensor):
        cuda.relu2_linear_backward(dhidden, dweight_acc, plain(dout), plain(inp), plain(weight), scratch=scratch)
        return
    assert dhidden.workspace is not None and isinstance(inp, Quantized)
    input_backward(dhidden.workspace, dout, weight, scratch=scratch)
    relu2_backward_fp8(dhidden, inp, dhidden.workspace)
    weight_backward(dweight_acc, dout, inp, scratch=scratch)


def linear_swiglu_forward(out: Form, hidden: Tensor, inp: Form, weight: Form, *, scratch: Tensor) -> None:
    if isinstance(out, Quantized):
        linear_forward(hidden, inp, weight, None, scratch=scratch)
        swiglu_forward_fp8(out, hidden)
    else:
        cuda.linear_swiglu_forward(out, hidden, plain(inp), plain(weight), scratch=scratch)


def swiglu_linear_backward(
    dhidden: Form,
    dinp: Tensor,
    dweight_acc: Tensor,
    dout: Form,
    inp: Form,
    hidden: Tensor,
    weight: Form,
    *,
    scratch: Tensor,
) -> None:
    if isinstance(dhidden, Tensor):
        operands = plain(dout), plain(inp), hidden, plain(weight)
        cuda.swiglu_linear_backward(dhidden, dinp, dweight_acc, *operands, scratch=scratch)
        return
    assert isinstance(inp, Quantized)
    input_backward(dinp, dout, weight, scratch=scratch)
    swiglu_backward_fp8(dhidden, inp, dinp, hidden)
    weight_backward(dweight_acc, dout, inp, scratch=scratch)


# Found by `python -m benchmarks.tune`, along with the algorithms.


def keep_bf16_key(tokens: int, channels: int) -> str:
    return f"{tokens}x{channels}"


def tuned_keep_bf16(*, tokens: int, channels: int) -> str:
    """GEMMs that measured faster in bf16, for micro-batches and models of this size: "qkv,proj" or ""."""
    tuned = read_table(shipped_table(), "keep_bf16") | read_table(user_table(), "keep_bf16")
    return tuned.get(keep_bf16_key(tokens, channels), "")
