"""The end of a step: loss, gradient norm, verdict, AdamW."""

import functools
import math
import operator

import torch
from torch import Tensor

from handgrad import ops
from handgrad.ops.hashing import BITS32, FIRST_MOMENT, SECOND_MOMENT, WEYL, mixed

# Loss of a step: the sums of the micro-steps, added in order.


def loss_sum(sum_acc: Tensor, losses: Tensor) -> None:
    """sum_acc (1) float64 += the sum of losses (N)."""
    if sum_acc.dtype == torch.float64:
        sum_acc.add_(losses.double().sum())
    else:  # a device without float64
        sum_acc.add_(losses.sum())


# Global norm: sums of squares over fixed-size blocks. So the number of threads, devices or shards does not change the sum.


def squared_norms(out: Tensor, flat: Tensor, *, block_elements: int) -> None:
    """out (blocks) = sum of squares of each block of flat, a buffer of gradients; the last block may be shorter."""
    whole = flat.numel() // block_elements
    end = whole * block_elements
    norm = torch.linalg.vector_norm  # one pass over memory; square + sum takes 13x
    norm(flat[:end].view(whole, block_elements), dim=1, out=out[:whole])
    if end < flat.numel():
        norm(flat[end:].view(1, -1), dim=1, out=out[whole:])
    out.square_()


# Verdict on a step: mean loss, gradient norm, clip factor, and whether to update at all.
# With dynamic loss scaling S (Micikevicius et al. 2018) the gradient buffers hold S times the gradient.


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
    """Fills results from the step's losses summed per lane (lanes), the blocks' sums of squares, and the step's tokens and
    limits in `controls`.

    loss_scale_inout (3): S / gradient_tokens, which scaled the gradients; S; updates since S last changed. It changes only
    with `dynamic_loss_scale`. Over a step of `tokens` the gradients add up to tokens / gradient_tokens times their mean."""
    limits = controls.tolist()
    tokens = limits[ops.CONTROL_TOKENS]
    loss = functools.reduce(operator.add, sum_of_losses.tolist()) / tokens  # `sum` would compensate its rounding
    scale = loss_scale_inout[1].item()
    times = scale * (tokens / gradient_tokens)  # the factor in the gradient buffers
    norm = math.sqrt(norm_partials.cpu().double().sum().item()) / times
    if not math.isfinite(loss):
        code = ops.LOSS_NOT_FINITE
    elif not math.isfinite(norm):
        code = ops.NORM_NOT_FINITE
    elif loss > limits[ops.CONTROL_LOSS_LIMIT]:
        code = ops.LOSS_OUTLIER
    elif norm > limits[ops.CONTROL_NORM_LIMIT]:
        code = ops.NORM_OUTLIER
    else:
        code = ops.UPDATE
    clip = clip_norm / norm if clip_norm and norm > clip_norm else 1.0
    results.copy_(torch.tensor([loss, norm, clip / times, code, scale], dtype=results.dtype))
    if dynamic_loss_scale:
        change_loss_scale(loss_scale_inout, code, gradient_tokens)


def change_loss_scale(loss_scale_inout: Tensor, code: int, gradient_tokens: int) -> None:
    """Updates `verdict`'s loss_scale_inout for the next step, after a step with the verdict `code`."""
    scale, good_steps = loss_scale_inout[1:].tolist()
    if code == ops.NORM_NOT_FINITE:
        scale, good_steps = max(scale / 2, ops.SMALLEST_LOSS_SCALE), 0.0
    elif code == ops.UPDATE:
        good_steps += 1
        if good_steps == ops.LOSS_SCALE_GROWTH_STEPS:
            scale, good_steps = min(scale * 2, ops.LARGEST_LOSS_SCALE), 0.0
    new = [scale / gradient_tokens, scale, good_steps]
    loss_scale_inout.copy_(torch.tensor(new, dtype=loss_scale_inout.dtype))


# AdamW (Loshchilov & Hutter 2019), with the gradient g scaled first:
# m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,
# w = (1 - lr decay) w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps).


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
    """One update of flat float32 (or float64) buffers of equal length, unless the verdict in `results` forbids it;
    `published` (any dtype, possibly `weight_inout` itself) receives the new weights, rounded. The gradient is undefined
    afterwards. `controls` holds the learning rate, which `rate` multiplies, and the step, which counts from 1.

    bf16 weights have no master copy: `weight_inout` is `published`. The update runs in float32 and rounds to one of the two
    neighbours at random, keyed by `seed`, the step and the element's index in the whole buffer; these buffers begin there
    at `first_element`. bf16 moments are rounded likewise, with their own random bits, after the weight update has read
    them."""
    if results[ops.RESULT_VERDICT].item() != ops.UPDATE:
        return
    step, learning_rate = (controls[index].item() for index in (ops.CONTROL_STEP, ops.CONTROL_LEARNING_RATE))
    learning_rate *= rate
    weight, m, v = (exact(tensor) for tensor in (weight_inout, m_inout, v_inout))
    g = gradient_inout * results[ops.RESULT_SCALE].to(gradient_inout.dtype)
    m.mul_(beta1).add_(g, alpha=1 - beta1)
    v.mul_(beta2).add_(g * g, alpha=1 - beta2)
    denominator = (v / (1 - beta2**step)).sqrt_().add_(epsilon)
    weight.mul_(1 - learning_rate * weight_decay).sub_(m / denominator, alpha=learning_rate / (1 - beta1**step))
    keep_moments(m_inout, v_inout, m, v, int(step), seed, first_element)
    publish(published, weight_inout, weight, int(step), seed, first_element)


def exact(tensor: Tensor) -> Tensor:
    """The tensor to update: the tensor itself, or a float32 copy of a bf16 tensor."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def keep_moments(m_inout: Tensor, v_inout: Tensor, m: Tensor, v: Tensor, step: int, seed: int, first_element: int) -> None:
    """Rounds the updated m and v into bf16 moments."""
    for stored, moment, salt in ((m_inout, m, FIRST_MOMENT), (v_inout, v, SECOND_MOMENT)):
        if stored is not moment:
            round_stochastically(stored, moment, step, seed ^ salt, first_element)


def publish(published: Tensor, weight_inout: Tensor, weight: Tensor, step: int, seed: int, first_element: int) -> None:
    """Stores the updated `weight`: stochastically rounded into bf16 weights without masters, else to nearest."""
    if weight is not weight_inout:
        round_stochastically(weight_inout, weight, step, seed, first_element)
    elif published.data_ptr() != weight_inout.data_ptr():
        published.copy_(weight_inout)


# Stochastic rounding to bf16: add r, uniform in 0..65535, to the 32 bits of a float and keep the upper 16. The chance to
# round away from zero is the fraction cut off, so the mean over r is the float itself. r is a hash.


def round_stochastically(out: Tensor, exact: Tensor, step: int, seed: int, first_element: int) -> None:
    """out (bf16) = exact (float32), each rounded up or down at random; infinities and NaN stay."""
    key = mixed(step ^ mixed(seed))
    indices = torch.arange(first_element, first_element + exact.numel(), dtype=torch.int64, device=exact.device)
    added = mixed((indices * WEYL + key) & BITS32) & 0xFFFF
    bits = exact.view(torch.int32).to(torch.int64) & BITS32
    added = added.where((bits & 0x7F800000) != 0x7F800000, torch.zeros_like(added))
    out.copy_(((bits + added) >> 16).to(torch.int16).view(torch.bfloat16))
