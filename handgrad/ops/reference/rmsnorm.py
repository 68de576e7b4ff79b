"""RMS norm, without a gain and with one."""

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


# With a gain g: y = g x rstd.  Backward: with u = g dy and n = x rstd, dx = rstd (u - n mean(u n)),  dg = sum over rows of
# dy n.


def gained_rmsnorm_forward(out: Tensor, rstd: Tensor, inp: Tensor, gain: Tensor, *, epsilon: float) -> None:
    """out, inp (N, C); rstd (N); gain (C)."""
    x = inp.to(rstd.dtype)
    rstd.copy_((x * x).mean(1).add_(epsilon).rsqrt_())
    out.copy_(x * rstd.unsqueeze(1) * gain.to(rstd.dtype))


def gained_rmsnorm_backward(
    dresidual_inout: Tensor,
    dgain_acc: Tensor,
    dout: Tensor,
    inp: Tensor,
    rstd: Tensor,
    gain: Tensor,
    *,
    scratch: Tensor | None = None,
) -> None:
    """Adds dL/dinp to the residual stream's gradient (N, C), and dL/dgain (C) to its accumulator."""
    dy, normalized = dout.to(rstd.dtype), inp.to(rstd.dtype) * rstd.unsqueeze(1)
    dgain_acc.add_((dy * normalized).sum(0))
    u = dy * gain.to(rstd.dtype)
    along = (u * normalized).mean(1, keepdim=True)
    dresidual_inout.add_((u - normalized * along) * rstd.unsqueeze(1))
