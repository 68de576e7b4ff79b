"""AdamW by torch's fused kernel.

The kernel rounds the tail of a partial vector differently: split flat buffers only at multiples of 128 elements.
"""

import torch
from torch import Tensor

from handgrad import ops
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
    step, learning_rate = (controls[place].item() for place in (ops.CONTROL_STEP, ops.CONTROL_LEARNING_RATE))
    one = torch.ones((), dtype=torch.float32)
    weight, m, v = (exact(tensor) for tensor in (weight_inout, m_inout, v_inout))
    tensors = [weight], [gradient_inout], [m], [v], [], [one * step]
    betas = {"beta1": beta1, "beta2": beta2, "eps": epsilon}
    rates = {"lr": learning_rate * rate, "weight_decay": weight_decay}
    scale = None if gradient_scale == 1.0 else one / gradient_scale
    torch.ops.aten._fused_adamw_(*tensors, **betas, **rates, amsgrad=False, maximize=False, grad_scale=scale)
    keep_moments(m_inout, v_inout, m, v, int(step), seed, first_element)
    publish(published, weight_inout, weight, int(step), seed, first_element)
