"""Group norm."""

from torch import Tensor

GROUPNORM_EPSILON = 1e-6

# Group norm (Wu & He 2018, https://arxiv.org/abs/1803.08494): the C channels of a sample are Q groups, and a group has one
# mean and one variance over its channels and all places:  x^ = (x - mean) rstd, y = x^ w + b, with w and b per channel.
# Backward, as layer norm's over M = (C / Q) Y X numbers: with g = dy w,  dx = rstd (g - mean(g) - x^ mean(g x^)),
# dw = sum dy x^,  db = sum dy, over samples and places.


def groupnorm_forward(out: Tensor, mean: Tensor, rstd: Tensor, inp: Tensor, weight: Tensor, bias: Tensor) -> None:
    """out, inp (B, Y, X, C); mean, rstd (B, Q); weight, bias (C)."""
    x = by_group(inp.to(mean.dtype), mean)
    mean.copy_(x.mean((1, 3)))
    centered = x - beside(mean)
    rstd.copy_((centered * centered).mean((1, 3)).add_(GROUPNORM_EPSILON).rsqrt_())
    out.copy_((centered * beside(rstd)).view(inp.shape) * weight + bias)


def groupnorm_backward(
    dresidual_inout: Tensor,
    dweight_acc: Tensor,
    dbias_acc: Tensor,
    dout: Tensor,
    inp: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    *,
    scratch: Tensor | None = None,
) -> None:
    """Adds dL/dinp to the stream's gradient (B, Y, X, C), and the parameter gradients (C) to their accumulators."""
    dy, normalized = dout.to(mean.dtype), (by_group(inp.to(mean.dtype), mean) - beside(mean)) * beside(rstd)
    g = by_group(dy * weight, mean)
    along = (g * normalized).mean((1, 3), keepdim=True)
    dx = (g - g.mean((1, 3), keepdim=True) - normalized * along) * beside(rstd)
    dresidual_inout.add_(dx.view(inp.shape))
    dweight_acc.add_((dy * normalized.view(inp.shape)).sum((0, 1, 2)))
    dbias_acc.add_(dy.sum((0, 1, 2)))


def by_group(pictures: Tensor, mean: Tensor) -> Tensor:
    """(B, Y, X, C) -> (B, Y X, Q, C / Q), a view. mean (B, Q)."""
    B, Q = mean.shape
    return pictures.view(B, -1, Q, pictures.shape[3] // Q)


def beside(statistic: Tensor) -> Tensor:
    """(B, Q) -> (B, 1, Q, 1), beside `by_group`."""
    return statistic[:, None, :, None]
