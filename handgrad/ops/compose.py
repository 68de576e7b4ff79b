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


def after_rmsnorm(rmsnorm_forward: Operation, product: Operation, *bias: None) -> Operation:
    """Returns the operation (out, norm, rstd, x, weight): `product` of RMSnorm(x), x (N, C), with weight (O, C), into out
    (N, O). norm (N, C) receives RMSnorm(x), rstd (N) its statistic. `bias`: None for a product that takes one."""

    def both(out: Tensor, norm: Tensor, rstd: Tensor, x: Tensor, weight: Tensor, *, scratch: Tensor | None = None) -> None:
        rmsnorm_forward(norm, rstd, x)
        product(out, norm, weight, *bias, scratch=scratch)

    return both


def after_mix_rmsnorm(mix_rmsnorm_forward: Operation, product: Operation) -> Operation:
    """Returns the operation (out, mixed, norm, rstd, x, first, residual_scalar, input_scalar, weight): `product` of the RMS
    norm of a mixture of streams with weight (O, C), into out (N, O), and the operands of `mix_rmsnorm_forward`."""

    def both(out: Tensor, *tensors: Tensor | None, scratch: Tensor | None = None) -> None:
        *mixture, weight = tensors
        mix_rmsnorm_forward(*mixture)
        product(out, mixture[1], weight, None, scratch=scratch)

    return both


def after_mix(mix_forward: Operation, rmsnorm_linear_forward: Operation) -> Operation:
    """Returns the same operation, of a mixture and of a product that has the norm in it."""

    def both(out: Tensor, *tensors: Tensor | None, scratch: Tensor | None = None) -> None:
        mixed, norm, rstd, *mixture, weight = tensors
        mix_forward(mixed, *mixture)
        rmsnorm_linear_forward(out, norm, rstd, mixed, weight, scratch=scratch)

    return both
