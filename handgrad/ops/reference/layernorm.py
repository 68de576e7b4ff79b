"""Layer norm."""

import torch
from torch import Tensor

from handgrad.ops.reference import device
from handgrad.ops.reference.linear import bias_backward

aten = torch.ops.aten

LAYERNORM_EPSILON = 1e-5

# Layer norm (Ba et al. 2016): x^ = (x - mean) rstd, y = x^ w + b, over the last axis, statistics in float32.
# Backward: with g = dy w,  dx = rstd (g - mean(g) - x^ mean(g x^)),  dw = sum dy x^,  db = sum dy.


def layernorm_forward(out: Tensor, mean: Tensor, rstd: Tensor, inp: Tensor, weight: Tensor, bias: Tensor) -> None:
    """out, inp (N, C); mean, rstd (N); weight, bias (C)."""
    # Weights of the statistics' dtype make the library keep the statistics in that dtype for bf16 inputs also.
    weight, bias = weight.to(mean.dtype), bias.to(mean.dtype)
    N, C = inp.shape
    if device.uses_cpu_kernels(inp):
        results = {"out0": out, "out1": mean.view(N, 1), "out2": rstd.view(N, 1)}
        aten.native_layer_norm.out(inp, (C,), weight, bias, LAYERNORM_EPSILON, **results)
        return
    # A GPU's kernel wants one dtype for all.
    results = aten.native_layer_norm(inp.to(mean.dtype), (C,), weight, bias, LAYERNORM_EPSILON)
    for destination, result in zip((out, mean, rstd), results, strict=True):
        destination.copy_(result.view(destination.shape))


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
    """Adds dL/dinp to the residual stream's gradient (N, C), and the parameter gradients (C) to theirs.

    The stream's gradient is also the output gradient of the product that wrote `inp`, so that product's bias gradient
    (C), its column sums, is added to `dbias_below_acc` while it passes by. None where no product wrote `inp`.
    """
    N, C = inp.shape
    weight = weight.to(mean.dtype)
    if not device.uses_cpu_kernels(inp):
        dout, inp = dout.to(mean.dtype), inp.to(mean.dtype)
    mean, rstd = mean.view(N, 1), rstd.view(N, 1)
    dinp, dweight, dbias = aten.native_layer_norm_backward(dout, inp, (C,), mean, rstd, weight, weight, [True, True, True])
    dresidual_inout.add_(dinp)
    dweight_acc.add_(dweight)
    dbias_acc.add_(dbias)
    if dbias_below_acc is not None:
        bias_backward(dbias_below_acc, dresidual_inout)
