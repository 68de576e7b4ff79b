"""Layer norm."""

from torch import Tensor

from handgrad.ops.reference.linear import bias_backward

LAYERNORM_EPSILON = 1e-5

# Layer norm (Ba et al. 2016): x^ = (x - mean) rstd, y = x^ w + b, over the last axis, statistics in float32.
# Backward: with g = dy w,  dx = rstd (g - mean(g) - x^ mean(g x^)),  dw = sum dy x^,  db = sum dy.


def layernorm_forward(out: Tensor, mean: Tensor, rstd: Tensor, inp: Tensor, weight: Tensor, bias: Tensor) -> None:
    """out, inp (N, C); mean, rstd (N); weight, bias (C)."""
    x = inp.to(mean.dtype)
    mean.copy_(x.mean(1))
    centered = x - mean.unsqueeze(1)
    rstd.copy_((centered * centered).mean(1).add_(LAYERNORM_EPSILON).rsqrt_())
    out.copy_(centered * rstd.unsqueeze(1) * weight + bias)


def layernorm_backward(
    dresidual_inout: Tensor,
    dweight_acc: Tensor,
    dbias_acc: Tensor,
    dout: Tensor,
    inp: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    dbias_below_acc: Tensor | None,
    *,
    scratch: Tensor | None = None,
) -> None:
    """Adds dL/dinp to the residual stream's gradient (N, C), and the parameter gradients (C) to their accumulators.

    The stream's gradient is also the output gradient of the GEMM that wrote `inp`. Its column sums are that GEMM's bias
    gradient (C), so this adds them to `dbias_below_acc` in the same pass. None if no GEMM wrote `inp`."""
    dy, normalized = dout.to(mean.dtype), (inp.to(mean.dtype) - mean.unsqueeze(1)) * rstd.unsqueeze(1)
    g = dy * weight
    along = (g * normalized).mean(1, keepdim=True)
    dresidual_inout.add_((g - g.mean(1, keepdim=True) - normalized * along) * rstd.unsqueeze(1))
    dweight_acc.add_((dy * normalized).sum(0))
    dbias_acc.add_(dy.sum(0))
    if dbias_below_acc is not None:
        bias_backward(dbias_below_acc, dresidual_inout)
