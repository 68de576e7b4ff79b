"""The divergence of a model from its teacher over the real vocabulary, and its gradient in place. One program per row."""

import triton
import triton.language as tl
from torch import Tensor

from handgrad.ops.cuda.classifier import LOG2_E, LOWEST, WARPS, capped
from handgrad.ops.cuda.launch import launch

# Two sweeps over a row of both logits, as in `classifier`: the first finds the loss, the second, backwards, turns logits
# into gradients. With g the difference of both logits, S the sums of their exponentials, log(p / q) = g - log(S_p / S_q).
# So the loss is log(S_p / S_q) - E_q[g] or, in reverse, E_p[g] - log(S_p / S_q), and log(p / q) less that is g - E_p[g].
BLOCK, UNROLL = tl.constexpr(2048), tl.constexpr(2)  # two 16-byte loads of either row per lane
TILE = tl.constexpr(2048 * 2)


def distill_forward_backward(
    losses: Tensor,
    logits_to_dlogits_inout: Tensor,
    teacher_logits: Tensor,
    targets: Tensor,
    scale: Tensor,
    *,
    vocab_size: int,
    softcap: float = 0.0,
    teacher_softcap: float = 0.0,
    untrained: bool = False,
    reverse: bool = False,
) -> None:
    N, Vp = logits_to_dlogits_inout.shape
    tensors = losses, logits_to_dlogits_inout, teacher_logits, targets, scale
    settings = vocab_size, Vp, softcap, teacher_softcap, untrained, int(scale.numel() > 1), reverse
    launch(_distill, (N,), *tensors, *settings, num_warps=WARPS)


@triton.jit
def _distill(
    losses, logits, teacher, targets, scale, V: tl.constexpr, Vp: tl.constexpr, CAP: tl.constexpr,
    CAP_Q: tl.constexpr, UNTRAINED: tl.constexpr, SCALES: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """SCALES: 1 if each row has its own, else 0."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * Vp
    teacher += row * Vp
    if UNTRAINED and tl.load(targets + row) < 0:
        tl.store(losses + row, 0.0)
        for start in range(0, Vp, BLOCK):
            column = start + tl.arange(0, BLOCK)
            tl.store(logits + column, tl.zeros((BLOCK,), logits.dtype.element_ty), column < Vp)
    else:
        loss, mean, maximum_p, total_p, maximum_q, total_q = divergence(logits, teacher, V, Vp, CAP, CAP_Q, REVERSE)
        tl.store(losses + row, loss)
        factor = tl.load(scale + row * SCALES)
        per_p, per_q = factor / total_p, factor / total_q
        for back in range(0, Vp, TILE):
            start = (Vp - 1) // TILE * TILE - back
            z, slope, y, column = tile_of(logits, teacher, start, V, Vp, CAP, CAP_Q, "evict_first")
            d = tl.exp2((z - maximum_p) * LOG2_E) * per_p
            d = d * (z - y - mean) if REVERSE else d - tl.exp2((y - maximum_q) * LOG2_E) * per_q
            d = tl.where(column < V, d * slope, 0.0)
            tl.store(logits + column, d.to(logits.dtype.element_ty), column < Vp)


@triton.jit
def tile_of(
    logits, teacher, start, V: tl.constexpr, Vp: tl.constexpr, CAP: tl.constexpr, CAP_Q: tl.constexpr,
    EVICTION: tl.constexpr,
):  # fmt: skip
    """(z, dz/dlogits, y, columns), each (UNROLL, BLOCK): the capped logits and the teacher's, minus infinity past V."""
    column = start + tl.arange(0, UNROLL)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits + column, mask=column < Vp, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    y = tl.load(teacher + column, mask=column < Vp, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    z, slope = capped(x, CAP, logits.dtype.element_ty)
    y = capped(y, CAP_Q, teacher.dtype.element_ty)[0]
    return tl.where(column < V, z, float("-inf")), slope, tl.where(column < V, y, float("-inf")), column


@triton.jit
def divergence(
    logits, teacher, V: tl.constexpr, Vp: tl.constexpr, CAP: tl.constexpr, CAP_Q: tl.constexpr, REVERSE: tl.constexpr
):
    """(loss, E[g], the maximum of z and the sum of exp(z - maximum), the same two of y) of a row. The expectation is under
    q, or p in reverse."""
    maximum_p, maximum_q = tl.full((1, BLOCK), LOWEST, tl.float32), tl.full((1, BLOCK), LOWEST, tl.float32)
    total_p, total_q = tl.zeros((1, BLOCK), tl.float32), tl.zeros((1, BLOCK), tl.float32)
    moment = tl.zeros((1, BLOCK), tl.float32)
    for start in range(0, Vp, TILE):
        z, _, y, column = tile_of(logits, teacher, start, V, Vp, CAP, CAP_Q, "evict_last")
        g = tl.where(column < V, z - y, 0.0)
        maximum_p, kept_p, weight_p = larger(maximum_p, z)
        maximum_q, kept_q, weight_q = larger(maximum_q, y)
        total_p = total_p * kept_p + tl.sum(weight_p, 0, keep_dims=True)
        total_q = total_q * kept_q + tl.sum(weight_q, 0, keep_dims=True)
        share, weight = (kept_p, weight_p) if REVERSE else (kept_q, weight_q)
        moment = moment * share + tl.sum(weight * g, 0, keep_dims=True)
    largest_p, largest_q = tl.max(maximum_p), tl.max(maximum_q)
    in_p, in_q = tl.exp2((maximum_p - largest_p) * LOG2_E), tl.exp2((maximum_q - largest_q) * LOG2_E)
    sum_p, sum_q = tl.sum(total_p * in_p), tl.sum(total_q * in_q)
    shift = largest_p - largest_q + tl.log(sum_p / sum_q)
    mean = tl.sum(moment * in_p) / sum_p if REVERSE else tl.sum(moment * in_q) / sum_q
    loss = mean - shift if REVERSE else shift - mean
    return loss, mean, largest_p, sum_p, largest_q, sum_q


@triton.jit
def larger(maximum, x):
    """(the larger of the running maxima (1, BLOCK) and x (UNROLL, BLOCK), the factor of the sums so far, exp(x - it))."""
    new = tl.maximum(maximum, tl.max(x, 0, keep_dims=True))
    return new, tl.exp2((maximum - new) * LOG2_E), tl.exp2((x - new) * LOG2_E)
