"""The loss, cross-entropy over the real vocabulary, and its gradient in place. One program per row of logits."""

import triton
import triton.language as tl
from torch import Tensor

from handgrad.ops.cuda.launch import launch

# The softmax runs online (Milakov & Gimelshein 2018), but every lane keeps its own maximum and sum; the program reduces
# them once, after the sweep. A reduction in every iteration of the loop halves the bandwidth.
#
# V is odd (50257); as the limit of a mask it would break 16-byte loads. So the program reads whole tiles up to V without a
# mask, and masks the tail up to Vp, a multiple of 128, in registers.

LOG2_E = tl.constexpr(1.4426950408889634)
TWO_LOG2_E = tl.constexpr(2 * 1.4426950408889634)
LOWEST = tl.constexpr(-1e38)  # initial maximum: unlike minus infinity it can be subtracted from itself

# Each multiprocessor works on a few rows of 100 KB; the L2 cache of 50 MB holds them until the second sweep. Eight
# 16-byte loads per lane are in flight, and the running maximum changes once for eight of them, which saves seven of sixteen
# exponentials: 89 % of the copy bandwidth, where 16 warps with four loads reach 86 %.
WARPS = 8
BLOCK, UNROLL = tl.constexpr(2048), tl.constexpr(8)
TILE = tl.constexpr(2048 * 8)

# Elements per program of the cap alone: two 16-byte loads per lane in bf16.
CAP_BLOCK = 4096


def classifier_forward(
    losses: Tensor, logits_inout: Tensor, targets: Tensor, *, vocab_size: int, softcap: float = 0.0, untrained: bool = False
) -> None:
    N, Vp = logits_inout.shape
    padded = triton.next_power_of_2(max(1, Vp - vocab_size))
    sizes = vocab_size, Vp, padded
    launch(_forward, (N,), losses, logits_inout, targets, *sizes, softcap, untrained, num_warps=WARPS)


def classifier_forward_backward(
    losses: Tensor,
    logits_to_dlogits_inout: Tensor,
    targets: Tensor,
    scale: Tensor,
    *,
    vocab_size: int,
    softcap: float = 0.0,
    untrained: bool = False,
) -> None:
    N, Vp = logits_to_dlogits_inout.shape
    tensors = losses, logits_to_dlogits_inout, targets, scale
    own = int(scale.numel() > 1)
    launch(_forward_backward, (N,), *tensors, vocab_size, Vp, softcap, untrained, own, num_warps=WARPS)


def softcap_forward(logits_inout: Tensor, *, softcap: float) -> None:
    elements = logits_inout.numel()
    launch(_cap, (triton.cdiv(elements, CAP_BLOCK),), logits_inout, elements, CAP_BLOCK, softcap, num_warps=WARPS)


@triton.jit
def _cap(logits, elements, BLOCK: tl.constexpr, CAP: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offset = tl.arange(0, BLOCK)
    inside = offset < elements - start
    x = tl.load(logits + start + offset, mask=inside, other=0.0).to(tl.float32)
    TYPE: tl.constexpr = logits.dtype.element_ty
    tl.store(logits + start + offset, capped(x, CAP, TYPE)[0].to(TYPE), mask=inside)


@triton.jit
def capped(x, CAP: tl.constexpr, TYPE: tl.constexpr):
    """z = CAP tanh(x / CAP) and dz/dx, or x and 1 if CAP is 0, in float32. TYPE is the dtype of x in memory.

    With e = exp(-2 |x| / CAP) <= 1, which does not overflow, tanh(|x| / CAP) = (1 - e) / (1 + e), and dz/dx =
    1 - (z / CAP)^2 = 4 e / (1 + e)^2, which cancels nowhere. The unit for exponentials and reciprocals yields 16 results
    per cycle and multiprocessor, so 16-bit logits use one of its instructions, tanh, instead of two. Its relative error is
    at most 2^-11, as much as rounding x to float16 has cost, and an eighth of rounding to bfloat16
    (https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-tanh)."""
    if CAP == 0:
        z, slope = x, 1.0
    elif tl.float32 != TYPE:
        t = tanh(x * (1 / CAP))
        z, slope = CAP * t, 1 - t * t
    else:
        e = tl.exp2(-tl.abs(x) * (TWO_LOG2_E / CAP))
        part = 1.0 / (1 + e)
        bounded = CAP * ((1 - e) * part)
        z, slope = tl.where(x < 0, -bounded, bounded), 4 * e * part * part
    return z, slope


@triton.jit
def tanh(x):
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _forward(
    losses, logits, targets, V: tl.constexpr, Vp: tl.constexpr, PADDED: tl.constexpr, CAP: tl.constexpr,
    UNTRAINED: tl.constexpr = False,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * Vp
    target = tl.load(targets + row)
    if UNTRAINED and target < 0:
        tl.store(losses + row, 0.0)
    else:
        store_loss(losses + row, logits, target, V, Vp, CAP, "evict_first")
    if Vp > V:
        beyond = V + tl.arange(0, PADDED)
        tl.store(logits + beyond, tl.full((PADDED,), float("-inf"), tl.float32).to(logits.dtype.element_ty), beyond < Vp)


@triton.jit
def _forward_backward(
    losses, logits, targets, scale, V: tl.constexpr, Vp: tl.constexpr, CAP: tl.constexpr, UNTRAINED: tl.constexpr = False,
    SCALES: tl.constexpr = 0,
):  # fmt: skip
    """SCALES: 1 if each row has its own, else 0."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * Vp
    scale += row * SCALES
    loss_and_gradient(losses + row, logits, tl.load(targets + row), scale, V, Vp, CAP, UNTRAINED, store_in_place, logits)


@triton.jit
def store_in_place(logits, column, d, mask, EVICTION: tl.constexpr):
    tl.store(logits + column, d.to(logits.dtype.element_ty), mask=mask, eviction_policy=EVICTION)


@triton.jit
def loss_and_gradient(
    loss, logits, target, scale, V: tl.constexpr, Vp: tl.constexpr, CAP: tl.constexpr, UNTRAINED: tl.constexpr,
    STORE: tl.constexpr, into,
):  # fmt: skip
    """Stores a row's loss, and d = scale * dloss/dlogits by STORE(into, columns, d, mask, EVICTION), which rounds d.
    It does not read a row without a loss. (The test costs registers, so it is compiled only with UNTRAINED.)"""
    if UNTRAINED and target < 0:
        tl.store(loss, 0.0)
        for start in range(0, Vp, BLOCK):
            column = start + tl.arange(0, BLOCK)[None, :]
            STORE(into, column, tl.zeros((1, BLOCK), tl.float32), column < Vp, "evict_first")
    else:
        trained_loss_and_gradient(loss, logits, target, scale, V, Vp, CAP, STORE, into)


@triton.jit
def trained_loss_and_gradient(
    loss, logits, target, scale, V: tl.constexpr, Vp: tl.constexpr, CAP: tl.constexpr, STORE: tl.constexpr, into
):
    of_target, maximum, total = store_loss(loss, logits, target, V, Vp, CAP, "evict_last")
    factor = tl.load(scale)  # not earlier: one more register would leave fewer programs resident
    per_exponential = factor / total

    # Backwards: the L1 cache most likely still holds what was read last.
    WHOLE: tl.constexpr = V // TILE * TILE
    for start in range(WHOLE, Vp, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        x = tl.load(logits + column, mask=column < Vp, other=0.0, eviction_policy="evict_first").to(tl.float32)
        z, slope = capped(x, CAP, logits.dtype.element_ty)
        d = tl.where(column < V, tl.exp2((z - maximum) * LOG2_E) * per_exponential * slope, 0.0)
        STORE(into, column, d, column < Vp, "evict_first")
    for back in range(0, WHOLE, TILE):
        column = tile_columns(WHOLE - TILE - back)
        x = tl.load(logits + column, eviction_policy="evict_first").to(tl.float32)
        z, slope = capped(x, CAP, logits.dtype.element_ty)
        d = tl.exp2((z - maximum) * LOG2_E) * per_exponential * slope
        STORE(into, column, d, None, "evict_first")

    # The target's gradient overwrites what the sweep stored there: cheaper than a comparison for every column.
    tl.debug_barrier()
    z, slope = capped(of_target, CAP, logits.dtype.element_ty)
    d = (tl.exp2((z - maximum) * LOG2_E) / total - 1.0) * factor * slope
    STORE(into, target, d, None, "")


@triton.jit
def store_loss(loss, logits, target, V: tl.constexpr, Vp: tl.constexpr, CAP: tl.constexpr, EVICTION: tl.constexpr):
    """Stores a row's loss. Returns (the target's uncapped logit, m, sum of exp(z - m)), m the largest of its V logits z."""
    of_target = tl.load(logits + target).to(tl.float32)
    maximum, total = softmax_sums(logits, V, Vp, CAP, EVICTION)
    tl.store(loss, tl.log(total) - (capped(of_target, CAP, logits.dtype.element_ty)[0] - maximum))
    return of_target, maximum, total


@triton.jit
def softmax_sums(logits, V: tl.constexpr, Vp: tl.constexpr, CAP: tl.constexpr, EVICTION: tl.constexpr):
    """(m, sum of exp(z - m)) of a row, with m the largest of its V logits z."""
    WHOLE: tl.constexpr = V // TILE * TILE
    maximum = tl.full((1, BLOCK), LOWEST, tl.float32)
    total = tl.zeros((1, BLOCK), tl.float32)
    for start in range(0, WHOLE, TILE):
        x = tl.load(logits + tile_columns(start), eviction_policy=EVICTION).to(tl.float32)
        maximum, total = include(maximum, total, capped(x, CAP, logits.dtype.element_ty)[0])
    for start in range(WHOLE, Vp, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        x = tl.load(logits + column, mask=column < Vp, other=0.0, eviction_policy=EVICTION).to(tl.float32)
        z = tl.where(column < V, capped(x, CAP, logits.dtype.element_ty)[0], float("-inf"))
        maximum, total = include(maximum, total, z)
    largest = tl.max(maximum)
    return largest, tl.sum(total * tl.exp2((maximum - largest) * LOG2_E))


@triton.jit
def tile_columns(start):
    """Columns (UNROLL, BLOCK): a lane has its loads of all UNROLL rows in flight at once."""
    return start + tl.arange(0, UNROLL)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def include(maximum, total, x):
    """Updates the running maxima and sums (1, BLOCK) with x (rows, BLOCK)."""
    larger = tl.maximum(maximum, tl.max(x, 0, keep_dims=True))
    new = tl.sum(tl.exp2((x - larger) * LOG2_E), 0, keep_dims=True)
    return larger, total * tl.exp2((maximum - larger) * LOG2_E) + new
