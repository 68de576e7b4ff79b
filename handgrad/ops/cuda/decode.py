"""Generation: what a step does for one new token per sequence.

A step of one sequence reads every weight once and does next to nothing with it, so it is as fast as memory if the reading
never stops. Its products are kernels of their own: a program reads its rows of the weight first and only then waits for
the kernel before (programmatic dependent launch, from Hopper on), so that the memory is busy across the border between
two kernels; layer norm, bias, GELU and residual sum are done by every program for itself. Several sequences share the
reading, and their products run on the tensor cores like a training's.
"""

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from handgrad.ops.compose import Operation, after_gained_rmsnorm, after_mix
from handgrad.ops.cuda import gained_qk_norm, linear, rotary
from handgrad.ops.cuda.choosing import choose_tokens, choosing_scratch_bytes  # noqa: F401
from handgrad.ops.cuda.classifier import softcap_forward  # noqa: F401
from handgrad.ops.cuda.gained_rmsnorm import gained_rmsnorm_forward
from handgrad.ops.cuda.gelu import gelu
from handgrad.ops.cuda.launch import launch, overlapping
from handgrad.ops.cuda.layernorm import EPSILON, layernorm_forward
from handgrad.ops.cuda.mix import mix_forward
from handgrad.ops.cuda.relu2 import relu2
from handgrad.ops.cuda.rmsnorm import rmsnorm_forward, rstd_of
from handgrad.ops.cuda.rotary import qk_norm_forward  # noqa: F401
from handgrad.ops.cuda.value_embedding import value_embedding_decode  # noqa: F401
from handgrad.ops.reference.rotary import Frequencies

# A program's tile of the weight, 64 numbers a thread: with a few programs on each multiprocessor as many bytes are on their
# way as the memory's latency asks for (4.8 TB/s times about 800 ns are 29 KB a multiprocessor).
TILE_ELEMENTS = 8192
ELEMENTS_PER_WARP = 2048
LONGEST_ROW = 1 << 15  # of a tile of one row
FEWEST_PROGRAMS = 264  # two on each of 132 multiprocessors, while a program still has rows to give

# (numbers, warps) of an attention tile: 256 keys of 64 channels at once where there are few programs, which then have a
# multiprocessor each; less where many share one.
FEW_ATTENTIONS, MANY_ATTENTIONS = (16384, 8), (4096, 2)

NOTHING = tl.constexpr(-1e30)  # a score below all scores


def takes(x: Tensor, weight: Tensor) -> bool:
    """True for the product of one row that fits a program."""
    return x.shape[0] == 1 and weight.shape[1] <= LONGEST_ROW


def product_tile(O: int, K: int) -> tuple[int, int, int]:
    """(rows, padded row length, warps) of a program."""
    block = triton.next_power_of_2(K)
    rows = max(1, TILE_ELEMENTS // block)
    while rows > 1 and triton.cdiv(O, rows) < FEWEST_PROGRAMS:
        rows //= 2
    return rows, block, min(16, max(1, rows * block // ELEMENTS_PER_WARP))


def token_embedding_decode(out: Tensor, tokens: Tensor, wte: Tensor) -> None:
    embedding_decode(out, tokens, None, wte, None)


def embedding_decode(out: Tensor, tokens: Tensor, positions: Tensor | None, wte: Tensor, wpe: Tensor | None) -> None:
    B, C = out.shape
    block = triton.next_power_of_2(C)
    warps = min(16, max(1, block // 512))
    launch(_embedding, (B,), out, tokens, positions, wte, wpe, C, block, **overlapping(out, warps))


def after_layernorm(product: Operation, **row: Any) -> Operation:
    """Returns `product` after a layer norm: of one row in one kernel, which does not use scratch."""

    def both(*tensors: Any, scratch: Tensor, tf32: bool = False) -> None:
        *outs, ln, mean, rstd, x, ln_weight, ln_bias, weight, bias = tensors
        if takes(x, weight):
            row_product(outs[0], x, weight, bias, norm=(ln_weight, ln_bias), **row)
        else:
            layernorm_forward(ln, mean, rstd, x, ln_weight, ln_bias)
            product(*outs, ln, weight, bias, scratch=scratch, tf32=tf32)

    return both


layernorm_linear_forward = after_layernorm(linear.linear_forward, late=True)
layernorm_linear_gelu_forward = after_layernorm(linear.linear_gelu_forward, with_gelu=True)


def after_rmsnorm(product: Operation, *bias: None, with_relu2: bool = False) -> Operation:
    """Returns `product`, without a bias, after an RMS norm: of one row in one kernel, which does not use scratch."""

    def both(
        out: Tensor, norm: Tensor, rstd: Tensor, x: Tensor, weight: Tensor, *, scratch: Tensor, tf32: bool = False
    ) -> None:
        if takes(x, weight):
            row_product(out, x, weight, None, rms_norm=True, with_relu2=with_relu2, late=not with_relu2)
        else:
            rmsnorm_forward(norm, rstd, x)
            product(out, norm, weight, *bias, scratch=scratch, tf32=tf32)

    return both


rmsnorm_linear_forward = after_rmsnorm(linear.linear_forward, None)
rmsnorm_linear_relu2_forward = after_rmsnorm(linear.linear_relu2_forward, with_relu2=True)
gained_rmsnorm_linear_forward = after_gained_rmsnorm(gained_rmsnorm_forward, linear.linear_forward, 1)
gained_rmsnorm_linear_swiglu_forward = after_gained_rmsnorm(gained_rmsnorm_forward, linear.linear_swiglu_forward, 2)
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
) -> None:
    gained_qk_norm.forward(out, rstd, qkv, q_gain, k_gain, positions, 1, frequencies, scale, epsilon)


def rotary_forward(
    qkv_inout: Tensor, *, num_heads: int, positions: Tensor, frequencies: Frequencies = None, scale: float = 1.0
) -> None:
    options = {"frequencies": frequencies, "scale": scale}
    rotary.forward(qkv_inout, None, positions, num_heads, 1, rotary=True, overlaps=True, **options)


def linear_residual_forward(
    out: Tensor, residual: Tensor, inp: Tensor, weight: Tensor, bias: Tensor | None, *, scratch: Tensor, tf32: bool = False
) -> None:
    """Of one row in a kernel of its own."""
    if takes(inp, weight):
        row_product(out, inp, weight, bias, residual=residual)
    else:
        linear.linear_residual_forward(out, residual, inp, weight, bias, scratch=scratch, tf32=tf32)


def row_product(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
    rms_norm: bool = False,
    residual: Tensor | None = None,
    with_gelu: bool = False,
    with_relu2: bool = False,
    late: bool = False,
) -> None:
    """out (1, O) = f(norm(x) weight (O, K)^T + bias (O) + residual (1, O)), of one row x (1, K); f is the GELU, the squared
    ReLU or nothing, the norm a layer norm with its weight and bias, an RMS norm or nothing."""
    O, K = weight.shape
    rows, block, warps = product_tile(O, K)
    tensors = out, x, *norm, weight, bias, residual
    constants = O, K, rows, block, late, with_gelu, rms_norm, with_relu2
    launch(_row_product, (triton.cdiv(O, rows),), *tensors, *constants, **overlapping(out, warps))


def attention_decode(
    out: Tensor, keys_inout: Tensor, values_inout: Tensor, qkv: Tensor, positions: Tensor, *, scratch: Tensor
) -> None:
    B, K, maxT, D = keys_inout.shape
    H = out.shape[1] // D
    tensors = out, keys_inout, values_inout, qkv, positions
    scale, block = 1 / (math.sqrt(D) * math.log(2)), triton.next_power_of_2(D)
    elements, warps = FEW_ATTENTIONS if B * H < FEWEST_PROGRAMS else MANY_ATTENTIONS
    tile, warps = (max(16, elements // block), block), max(warps, block // 64)  # two warps spill heads of 256
    launch(_attention, (H, B), *tensors, H, maxT, D, scale, *tile, H // K, **overlapping(out, warps))


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
def _row_product(
    out, x, ln_weight, ln_bias, weight, bias, residual, O, K, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    LATE: tl.constexpr, GELU: tl.constexpr, RMS_NORM: tl.constexpr, RELU2: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    here, inside = row < O, column < K
    place = row.to(tl.int64)[:, None] * K + column[None, :]
    # Everything that no kernel of this step writes, before waiting for the one before.
    w = tl.load(weight + place, mask=here[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first")
    scale, shift = 1.0, 0.0
    if ln_weight is not None:
        scale = tl.load(ln_weight + column, mask=inside, other=0.0).to(tl.float32)
        shift = tl.load(ln_bias + column, mask=inside, other=0.0).to(tl.float32)
    added = tl.zeros([ROWS], tl.float32)
    if bias is not None:
        added += tl.load(bias + row, mask=here, other=0.0).to(tl.float32)
    if OVERLAPS:
        if not LATE:
            gdc_launch_dependents()
        gdc_wait()
    v = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    if ln_weight is not None:
        # The mean first: squares / K - mean^2 in one pass loses the variance of a row far from zero.
        centred = tl.where(inside, v - tl.sum(v, 0) / K, 0.0)
        rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(centred * centred, 0) / K + EPSILON))
        v = (centred * rstd * scale + shift).to(x.dtype.element_ty).to(tl.float32)
    if RMS_NORM:
        v = (v * rstd_of(tl.sum(v * v, 0), K)).to(x.dtype.element_ty).to(tl.float32)
    y = tl.sum(w.to(tl.float32) * v[None, :], 1) + added
    if residual is not None:
        y += tl.load(residual + row, mask=here, other=0.0).to(tl.float32)
    if GELU:
        y = gelu(y)
    if RELU2:
        y = relu2(y)
    tl.store(out + row, y.to(out.dtype.element_ty), mask=here)
    if OVERLAPS and LATE:
        gdc_launch_dependents()


@triton.jit
def _attention(
    out, keys, values, qkv, positions, H, maxT, D, SCALE, KEYS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One head of queries. Those that share keys and values all store the new ones, which are the same."""
    h, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    channel, n = tl.arange(0, BLOCK), tl.arange(0, KEYS)
    inside = channel < D
    # What was there before this step needs no waiting.
    position = tl.load(positions + b).to(tl.int32)
    kv_heads, kv_head = H // GROUP, h // GROUP
    cache = (b * kv_heads + kv_head) * maxT * D
    place = cache + n.to(tl.int64)[:, None] * D + channel[None, :]
    mask = (n < position)[:, None] & inside[None, :]
    key = tl.load(keys + place, mask=mask, other=0.0)
    value = tl.load(values + place, mask=mask, other=0.0)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    mine = qkv + b * (H + 2 * kv_heads) * D + h * D + channel
    q = tl.load(mine, mask=inside, other=0.0).to(tl.float32) * SCALE
    mine += (H + kv_head - h) * D
    k = tl.load(mine, mask=inside, other=0.0)
    v = tl.load(mine + kv_heads * D, mask=inside, other=0.0)
    tl.store(keys + cache + position.to(tl.int64) * D + channel, k, mask=inside)
    tl.store(values + cache + position.to(tl.int64) * D + channel, v, mask=inside)
    # Every row of the tile keeps a softmax of its own over the keys it meets: nothing in the loop waits for another warp.
    # A row that meets none stays at a maximum far below all scores, and at a sum of 0.
    largest = tl.where(n < position, tl.sum(key.to(tl.float32) * q[None, :], 1), NOTHING)
    total = tl.where(n < position, 1.0, 0.0)
    y = total[:, None] * value.to(tl.float32)
    for start in range(KEYS, position, KEYS):
        earlier = start + n < position
        mask = earlier[:, None] & inside[None, :]
        key = tl.load(keys + place + start * D, mask=mask, other=0.0)
        value = tl.load(values + place + start * D, mask=mask, other=0.0)
        scores = tl.where(earlier, tl.sum(key.to(tl.float32) * q[None, :], 1), NOTHING)
        above = tl.maximum(largest, scores)
        weights = tl.where(earlier, tl.exp2(scores - above), 0.0)
        before = tl.exp2(largest - above)
        total = total * before + weights
        y = y * before[:, None] + weights[:, None] * value.to(tl.float32)
        largest = above
    # The new token is at hand; the caches are read before it only.
    own = tl.sum(q * k.to(tl.float32))
    top = tl.maximum(own, tl.max(largest))
    share = tl.exp2(largest - top)
    mine_weight = tl.exp2(own - top)
    sums = tl.sum(total * share) + mine_weight
    result = tl.sum(y * share[:, None], 0) + mine_weight * v.to(tl.float32)
    tl.store(out + b * H * D + h * D + channel, (result / sums).to(out.dtype.element_ty), mask=inside)
