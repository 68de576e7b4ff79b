"""Checks of the kernels that RMS norm, QK-norm, rotary positions, squared ReLU and a softly capped classifier need, for the
interpreter on a CPU and for a GPU alike: the rules are those of `memory_checks`."""

from types import ModuleType

import torch
from torch import Tensor

from tests.kernels.memory_checks import (
    Case,
    Draw,
    Tensors,
    accumulator,
    kernels,
    nan,
    poisoned,
    sorted_by_token,
    statistics_dtype,
)


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


def heads(draw: Draw, N: int, H: int, D: int) -> Tensors:
    """Packed queries, keys and values, and their gradient."""
    inputs = {name: draw.normal(N, 3 * H * D) for name in ("qkv", "dqkv")}
    return inputs | {"rstd": torch.exp2(torch.tanh(draw.normal(N, 2 * H, dtype=torch.float32)))}


def head_forward(draw: Draw, N: int, H: int, D: int, length: int) -> Case:
    """The norm, the rotation, and both: in place, and no value moves."""

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        qkv, statistics = t["qkv"], {"dtype": statistics_dtype(t["qkv"])}
        found = {name: qkv.clone() for name in ("norm", "rotary", "both")}
        found |= {name: nan(qkv, N, 2 * H, **statistics) for name in ("norm's rstd", "rstd")}
        ops.qk_norm_forward(found["norm"], found["norm's rstd"])
        ops.rotary_forward(found["rotary"], num_heads=H, length=length)
        ops.qk_norm_rotary_forward(found["both"], found["rstd"], length=length)
        values = qkv[:, 2 * H * D :]
        assert all(torch.equal(found[name][:, 2 * H * D :], values) for name in ("norm", "rotary", "both"))
        assert torch.equal(found["norm's rstd"], found["rstd"])
        return found

    return heads(draw, N, H, D), run


def head_backward(draw: Draw, N: int, H: int, D: int, length: int) -> Case:
    def run(ops: ModuleType, t: Tensors) -> Tensors:
        found = {name: t["dqkv"].clone() for name in ("norm", "rotary", "both")}
        ops.qk_norm_backward(found["norm"], t["qkv"], t["rstd"])
        ops.rotary_backward(found["rotary"], num_heads=H, length=length)
        ops.qk_norm_rotary_backward(found["both"], t["qkv"], t["rstd"], length=length)
        values = t["dqkv"][:, 2 * H * D :]
        assert all(torch.equal(d[:, 2 * H * D :], values) for d in found.values())
        return found

    return heads(draw, N, H, D), run


def relu2_forward(draw: Draw, N: int, F: int) -> Case:
    def run(ops: ModuleType, t: Tensors) -> Tensors:
        ops.relu2_forward(t["hidden"])
        return {"out": t["hidden"]}

    return {"hidden": draw.normal(N, F) * 3}, run


def relu2_backward(draw: Draw, N: int, F: int) -> Case:
    """Of outputs half of which are 0."""

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        ops.relu2_backward(t["dhidden"], t["out"])
        return {"dhidden": t["dhidden"]}

    return {"out": draw.normal(N, F).clamp(min=0).square(), "dhidden": draw.normal(N, F)}, run


def check_token_embedding(draw: Draw, tokens: Tensor, C: int, Vp: int) -> None:
    """Rows of the table as they are; and the sums that the embedding with positions makes, to the bit."""
    inputs = {"tokens": tokens.to(draw.device), "wte": draw.normal(Vp, C), "dout": draw.normal(tokens.numel(), C)}
    (N, C), out = inputs["dout"].shape, nan(inputs["dout"], tokens.numel(), C)
    kernels.token_embedding_forward(out, inputs["tokens"], inputs["wte"])
    assert torch.equal(out, inputs["wte"][inputs["tokens"].view(-1)])
    given = inputs["dout"], inputs["tokens"], sorted_by_token(inputs["tokens"])
    found, both = accumulator(out, Vp, C), accumulator(out, Vp, C)
    kernels.token_embedding_backward(found, *given, scratch=poisoned(out, tokens=N, channels=C, widest=C))
    positions = accumulator(out, tokens.shape[1], C)
    kernels.embedding_backward(both, positions, *given, scratch=poisoned(out, tokens=N, channels=C, widest=C))
    assert torch.equal(found, both), "which test_memory_kernels compares with the reference"
