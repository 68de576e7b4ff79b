"""Operations that are two others in a row, for backends without a kernel for both at once."""

from collections.abc import Callable

from torch import Tensor

Operation = Callable[..., None]


def after_layernorm(layernorm_forward: Operation, product: Operation) -> Operation:
    """Returns the operation (*outs, ln, mean, rstd, x, ln_weight, ln_bias, weight, bias): `product` of LN(x), x (N, C),
    with weight (O, C) and bias (O), into `outs`. ln (N, C) receives LN(x), mean and rstd (N) its statistics."""

    def both(*tensors: Tensor | None, scratch: Tensor | None = None) -> None:
        *outs, ln, mean, rstd, x, ln_weight, ln_bias, weight, bias = tensors
        layernorm_forward(ln, mean, rstd, x, ln_weight, ln_bias)
        product(*outs, ln, weight, bias, scratch=scratch)

    return both
