"""Checks of the kernels that RMS norm, QK-norm, rotary positions, squared ReLU and a softly capped classifier need, for the
interpreter on a CPU and for a GPU alike: the rules are those of `memory_checks`."""

from types import ModuleType

import torch

from tests.kernels.memory_checks import Case, Draw, Tensors, nan, statistics_dtype


def rmsnorm_forward(draw: Draw, N: int, C: int) -> Case:
    def run(ops: ModuleType, t: Tensors) -> Tensors:
        out, rstd = nan(t["inp"], N, C), nan(t["inp"], N, dtype=statistics_dtype(t["inp"]))
        ops.rmsnorm_forward(out, rstd, t["inp"])
        return {"out": out, "rstd": rstd}

    return {"inp": draw.normal(N, C) * 2 + 0.5}, run


def rmsnorm_backward(draw: Draw, N: int, C: int) -> Case:
    inputs = {name: draw.normal(N, C) for name in ("dresidual", "dout", "inp")}
    inputs["rstd"] = torch.exp2(torch.tanh(draw.normal(N, dtype=torch.float32)))

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        ops.rmsnorm_backward(t["dresidual"], t["dout"], t["inp"], t["rstd"])
        return {"dresidual": t["dresidual"]}

    return inputs, run
