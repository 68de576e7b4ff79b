"""RMS norm without a gain."""

from torch import Tensor

RMSNORM_EPSILON = 1e-6

# RMS norm (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467): y = x rstd, rstd = 1 / sqrt(mean(x^2) + eps), over the
# last axis, statistics in float32.  Backward: dx = rstd (dy - y mean(dy y)).


def rmsnorm_forward(out: Tensor, rstd: Tensor, inp: Tensor) -> None:
    """out, inp (N, C); rstd (N)."""
    x = inp.to(rstd.dtype)
    rstd.copy_((x * x).mean(1).add_(RMSNORM_EPSILON).rsqrt_())
    out.copy_(x * rstd.unsqueeze(1))


def rmsnorm_backward(dresidual_inout: Tensor, dout: Tensor, inp: Tensor, rstd: Tensor) -> None:
    """Adds dL/dinp to the residual stream's gradient (N, C)."""
    dy, normalized = dout.to(rstd.dtype), inp.to(rstd.dtype) * rstd.unsqueeze(1)
    along = (dy * normalized).mean(1, keepdim=True)
    dresidual_inout.add_((dy - normalized * along) * rstd.unsqueeze(1))
