"""Checks of the kernels that RMS norm, QK-norm, rotary positions, squared ReLU and a softly capped classifier need, for the
interpreter on a CPU and for a GPU alike: the rules are those of `memory_checks`."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from handgrad.ops import reference
from handgrad.ops.cases import Arguments
from tests.kernels.memory_checks import (
    Case,
    Draw,
    Tensors,
    accumulator,
    both,
    case,
    copy,
    embedding,
    kernels,
    nan,
    poisoned,
    statistics_dtype,
)


def absent(residual: bool, first: bool) -> dict[str, None]:
    """The arguments of a mixture without one of its scalars."""
    names = ["residual_scalar", "dresidual_scalar_acc"] * (not residual)
    return dict.fromkeys(names + ["first", "input_scalar", "dfirst_inout", "dinput_scalar_acc"] * (not first))


def rmsnorm(draw: Draw, N: int, C: int) -> list[Case]:
    """Both ways, without a gain."""
    without: dict[str, dict[str, None]] = {"forward": {"gain": None}, "backward": {"gain": None, "dgain_acc": None}}
    return [case(draw, f"rmsnorm_{way}", N=N, C=C, **changes) for way, changes in without.items()]


def mix_forward(draw: Draw, N: int, C: int, residual: bool, first: bool) -> Case:
    """With the mixture stored, and the norm alone, to the bit."""
    missing = {name: None for name in absent(residual, first) if not name.startswith("d")}
    inputs, run = case(draw, "mix_rmsnorm_forward", N=N, C=C, **missing)

    def twice(ops: ModuleType, t: Arguments) -> Tensors:
        alone, found = copy(t), run(ops, t)
        ops.mix_rmsnorm_forward(**alone | {"mixed": None})
        assert torch.equal(found["out"], alone["out"]) or ops is reference
        return found | {"rstd": torch.stack([found["rstd"], alone["rstd"]])}

    return inputs, twice


def mix_backward(draw: Draw, N: int, C: int, residual: bool, first: bool) -> Case:
    return case(draw, "mix_rmsnorm_backward", N=N, C=C, **absent(residual, first))


def values(draw: Draw, way: str, tokens: Tensor, H: int, D: int, G: int, Vp: int) -> Case:
    """Queries and keys stay as they are."""
    sizes = {"B": tokens.shape[0], "T": tokens.shape[1], "H": H, "D": D, "G": G, "Vp": Vp}
    inputs, run = case(draw, f"value_embedding_{way}", **sizes, tokens=tokens.to(draw.device))

    def run_and_compare(ops: ModuleType, t: Arguments) -> Tensors:
        before, found = copy(t), run(ops, t)
        if way == "forward":
            assert torch.equal(found["qkv_inout"][:, : 2 * H * D], before["qkv_inout"][:, : 2 * H * D])
        return found

    return inputs, run_and_compare


def value_decode(draw: Draw, B: int, H: int, D: int, G: int) -> Case:
    tokens = (torch.arange(B) * 7 % 19).to(draw.device)
    inputs = draw.arguments("value_embedding_forward", N=B, H=H, D=D, G=G, Vp=19, tokens=tokens)

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        qkv = t["qkv_inout"]
        ops.decode.value_embedding_decode(qkv, t["norm"] * 3, t["gate_weight"], t["tokens"], t["table"])
        return {"qkv_inout": qkv}

    return inputs, run


def turns(draw: Draw, N: int, H: int, D: int, length: int) -> Iterator[Case]:
    """The norm, the rotation, and both, each way: in place, and no value moves."""
    for operation in ("qk_norm", "rotary", "qk_norm_rotary"):
        for inputs, run in both(draw, operation, N=N, T=length, H=H, D=D):
            yield inputs, partial(with_values, run, 2 * H * D)


def with_values(run: Callable[[ModuleType, Arguments], Tensors], first: int, ops: ModuleType, t: Arguments) -> Tensors:
    name = next(name for name in t if name.endswith("qkv_inout"))
    values = t[name][:, first:].clone()
    found = run(ops, t)
    assert torch.equal(found[name][:, first:], values)
    return found


def check_relu2_of_no_number(draw: Draw) -> None:
    x = torch.tensor([[math.nan, -math.inf, -1.0, -0.0, 2.0, math.inf]], dtype=draw.dtype, device=draw.device)
    kernels.relu2_forward(x)
    assert math.isnan(x[0, 0]) and x[0, 1:].tolist() == [0, 0, 0, 4, math.inf]


def check_token_embedding(draw: Draw, tokens: Tensor, C: int, Vp: int) -> None:
    """Rows of the table as they are; and the sums that the embedding with positions makes, to the bit."""
    inputs, run = embedding(draw, "token_embedding_forward", tokens, C, Vp)
    assert torch.equal(run(kernels, inputs)["out"], inputs["wte"][inputs["tokens"].view(-1)])
    inputs, run = embedding(draw, "embedding_backward", tokens, C, Vp)
    _, run_alone = embedding(draw, "token_embedding_backward", tokens, C, Vp)
    found = run_alone(kernels, copy({name: tensor for name, tensor in inputs.items() if name != "dwpe_acc"}))
    expected = run(kernels, copy(inputs))
    assert torch.equal(found["dwte_acc"], expected["dwte_acc"]), "which test_memory_kernels compares with the reference"


def modern_row_gemms(draw: Draw, C: int, O: int) -> Case:
    """The products of one row: after an RMS norm, into a squared ReLU, and onto the residual stream without a bias."""
    inputs = {"x": draw.normal(1, C) * 2 + 0.5, "weight": draw.normal(O, C) / C**0.5, "residual": draw.normal(1, O)}

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        x, weight, scratch = t["x"], t["weight"], {"scratch": torch.empty(0)}
        norm, rstd = nan(x, 1, C), nan(x, 1, dtype=statistics_dtype(x))
        out = {name: nan(x, 1, O) for name in ("linear", "relu2", "residual")}
        ops.rmsnorm_linear_forward(out["linear"], norm, rstd, x, None, weight, None, **scratch)
        ops.rmsnorm_linear_relu2_forward(out["relu2"], norm, rstd, x, None, weight, **scratch)
        ops.linear_residual_forward(out["residual"], t["residual"], x, weight, None, **scratch)
        return out

    return inputs, run


def head_decode(draw: Draw, H: int, D: int, positions: list[int]) -> Case:
    """Each row at a position of its own, up to where float32 cannot hold an angle."""
    B = len(positions)
    inputs = {"qkv": draw.normal(B, 3 * H * D), "positions": torch.tensor(positions, device=draw.device)}

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        found = {name: t["qkv"].clone() for name in ("rotary", "both")}
        found["rstd"] = nan(t["qkv"], B, 2 * H, dtype=statistics_dtype(t["qkv"]))
        ops.rotary_forward(found["rotary"], num_heads=H, positions=t["positions"])
        ops.qk_norm_rotary_forward(found["both"], found["rstd"], positions=t["positions"])
        assert all(torch.equal(found[name][:, 2 * H * D :], t["qkv"][:, 2 * H * D :]) for name in ("rotary", "both"))
        return found

    return inputs, run


def check_token_embedding_decode(draw: Draw, B: int, C: int) -> None:
    wte, tokens, out = draw.normal(50, C), draw.integers(50, B), nan(draw.normal(1), B, C)
    kernels.decode.token_embedding_decode(out, tokens, wte)
    assert torch.equal(out, wte[tokens])


def capped_classifier(draw: Draw, N: int, V: int, Vp: int, cap: float) -> Iterator[Case]:
    """The loss alone, with its gradient, and the capped logits."""
    for operation in ("classifier_forward", "classifier_forward_backward", "softcap_forward"):
        yield case(draw, operation, N=N, V=V, Vp=Vp, softcap=cap)


def relu2_products(draw: Draw, N: int, C: int, F: int) -> Case:
    """Into a squared ReLU and out of it, after an RMS norm; and onto the residual stream without a bias."""
    inputs = {"x": draw.normal(N, C), "residual": draw.normal(N, C), "dout": draw.normal(N, C) / N**0.5}
    inputs |= {"fc": draw.normal(F, C) / C**0.5, "proj": draw.normal(C, F) / F**0.5}

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        scratch = {"scratch": poisoned(t["x"], tokens=N, channels=C, widest=F)}
        out, norm, dhidden = nan(t["x"], N, F), nan(t["x"], N, C), nan(t["x"], N, F)
        rstd, dweight = nan(t["x"], N, dtype=statistics_dtype(t["x"])), accumulator(t["x"], C, F)
        ops.rmsnorm_linear_relu2_forward(out, norm, rstd, t["x"], None, t["fc"], **scratch)
        stream = nan(t["x"], N, C)
        ops.linear_residual_forward(stream, t["residual"], out, t["proj"], None, **scratch)
        ops.relu2_linear_backward(dhidden, dweight, t["dout"], out, t["proj"], **scratch)
        return {"out": out, "norm": norm, "rstd": rstd, "stream": stream, "dhidden": dhidden, "dweight": dweight}

    return inputs, run
