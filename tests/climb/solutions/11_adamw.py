from torch import Tensor


def adamw(
    w: Tensor,
    m: Tensor,
    v: Tensor,
    g: Tensor,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    mean = m / (1 - beta1**step)
    square = v / (1 - beta2**step)
    kept = 1 - lr * decay if w.ndim > 1 else 1.0
    return kept * w - lr * mean / (square.sqrt() + epsilon), m, v
