"""Operations that are two others in a row, for backends without a kernel for both at once; a backend with some replaced."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

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


def after_gained_rmsnorm(gained_rmsnorm_forward: Operation, product: Operation, outs: int) -> Operation:
    """Returns the operation (*outs, norm, rstd, x, gain, *weights): `product` of RMSnorm(x) with its gain (C), x (N, C),
    and the weights that it takes. `outs`: the number of its outputs. norm (N, C) receives RMSnorm(x), rstd (N) its
    statistic."""

    def both(*tensors: Tensor | None, epsilon: float, scratch: Tensor | None = None) -> None:
        norm, rstd, x, gain = tensors[outs : outs + 4]
        gained_rmsnorm_forward(norm, rstd, x, gain, epsilon=epsilon)
        product(*tensors[:outs], norm, *tensors[outs + 4 :], scratch=scratch)

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
    """Returns the operation of `after_mix_rmsnorm`, from the mixture alone and a product that begins with the norm."""

    def both(out: Tensor, *tensors: Tensor | None, scratch: Tensor | None = None) -> None:
        mixed, norm, rstd, *mixture, weight = tensors
        mix_forward(mixed, *mixture)
        rmsnorm_linear_forward(out, norm, rstd, mixed, weight, scratch=scratch)

    return both


def after_attention(attention_decode: Operation, linear_residual_forward: Operation) -> Operation:
    """Returns the operation (out, attended, keys, values, residual, qkv, positions, weight, bias): attention of one token
    per sequence, then the product of its result y (B, H D) with weight (C, H D), onto residual (B, C), into out (B, C).
    attended (B, H D) may receive y."""

    def both(
        out: Tensor,
        attended: Tensor,
        keys_inout: Tensor,
        values_inout: Tensor,
        residual: Tensor,
        qkv: Tensor,
        positions: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        scratch: Tensor | None = None,
    ) -> None:
        attention_decode(attended, keys_inout, values_inout, qkv, positions, scratch=scratch)
        linear_residual_forward(out, residual, attended, weight, bias, scratch=scratch)

    return both


class Overlay(ModuleType):
    """The operations `ops`, unless a subclass or an attribute replaces them."""

    def __init__(self, ops: Any):
        super().__init__(ops.__name__)
        self.ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)
