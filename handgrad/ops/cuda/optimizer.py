"""Loss, gradient norm and verdict of a step, and AdamW, all without waiting for the host."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from handgrad import ops
from handgrad.ops import hashing
from handgrad.ops.cuda.hashing import WEYL, mixed
from handgrad.ops.cuda.launch import launch

# Indices into `controls` and `results`, as constants for the kernels.
STEP, LEARNING_RATE = tl.constexpr(ops.CONTROL_STEP), tl.constexpr(ops.CONTROL_LEARNING_RATE)
LOSS_LIMIT, NORM_LIMIT = tl.constexpr(ops.CONTROL_LOSS_LIMIT), tl.constexpr(ops.CONTROL_NORM_LIMIT)
STEP_TOKENS = tl.constexpr(ops.CONTROL_TOKENS)
LOSS, NORM, SCALE = tl.constexpr(ops.RESULT_LOSS), tl.constexpr(ops.RESULT_NORM), tl.constexpr(ops.RESULT_SCALE)
VERDICT, LOSS_SCALE = tl.constexpr(ops.RESULT_VERDICT), tl.constexpr(ops.RESULT_LOSS_SCALE)
UPDATE = tl.constexpr(ops.UPDATE)
LOSS_NOT_FINITE, NORM_NOT_FINITE = tl.constexpr(ops.LOSS_NOT_FINITE), tl.constexpr(ops.NORM_NOT_FINITE)
LOSS_OUTLIER, NORM_OUTLIER = tl.constexpr(ops.LOSS_OUTLIER), tl.constexpr(ops.NORM_OUTLIER)
FIRST_MOMENT, SECOND_MOMENT = tl.constexpr(hashing.FIRST_MOMENT), tl.constexpr(hashing.SECOND_MOMENT)
GROWTH_STEPS = tl.constexpr(ops.LOSS_SCALE_GROWTH_STEPS)
LARGEST, SMALLEST = tl.constexpr(ops.LARGEST_LOSS_SCALE), tl.constexpr(ops.SMALLEST_LOSS_SCALE)

# One program adds up to 65,536 losses or 24,000 partial norms: 16 of them per lane and iteration.
SUM_ROWS, SUM_COLUMNS, SUM_WARPS = 4, 4096, 32

# One program per block of 256 KB, eight 16-byte loads per lane in flight.
NORM_ROWS, NORM_COLUMNS, NORM_WARPS = 8, 1024, 8

# A program updates several tiles, one after another, so the float64 bias corrections cost nothing.
UPDATE_ELEMENTS, UPDATE_TILES, UPDATE_WARPS = 1024, 4, 8


def loss_sum(sum_acc: Tensor, losses: Tensor) -> None:
    launch(_loss_sum, (1,), sum_acc, losses, losses.numel(), SUM_ROWS, SUM_COLUMNS, num_warps=SUM_WARPS)


@triton.jit
def float64_sum(values, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The float64 sum of values (N) float32, in one program."""
    sums = tl.zeros((1, COLUMNS), tl.float64)
    for start in range(0, N, ROWS * COLUMNS):
        offset = start + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        sums += tl.sum(tl.load(values + offset, mask=offset < N, other=0.0).to(tl.float64), 0, keep_dims=True)
    return tl.sum(sums)


@triton.jit
def _loss_sum(sum_acc, losses, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    tl.store(sum_acc, tl.load(sum_acc) + float64_sum(losses, N, ROWS, COLUMNS))


def squared_norms(out: Tensor, flat: Tensor, *, block_elements: int) -> None:
    blocks, elements = out.shape[0], flat.numel()
    launch(_squared_norms, (blocks,), out, flat, block_elements, elements, NORM_ROWS, NORM_COLUMNS, num_warps=NORM_WARPS)


@triton.jit
def _squared_norms(out, flat, size, elements, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    flat += block * size
    left = elements - block * size
    sums = tl.zeros((1, COLUMNS), tl.float32)
    for start in range(0, size, ROWS * COLUMNS):
        offset = start + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        x = tl.load(flat + offset, mask=(offset < size) & (offset < left), other=0.0)
        sums += tl.sum(x * x, 0, keep_dims=True)
    tl.store(out + block, tl.sum(sums))


def verdict(
    results: Tensor,
    loss_scale_inout: Tensor,
    sum_of_losses: Tensor,
    norm_partials: Tensor,
    controls: Tensor,
    *,
    gradient_tokens: int,
    clip_norm: float,
    dynamic_loss_scale: bool,
) -> None:
    tensors = results, loss_scale_inout, sum_of_losses, norm_partials, controls
    sizes = sum_of_losses.numel(), norm_partials.numel()
    settings = float(gradient_tokens), float(clip_norm), dynamic_loss_scale
    launch(_verdict, (1,), *tensors, *sizes, *settings, SUM_ROWS, SUM_COLUMNS, num_warps=SUM_WARPS)


# TOKENS and CLIP_NORM here and the settings of `_adamw` are constants: Triton passes a float argument as float32, and
# 1 - beta of a float32 beta is off by 1e-5 at 0.999.


@triton.jit
def _verdict(
    results, loss_scale, sum_of_losses, norm_partials, controls, lanes, N, TOKENS: tl.constexpr, CLIP_NORM: tl.constexpr,
    DYNAMIC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    loss = tl.load(sum_of_losses).to(tl.float64)
    for lane in range(1, lanes):
        loss += tl.load(sum_of_losses + lane).to(tl.float64)
    tokens = tl.load(controls + STEP_TOKENS).to(tl.float64)
    loss /= tokens
    scale = tl.load(loss_scale + 1).to(tl.float64)
    good_steps = tl.load(loss_scale + 2).to(tl.float64)
    times = scale * (tokens / TOKENS)  # the gradient buffers hold this many times the mean gradient
    norm = tl.sqrt(float64_sum(norm_partials, N, ROWS, COLUMNS)) / times
    norm_is_finite = tl.abs(norm) < float("inf")  # false for NaN
    code = tl.where(norm > tl.load(controls + NORM_LIMIT), NORM_OUTLIER, UPDATE)
    code = tl.where(loss > tl.load(controls + LOSS_LIMIT), LOSS_OUTLIER, code)
    code = tl.where(norm_is_finite, code, NORM_NOT_FINITE)
    code = tl.where(tl.abs(loss) < float("inf"), code, LOSS_NOT_FINITE)
    factor = 1.0 / times
    if CLIP_NORM != 0:
        factor = tl.where(norm > CLIP_NORM, CLIP_NORM / norm / times, factor)
    tl.store(results + LOSS, loss)
    tl.store(results + NORM, norm)
    tl.store(results + SCALE, factor)
    tl.store(results + VERDICT, code.to(tl.float64))
    tl.store(results + LOSS_SCALE, scale)
    if DYNAMIC:
        good_steps = tl.where(code == UPDATE, good_steps + 1, good_steps)
        grows = good_steps == GROWTH_STEPS
        new = tl.where(grows, tl.minimum(scale * 2, LARGEST), scale)
        new_steps = tl.where(grows, 0.0, good_steps)
        overflowed = code == NORM_NOT_FINITE
        new = tl.where(overflowed, tl.maximum(scale / 2, SMALLEST), new)
        new_steps = tl.where(overflowed, 0.0, new_steps)
        tl.store(loss_scale, (new / TOKENS).to(tl.float32))
        tl.store(loss_scale + 1, new.to(tl.float32))
        tl.store(loss_scale + 2, new_steps.to(tl.float32))


def adamw_update(
    published: Tensor,
    weight_inout: Tensor,
    m_inout: Tensor,
    v_inout: Tensor,
    gradient_inout: Tensor,
    controls: Tensor,
    results: Tensor,
    *,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    rate: float = 1.0,
    seed: int = 0,
    first_element: int = 0,
) -> None:
    elements = weight_inout.numel()
    rounded = weight_inout.dtype == torch.bfloat16
    weights = weight_inout.view(torch.int16) if rounded else weight_inout
    moments, rounded_moments = (m_inout, v_inout), m_inout.dtype == torch.bfloat16
    if rounded_moments:
        moments = m_inout.view(torch.int16), v_inout.view(torch.int16)
    tensors = published, weights, *moments, gradient_inout, controls, results
    publishes = published.data_ptr() != weight_inout.data_ptr()
    logarithms = (math.log2(beta) if beta else -math.inf for beta in (beta1, beta2))
    settings = float(beta1), float(beta2), *logarithms, float(epsilon), float(weight_decay), float(rate)
    sizes = UPDATE_ELEMENTS, UPDATE_TILES
    grid = (triton.cdiv(elements, UPDATE_ELEMENTS * UPDATE_TILES),)
    arguments = *tensors, elements, seed, first_element, publishes, rounded, rounded_moments, *settings, *sizes
    launch(_adamw, grid, *arguments, num_warps=UPDATE_WARPS)


@triton.jit(do_not_specialize=["seed", "first_element"])  # one kernel for every range of the flat buffers
def _adamw(
    published, weight, m_buffer, v_buffer, gradient, controls, results, elements, seed, first_element,
    PUBLISH: tl.constexpr, ROUNDED: tl.constexpr, ROUNDED_MOMENTS: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr,
    LOG2_BETA1: tl.constexpr, LOG2_BETA2: tl.constexpr, EPSILON: tl.constexpr, WEIGHT_DECAY: tl.constexpr,
    RATE: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    if tl.load(results + VERDICT) == UPDATE:
        scale = tl.load(results + SCALE).to(tl.float32)
        step, rate = tl.load(controls + STEP), tl.load(controls + LEARNING_RATE) * RATE
        m_rate = (rate / (1.0 - tl.exp2(step * LOG2_BETA1))).to(tl.float32)
        v_factor = (1.0 / tl.sqrt(1.0 - tl.exp2(step * LOG2_BETA2))).to(tl.float32)
        decay = (rate * WEIGHT_DECAY).to(tl.float32)
        first = tl.program_id(0).to(tl.int64) * (BLOCK * TILES)
        for tile in range(TILES):
            start = first + tile * BLOCK
            offset = start + tl.arange(0, BLOCK)
            inside = tl.arange(0, BLOCK) < elements - start
            g = tl.load(gradient + offset, mask=inside, other=0.0) * scale
            w = loaded(weight + offset, inside, ROUNDED)
            m = loaded(m_buffer + offset, inside, ROUNDED_MOMENTS)
            v = loaded(v_buffer + offset, inside, ROUNDED_MOMENTS)
            m = BETA1 * m + (1.0 - BETA1) * g
            v = BETA2 * v + (1.0 - BETA2) * (g * g)
            w -= decay * w + tl.div_rn(m_rate * m, tl.sqrt_rn(v) * v_factor + EPSILON)
            if ROUNDED_MOMENTS:
                element, key = first_element + offset, seed.to(tl.uint32)
                rounded_m = stochastically(m, element, step.to(tl.int32), key ^ FIRST_MOMENT)
                rounded_v = stochastically(v, element, step.to(tl.int32), key ^ SECOND_MOMENT)
                tl.store(m_buffer + offset, rounded_m, mask=inside)
                tl.store(v_buffer + offset, rounded_v, mask=inside)
            else:
                tl.store(m_buffer + offset, m, mask=inside)
                tl.store(v_buffer + offset, v, mask=inside)
            if ROUNDED:
                rounded = stochastically(w, first_element + offset, step.to(tl.int32), seed)
                tl.store(weight + offset, rounded, mask=inside)
            else:
                tl.store(weight + offset, w, mask=inside)
            if PUBLISH:
                tl.store(published + offset, w.to(published.dtype.element_ty), mask=inside)


@triton.jit
def loaded(pointers, inside, ROUNDED: tl.constexpr):
    """Loads float32 numbers, or bf16 numbers (as int16) as float32."""
    if ROUNDED:
        return (tl.load(pointers, mask=inside, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return tl.load(pointers, mask=inside, other=0.0)


# Stochastic rounding to bf16: the upper half of a float's bits plus a random lower half (see the reference).


@triton.jit
def stochastically(w, index, step, seed):
    """The bits (int16) of w (float32) rounded to bf16 at random, keyed by its index, the step and the seed."""
    key = mixed(step.to(tl.uint32) ^ mixed(seed.to(tl.uint32)))
    added = mixed(index.to(tl.uint32) * WEYL + key) & 0xFFFF
    bits = w.to(tl.uint32, bitcast=True)
    added = tl.where((bits & 0x7F800000) != 0x7F800000, added, 0)
    return ((bits + added) >> 16).to(tl.int16)
