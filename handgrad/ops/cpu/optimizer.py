"""AdamW by torch's fused kernel, and Muon's update, in place because the host can read the verdict here; float32 GEMMs by
oneDNN if that is faster.

The kernel rounds the tail of a partial vector differently: split flat buffers only at multiples of 128 elements.
"""

import torch
from torch import Tensor

from handgrad import ops
from handgrad.ops.cpu.linear import gemm, prefers_onednn
from handgrad.ops.reference import muon as reference
from handgrad.ops.reference.muon import ABOVE_LARGEST, FIRST_MOMENTUM, LEAST_NORM, POLAR_EXPRESS, UPDATE_RMS, WARM_UP_STEPS
from handgrad.ops.reference.optimizer import exact, keep_moments, publish


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
    if results[ops.RESULT_VERDICT].item() != ops.UPDATE:
        return
    gradient_scale = results[ops.RESULT_SCALE].item()
    step, learning_rate = (controls[index].item() for index in (ops.CONTROL_STEP, ops.CONTROL_LEARNING_RATE))
    one = torch.ones((), dtype=torch.float32)
    weight, m, v = (exact(tensor) for tensor in (weight_inout, m_inout, v_inout))
    tensors = [weight], [gradient_inout], [m], [v], [], [one * step]
    betas = {"beta1": beta1, "beta2": beta2, "eps": epsilon}
    rates = {"lr": learning_rate * rate, "weight_decay": weight_decay}
    scale = None if gradient_scale == 1.0 else one / gradient_scale
    torch.ops.aten._fused_adamw_(*tensors, **betas, **rates, amsgrad=False, maximize=False, grad_scale=scale)
    keep_moments(m_inout, v_inout, m, v, int(step), seed, first_element)
    publish(published, weight_inout, weight, int(step), seed, first_element)


def muon_momentum(
    update: Tensor, m_inout: Tensor, gradient: Tensor, controls: Tensor, results: Tensor, *, momentum: float
) -> None:
    if results[ops.RESULT_VERDICT].item() != ops.UPDATE:
        return
    warmed = min(controls[ops.CONTROL_STEP].item() / WARM_UP_STEPS, 1.0)
    b = FIRST_MOMENTUM + (momentum - FIRST_MOMENTUM) * warmed
    scaled = gradient * results[ops.RESULT_SCALE].item()
    m_inout.lerp_(scaled, 1 - b)
    update.copy_(scaled.lerp_(m_inout, b))


def muon_polar(update_to_polar_inout: Tensor, *, scratch: Tensor | None = None) -> None:
    for matrix in update_to_polar_inout:
        matrix.copy_(polar(matrix) if prefers_onednn(matrix) else reference.polar(matrix))


def polar(matrix: Tensor) -> Tensor:
    """The reference's polynomials as X = (a + b A + c A^2) X, A = X X^T symmetric: oneDNN multiplies by a transpose."""
    tall = matrix.shape[0] > matrix.shape[1]
    X = (matrix.T if tall else matrix).contiguous()
    X = X / (torch.linalg.vector_norm(X) * ABOVE_LARGEST + LEAST_NORM)
    for a, b, c in POLAR_EXPRESS:
        A = gemm(X, X)
        B = gemm(A, A).mul_(c).add_(A, alpha=b)
        B.diagonal().add_(a)
        X = gemm(B, X.T)
    return X.T if tall else X


def muon_update(
    published: Tensor,
    weight_inout: Tensor,
    moments_inout: Tensor,
    polar: Tensor,
    controls: Tensor,
    results: Tensor,
    *,
    rate: float,
    beta2: float,
    weight_decay: float,
    scratch: Tensor | None = None,
) -> None:
    if results[ops.RESULT_VERDICT].item() == ops.UPDATE:
        learning_rate, (rows, columns) = rate * controls[ops.CONTROL_LEARNING_RATE].item(), weight_inout.shape
        polar = polar.to(weight_inout.dtype)
        decayed = polar * polar
        moments_inout.mul_(beta2).add_(decayed.mean(dim=1), alpha=1 - beta2)
        direction = polar / (moments_inout.sqrt() + LEAST_NORM)[:, None]
        length = torch.linalg.vector_norm(direction).item() + LEAST_NORM
        torch.mul(direction, weight_inout, out=decayed).gt_(0).mul_(weight_inout)
        weight_inout.add_(decayed, alpha=-learning_rate * weight_decay)
        weight_inout.add_(direction, alpha=-learning_rate * UPDATE_RMS * (rows * columns) ** 0.5 / length)
    if published.data_ptr() != weight_inout.data_ptr():
        published.copy_(weight_inout)
