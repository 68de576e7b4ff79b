"""Operations composed of two others, for backends without a fused kernel; and a backend with some operations replaced."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

Operation = Callable[..., None]


def bind_norms_and_gemms(backend: str) -> None:
    """Adds the operations "norm, then GEMM" to the module `backend`."""
    ops = sys.modules[backend]
    layernorm, rmsnorm = ops.layernorm_forward, ops.rmsnorm_forward
    vars(ops).update(
        layernorm_linear_forward=after_layernorm(layernorm, ops.linear_forward),  # out = LN(x) W^T + b
        layernorm_linear_gelu_forward=after_layernorm(layernorm, ops.linear_gelu_forward),  # out = GELU(LN(x) W^T + b)
        rmsnorm_linear_forward=after_rmsnorm(rmsnorm, ops.linear_forward, 1),  # out = RMSnorm(x) W^T + b
        rmsnorm_linear_relu2_forward=after_rmsnorm(rmsnorm, ops.linear_relu2_forward, 1),  # max(RMSnorm(x) W^T, 0)^2
        rmsnorm_linear_swiglu_forward=after_rmsnorm(rmsnorm, ops.linear_swiglu_forward, 2),
    )


def after_layernorm(layernorm_forward: Operation, gemm: Operation) -> Operation:
    """Returns the operation (*outs, ln, mean, rstd, x, ln_weight, ln_bias, weight, bias): `gemm` on LN(x), x (N, C),
    with weight (O, C) and bias (O), into `outs`. ln (N, C) receives LN(x), mean and rstd (N) its statistics."""

    def both(*tensors: Tensor | None, scratch: Tensor | None = None) -> None:
        *outs, ln, mean, rstd, x, ln_weight, ln_bias, weight, bias = tensors
        layernorm_forward(ln, mean, rstd, x, ln_weight, ln_bias)
        gemm(*outs, ln, weight, bias, scratch=scratch)

    return both


def after_rmsnorm(rmsnorm_forward: Operation, gemm: Operation, outs: int) -> Operation:
    """Returns the operation (*outs, norm, rstd, x, gain, *weights). It runs `gemm` on RMSnorm(x), x (N, C), gain (C) or
    None, with the weights that the GEMM takes. `outs`: number of GEMM outputs. norm (N, C) receives RMSnorm(x), rstd (N)
    its statistic; `options`: `epsilon` and `plus` as in `rmsnorm_forward`."""

    def both(*tensors: Tensor | None, scratch: Tensor | None = None, **options: float) -> None:
        norm, rstd, x, gain = tensors[outs : outs + 4]
        rmsnorm_forward(norm, rstd, x, gain, **options)
        gemm(*tensors[:outs], norm, *tensors[outs + 4 :], scratch=scratch)

    return both


def after_mix_rmsnorm(mix_rmsnorm_forward: Operation, gemm: Operation) -> Operation:
    """Returns the operation (out, mixed, norm, rstd, x, first, residual_scalar, input_scalar, weight): it runs
    `mix_rmsnorm_forward`, then `gemm` on the norm with weight (O, C), into out (N, O)."""

    def both(out: Tensor, *tensors: Tensor | None, scratch: Tensor | None = None) -> None:
        *mixture, weight = tensors
        mix_rmsnorm_forward(*mixture)
        gemm(out, mixture[1], weight, None, scratch=scratch)

    return both


def transposed_backward(conv_forward: Operation, conv_backward: Operation) -> Operation:
    """Returns the backward of the transposed convolution, with the arguments of `conv_backward`. Its input gradient is a
    convolution, its weight gradient the convolution's with input and output exchanged."""

    def both(
        dinp: Tensor,
        dweight_acc: Tensor | None,
        dbias_acc: Tensor | None,
        dout: Tensor,
        inp: Tensor,
        weight: Tensor,
        *,
        stride: int = 1,
        scratch: Tensor | None = None,
    ) -> None:
        conv_forward(dinp, dout, weight, None, stride=stride)
        conv_backward(None, dweight_acc, None, inp, dout, weight, stride=stride)
        conv_backward(None, None, dbias_acc, dout, dout, weight, stride=stride)

    return both


def after_mix(mix_forward: Operation, rmsnorm_linear_forward: Operation) -> Operation:
    """Returns the operation of `after_mix_rmsnorm`, built from `mix_forward` and a GEMM that computes the norm itself."""

    def both(out: Tensor, *tensors: Tensor | None, scratch: Tensor | None = None) -> None:
        mixed, norm, rstd, *mixture, weight = tensors
        mix_forward(mixed, *mixture)
        rmsnorm_linear_forward(out, norm, rstd, mixed, None, weight, None, scratch=scratch)

    return both


def after_attention(attention_decode: Operation, linear_residual_forward: Operation) -> Operation:
    """Returns the operation (out, attended, keys, values, residual, qkv, positions, weight, bias): attention of one token
    per sequence, then out (B, C) = residual (B, C) + the GEMM of its result y (B, H D) with weight (C, H D).
    attended (B, H D) receives y. `options`: `attention_decode`'s own."""

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
        **options: Any,
    ) -> None:
        attention_decode(attended, keys_inout, values_inout, qkv, positions, scratch=scratch, **options)
        linear_residual_forward(out, residual, attended, weight, bias, scratch=scratch)

    return both


# GEMM and activation, for the reference and the CPU: (its forward, the next GEMM's backward with the activation's).


def with_gelu(
    linear_forward: Operation, linear_backward: Operation, gelu_forward: Operation, gelu_backward: Operation
) -> tuple[Operation, Operation]:
    """Linear and GELU: h = x W^T + b, y = GELU(h). Backward of the next GEMM, which reads y (weight Wp, output gradient
    dz): dh = GELU'(h) (dz Wp),  dWp = dz^T y."""

    def linear_gelu_forward(
        out: Tensor, hidden: Tensor, inp: Tensor, weight: Tensor, bias: Tensor, *, scratch: Tensor | None = None
    ) -> None:
        """hidden (N, F) = inp (N, I) weight (F, I)^T + bias (F); out (N, F) = GELU(hidden)."""
        linear_forward(hidden, inp, weight, bias)
        gelu_forward(out, hidden)

    def gelu_linear_backward(
        dhidden: Tensor,
        dweight_acc: Tensor,
        dout: Tensor,
        inp: Tensor,
        hidden: Tensor,
        weight: Tensor,
        *,
        scratch: Tensor | None = None,
    ) -> None:
        """`linear_backward` of a GEMM whose input (N, F) is GELU(hidden): dhidden is the gradient before the GELU. The
        layer norm's backward above computes the GEMM's bias gradient."""
        linear_backward(dhidden, dweight_acc, None, dout, inp, weight)
        gelu_backward(dhidden, hidden)

    return linear_gelu_forward, gelu_linear_backward


def with_relu2(
    linear_forward: Operation, linear_backward: Operation, relu2_forward: Operation, relu2_backward: Operation
) -> tuple[Operation, Operation]:
    """Linear and squared ReLU."""

    def linear_relu2_forward(out: Tensor, inp: Tensor, weight: Tensor, *, scratch: Tensor | None = None) -> None:
        """out (N, F) = max(inp (N, I) weight (F, I)^T, 0)^2."""
        linear_forward(out, inp, weight, None)
        relu2_forward(out)

    def relu2_linear_backward(
        dhidden: Tensor, dweight_acc: Tensor, dout: Tensor, inp: Tensor, weight: Tensor, *, scratch: Tensor | None = None
    ) -> None:
        """`linear_backward` of a GEMM whose input (N, F) is a squared ReLU: dhidden is the gradient before the ReLU."""
        linear_backward(dhidden, dweight_acc, None, dout, inp, weight)
        relu2_backward(dhidden, inp)

    return linear_relu2_forward, relu2_linear_backward


def with_swiglu(
    linear_forward: Operation, linear_backward: Operation, swiglu_forward: Operation, swiglu_backward: Operation
) -> tuple[Operation, Operation]:
    """Linear and SwiGLU."""

    def linear_swiglu_forward(
        out: Tensor, hidden: Tensor, inp: Tensor, weight: Tensor, *, scratch: Tensor | None = None
    ) -> None:
        """hidden (N, 2F) = inp (N, I) weight (2F, I)^T; out (N, F) = silu(g) u, with hidden = (g, u)."""
        linear_forward(hidden, inp, weight, None)
        swiglu_forward(out, hidden)

    def swiglu_linear_backward(
        dhidden: Tensor,
        dinp: Tensor,
        dweight_acc: Tensor,
        dout: Tensor,
        inp: Tensor,
        hidden: Tensor,
        weight: Tensor,
        *,
        scratch: Tensor | None = None,
    ) -> None:
        """`linear_backward` of a GEMM whose input (N, F) is the SwiGLU of hidden (N, 2F), then SwiGLU's backward."""
        linear_backward(dinp, dweight_acc, None, dout, inp, weight)
        swiglu_backward(dhidden, dinp, hidden)

    return linear_swiglu_forward, swiglu_linear_backward


class Overlay(ModuleType):
    """The backend `ops`, with the operations that a subclass or an attribute replaces."""

    def __init__(self, ops: Any):
        super().__init__(ops.__name__)
        self.ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)
