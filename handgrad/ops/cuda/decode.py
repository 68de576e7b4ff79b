"""Generation: the operations of a step with one new token per sequence.

A step of one sequence reads every weight once and computes almost nothing with it, so it runs at memory speed if the reads
never stop. Its GEMMs have their own kernels (`row_gemms`), fused with the norm before and with bias, activation and
residual sum after. Several sequences share the reads, and their GEMMs run on the tensor cores as in training.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from handgrad.ops.compose import Operation, after_attention, after_mix
from handgrad.ops.cuda import linear, rotary
from handgrad.ops.cuda.activations import geglu_forward  # noqa: F401
from handgrad.ops.cuda.attention_decode import attention_append, attention_decode  # noqa: F401
from handgrad.ops.cuda.choosing import choose_tokens, choosing_scratch_bytes  # noqa: F401
from handgrad.ops.cuda.classifier import softcap_forward  # noqa: F401
from handgrad.ops.cuda.launch import launch, overlapping, overlaps
from handgrad.ops.cuda.layernorm import layernorm_forward
from handgrad.ops.cuda.mix import mix_forward
from handgrad.ops.cuda.rmsnorm import rmsnorm_forward
from handgrad.ops.cuda.rotary import qk_norm_forward  # noqa: F401
from handgrad.ops.cuda.row_gemms import row_gemm, takes
from handgrad.ops.cuda.value_embedding import value_embedding_decode  # noqa: F401
from handgrad.ops.reference.decode import residual_forward, store_keys_values_at  # noqa: F401
from handgrad.ops.reference.rmsnorm import RMSNORM_EPSILON
from handgrad.ops.reference.rotary import Frequencies


def token_embedding_decode(out: Tensor, tokens: Tensor, wte: Tensor) -> None:
    embedding_decode(out, tokens, None, wte, None)


def embedding_decode(out: Tensor, tokens: Tensor, positions: Tensor | None, wte: Tensor, wpe: Tensor | None) -> None:
    B, C = out.shape
    block = triton.next_power_of_2(C)
    warps = min(16, max(1, block // 512))
    # This kernel lets the next one begin, and itself waits for the end of the previous step. So attention can read the
    # positions that `advance` wrote before it waits for its own predecessor.
    options = {"OVERLAPS": overlaps(out.device), "num_warps": warps}
    launch(_embedding, (B,), out, tokens, positions, wte, wpe, C, block, **options)


def advance(tokens: Tensor, positions_inout: Tensor, places_inout: Tensor, chosen: Tensor, active: Tensor) -> None:
    B = tokens.shape[0]
    tensors = tokens, positions_inout, places_inout, chosen, active
    launch(_advance, (1,), *tensors, B, triton.next_power_of_2(B), **overlapping(tokens, 1))


def after_layernorm(gemm: Operation, **row: Any) -> Operation:
    """Returns `gemm` after a layer norm. For one row it is a single kernel without scratch."""

    def both(*tensors: Any, scratch: Tensor, tf32: bool = False) -> None:
        *outs, ln, mean, rstd, x, ln_weight, ln_bias, weight, bias = tensors
        if takes(x, weight):
            row_gemm(outs[0], x, weight, bias, norm=(ln_weight, ln_bias), **row)
        else:
            layernorm_forward(ln, mean, rstd, x, ln_weight, ln_bias)
            gemm(*outs, ln, weight, bias, scratch=scratch, tf32=tf32)

    return both


layernorm_linear_forward = after_layernorm(linear.linear_forward)
layernorm_linear_gelu_forward = after_layernorm(linear.linear_gelu_forward, activation="gelu")


def after_rmsnorm(gemm: Operation, outs: int, activation: str = "") -> Operation:
    """Returns `gemm`, which has `outs` outputs, after an RMS norm. For one row it is a single kernel without scratch."""

    def both(*tensors: Any, scratch: Tensor, tf32: bool = False, **options: float) -> None:
        norm, rstd, x, gain, weight, *bias = tensors[outs:]
        if takes(x, weight):
            row: dict[str, Any] = {"norm": (gain, None), "epsilon": RMSNORM_EPSILON} | options
            row_gemm(tensors[0], x, weight, *(bias or [None]), rms_norm=True, activation=activation, **row)
        else:
            rmsnorm_forward(norm, rstd, x, gain, **options)
            gemm(*tensors[:outs], norm, weight, *bias, scratch=scratch, tf32=tf32)

    return both


rmsnorm_linear_forward = after_rmsnorm(linear.linear_forward, 1)
rmsnorm_linear_relu2_forward = after_rmsnorm(linear.linear_relu2_forward, 1, "relu2")
rmsnorm_linear_swiglu_forward = after_rmsnorm(linear.linear_swiglu_forward, 2, "swiglu")
mix_rmsnorm_linear_forward = after_mix(mix_forward, rmsnorm_linear_forward)


def qk_norm_rotary_forward(qkv_inout: Tensor, rstd: Tensor, *, positions: Tensor) -> None:
    rotary.forward(qkv_inout, rstd, positions, rstd.shape[1] // 2, 1, rotary=True, overlaps=True)


def gained_qk_norm_rotary_forward(
    out: Tensor,
    rstd: Tensor,
    qkv: Tensor,
    q_gain: Tensor,
    k_gain: Tensor,
    *,
    positions: Tensor,
    frequencies: tuple[float, ...],
    scale: float,
    epsilon: float,
    plus: float = 0,
) -> None:
    turns = positions, 1, frequencies, scale, epsilon, plus
    rotary.gained_forward(out, rstd, qkv, q_gain, k_gain, *turns, overlaps=True)


def rotary_forward(
    qkv_inout: Tensor, *, num_heads: int, positions: Tensor, frequencies: Frequencies = None, scale: float = 1.0
) -> None:
    options = {"frequencies": frequencies, "scale": scale}
    rotary.forward(qkv_inout, None, positions, num_heads, 1, rotary=True, overlaps=True, **options)


def linear_forward(
    out: Tensor, inp: Tensor, weight: Tensor, bias: Tensor | None, *, scratch: Tensor, tf32: bool = False
) -> None:
    if takes(inp, weight):
        row_gemm(out, inp, weight, bias)
    else:
        linear.linear_forward(out, inp, weight, bias, scratch=scratch, tf32=tf32)


def linear_swiglu_forward(
    out: Tensor, hidden: Tensor, inp: Tensor, weight: Tensor, *, scratch: Tensor, tf32: bool = False
) -> None:
    """A single row has its own kernel, which leaves `hidden` alone."""
    if takes(inp, weight):
        row_gemm(out, inp, weight, None, activation="swiglu")
    else:
        linear.linear_swiglu_forward(out, hidden, inp, weight, scratch=scratch, tf32=tf32)


def linear_residual_forward(
    out: Tensor, residual: Tensor, inp: Tensor, weight: Tensor, bias: Tensor | None, *, scratch: Tensor, tf32: bool = False
) -> None:
    """A single row has its own kernel."""
    if takes(inp, weight):
        row_gemm(out, inp, weight, bias, residual=residual)
    else:
        linear.linear_residual_forward(out, residual, inp, weight, bias, scratch=scratch, tf32=tf32)


attention_linear_residual_forward = after_attention(attention_decode, linear_residual_forward)


@triton.jit
def _embedding(out, tokens, positions, wte, wpe, C, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    channel = tl.arange(0, BLOCK)
    inside = channel < C
    x = tl.load(wte + tl.load(tokens + b) * C + channel, mask=inside, other=0.0).to(tl.float32)
    if wpe is not None:
        x += tl.load(wpe + tl.load(positions + b) * C + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + b * C + channel, x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _advance(tokens, positions, places, chosen, active, B, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    b = tl.arange(0, BLOCK)
    here = b < B
    if OVERLAPS:
        gdc_wait()
    tl.store(tokens + b, tl.maximum(tl.load(chosen + b, mask=here, other=0), 0), mask=here)
    tl.store(positions + b, tl.load(positions + b, mask=here) + tl.load(active + b, mask=here), mask=here)
    tl.store(places + b, tl.load(places + b, mask=here) + 1, mask=here)
