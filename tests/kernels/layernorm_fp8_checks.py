"""Checks of the layer norm that writes fp8, for the interpreter on a CPU and for a GPU alike."""

import math

import torch
from torch import Tensor

from handgrad.joins.fp8.cuda import layernorm
from handgrad.joins.fp8.formats import Form
from handgrad.ops.sizes import scratch_bytes
from tests.kernels.fp8_checks import wide
from tests.kernels.fp8_frames import norm_backward, norm_forward
from tests.kernels.memory_checks import Draw


def layernorm_forward(draw: Draw, N: int, C: int, kind: torch.dtype, *, counting: bool) -> None:
    inp = wide(draw, N, C) * 3 + 0.5
    # A wide weight: some of the output vanishes, some is too large.
    weight, bias = wide(draw, C), draw.normal(C) * 0.01

    def run(out: Form) -> list[Tensor]:
        statistics = [torch.full((N,), math.nan, device=draw.device) for _ in range(2)]
        layernorm.layernorm_forward(out, *statistics, inp, weight, bias)
        return statistics

    norm_forward(draw, (N, C), kind, run, counting=counting, scale=2.0**13)


def layernorm_backward(draw: Draw, N: int, C: int, kind: torch.dtype, *, counting: bool) -> None:
    dout, inp, weight = draw.normal(N, C), draw.normal(N, C), draw.normal(C)
    mean, rstd = draw.normal(N, dtype=torch.float32), draw.normal(N, dtype=torch.float32).abs() * 0.01
    # What the kernel computes in the columns of its padding, -mean(g) rstd, is larger than anything in the first two rows.
    dout[:2], inp[:2], weight[:], mean[:2], rstd[:2] = 1, 0.5, weight.abs(), 0.5, 300
    dout[:2] /= weight
    scratch = torch.full((scratch_bytes(tokens=N, channels=C, widest=C),), 255, dtype=torch.uint8, device=draw.device)

    def run(dresidual: Form) -> list[Tensor]:
        sums = [torch.zeros(C, device=draw.device) for _ in range(3)]
        tensors = dout, inp, mean, rstd, weight
        layernorm.layernorm_backward(dresidual, *sums[:2], *tensors, sums[2], scratch=scratch)
        return sums

    norm_backward(draw, wide(draw, N, C), kind, run, counting=counting)
