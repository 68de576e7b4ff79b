"""Checks of the kernels that RMS norm, QK-norm, rotary positions, squared ReLU and a softly capped classifier need, for the
interpreter on a CPU and for a GPU alike: the rules are those of `memory_checks`."""

import math
from types import ModuleType

import torch
from torch import Tensor

from handgrad.ops import reference
from tests.kernels.memory_checks import (
    ROUNDING,
    Case,
    Draw,
    Tensors,
    accumulator,
    classifier_inputs,
    close,
    copy,
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


def mixture(draw: Draw, N: int, C: int, residual: bool, first: bool) -> tuple[Tensors, list[str]]:
    """The stream and the scalars of a mixture, and the names of those that it has."""
    inputs = {name: draw.normal(N, C) for name in ("inp", "first")}
    inputs |= {"residual_scalar": draw.normal(1) * 0.1 + 1, "input_scalar": draw.normal(1) * 0.1 + 0.3}
    return inputs, ["residual_scalar"] * residual + ["first", "input_scalar"] * first


def mix_forward(draw: Draw, N: int, C: int, residual: bool, first: bool) -> Case:
    """With the mixture stored, and the norm alone, to the bit."""
    inputs, names = mixture(draw, N, C, residual, first)

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        given = [t["inp"], *(t[name] if name in names else None for name in ("first", "residual_scalar", "input_scalar"))]
        mixed, out, again = (nan(t["inp"], N, C) for _ in range(3))
        rstds = [nan(t["inp"], N, dtype=statistics_dtype(t["inp"])) for _ in range(2)]
        ops.mix_rmsnorm_forward(mixed, out, rstds[0], *given)
        ops.mix_rmsnorm_forward(None, again, rstds[1], *given)
        assert torch.equal(out, again) or ops is reference
        return {"mixed": mixed, "out": out, "rstd": torch.stack(rstds)}

    return inputs, run


def mix_backward(draw: Draw, N: int, C: int, residual: bool, first: bool) -> Case:
    inputs, names = mixture(draw, N, C, residual, first)
    inputs |= {name: draw.normal(N, C) for name in ("dstream", "dfirst", "dout")}
    inputs["rstd"] = torch.exp2(torch.tanh(draw.normal(N, dtype=torch.float32)))

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        has = {name: t[name] if name in names else None for name in ("first", "residual_scalar", "input_scalar")}
        dfirst = t["dfirst"] if first else None
        sums = [accumulator(t["inp"], 1) if name in names else None for name in ("residual_scalar", "input_scalar")]
        given = t["dout"], t["inp"], has["first"], t["rstd"], has["residual_scalar"], has["input_scalar"]
        scratch = poisoned(t["inp"], tokens=N, channels=C, widest=C)
        ops.mix_rmsnorm_backward(t["dstream"], dfirst, *sums, *given, scratch=scratch)
        found = {"dstream": t["dstream"], "dresidual_scalar": sums[0], "dinput_scalar": sums[1], "dfirst": dfirst}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    return inputs, run


def check_mix_backward(draw: Draw, N: int, C: int, residual: bool, first: bool) -> None:
    """As `check` does. But a scalar's gradient is one number, whose error in the reference may be anything by chance: its
    bound follows from the size of its N C products. Each is rounded to the dtype of the streams; in float32 it has eight
    roundings, and its sum goes through 136 additions at most, those of a program's turns and of two trees."""
    inputs, run = mix_backward(draw, N, C, residual, first)
    found, own = run(kernels, copy(inputs)), run(reference, copy(inputs))
    wide = copy(inputs, torch.float64)
    exact = run(reference, copy(wide))
    dmixed = exact["dstream"] / (wide["residual_scalar"] if residual else 1)
    for name, factor in (("dresidual_scalar", "inp"), ("dinput_scalar", "first")):
        if name in found:
            error, reference_error = ((t[name].double() - exact[name]).abs().item() for t in (found, own))
            roundings = 144 if draw.dtype == torch.float32 else 1
            floor = math.sqrt(roundings) * ROUNDING[draw.dtype] * (dmixed * wide[factor]).norm().item()
            assert error <= 2 * reference_error + floor, f"{name}: {error:.3g}, {reference_error:.3g}, floor {floor:.3g}"
    for name in found.keys() - {"dresidual_scalar", "dinput_scalar"}:
        close(name, found[name], own[name], exact[name], terms=1)


def value_inputs(draw: Draw, tokens: Tensor, H: int, D: int, G: int, Vp: int) -> Tensors:
    N, C = tokens.numel(), H * D
    inputs = {name: draw.normal(N, 3 * C) for name in ("qkv", "dqkv")} | {n: draw.normal(N, C) for n in ("norm", "dnorm")}
    inputs |= {"gate_weight": draw.normal(H, G), "table": draw.normal(Vp, C), "tokens": tokens.to(draw.device)}
    return inputs | {"gate": 1 + torch.tanh(draw.normal(N, H, dtype=torch.float32))}


def value_forward(draw: Draw, tokens: Tensor, H: int, D: int, G: int, Vp: int) -> Case:
    """Queries and keys stay as they are."""

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        qkv, gate = t["qkv"].clone(), nan(t["qkv"], tokens.numel(), H, dtype=statistics_dtype(t["qkv"]))
        ops.value_embedding_forward(qkv, gate, t["norm"], t["gate_weight"], t["tokens"], t["table"])
        assert torch.equal(qkv[:, : 2 * H * D], t["qkv"][:, : 2 * H * D])
        return {"qkv": qkv, "gate": gate}

    return value_inputs(draw, tokens, H, D, G, Vp), run


def value_backward(draw: Draw, tokens: Tensor, H: int, D: int, G: int, Vp: int) -> Case:
    def run(ops: ModuleType, t: Tensors) -> Tensors:
        (N, C), dvalues, sums = t["norm"].shape, nan(t["norm"], *t["norm"].shape), accumulator(t["norm"], H, G)
        given = t["dqkv"], t["gate"], t["norm"], t["gate_weight"], t["tokens"], t["table"]
        scratch = poisoned(t["norm"], tokens=N, channels=C, widest=C)
        ops.value_embedding_backward(dvalues, t["dnorm"], sums, *given, scratch=scratch)
        return {"dvalues": dvalues, "dnorm": t["dnorm"], "dgate_weight": sums}

    return value_inputs(draw, tokens, H, D, G, Vp), run


def check_value_backward(draw: Draw, tokens: Tensor, H: int, D: int, G: int, Vp: int) -> None:
    """As `check` does: the norm's gradient comes from the gates', sums of a head's D products."""
    inputs, run = value_backward(draw, tokens, H, D, G, Vp)
    found, own = run(kernels, copy(inputs)), run(reference, copy(inputs))
    exact = run(reference, copy(inputs, torch.float64))
    for name, terms in (("dvalues", 1), ("dnorm", D), ("dgate_weight", D * tokens.numel())):
        close(name, found[name], own[name], exact[name], terms=terms)


def value_decode(draw: Draw, B: int, H: int, D: int, G: int) -> Case:
    inputs = value_inputs(draw, torch.arange(B) * 7 % 19, H, D, G, 19)

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        qkv = t["qkv"].clone()
        ops.decode.value_embedding_decode(qkv, t["norm"] * 3, t["gate_weight"], t["tokens"], t["table"])
        return {"qkv": qkv}

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
        rstds = [nan(qkv, N, 2 * H, **statistics) for _ in range(2)]
        ops.qk_norm_forward(found["norm"], rstds[0])
        ops.rotary_forward(found["rotary"], num_heads=H, length=length)
        ops.qk_norm_rotary_forward(found["both"], rstds[1], length=length)
        values = qkv[:, 2 * H * D :]
        assert all(torch.equal(found[name][:, 2 * H * D :], values) for name in ("norm", "rotary", "both"))
        return found | {"rstd": torch.stack(rstds)}

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


def check_relu2_of_no_number(draw: Draw) -> None:
    x = torch.tensor([[math.nan, -math.inf, -1.0, -0.0, 2.0, math.inf]], dtype=draw.dtype, device=draw.device)
    kernels.relu2_forward(x)
    assert math.isnan(x[0, 0]) and x[0, 1:].tolist() == [0, 0, 0, 4, math.inf]


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


def modern_row_products(draw: Draw, C: int, O: int) -> Case:
    """The products of one row: after an RMS norm, into a squared ReLU, and onto the residual stream without a bias."""
    inputs = {"x": draw.normal(1, C) * 2 + 0.5, "weight": draw.normal(O, C) / C**0.5, "residual": draw.normal(1, O)}

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        x, weight, scratch = t["x"], t["weight"], {"scratch": torch.empty(0)}
        norm, rstd = nan(x, 1, C), nan(x, 1, dtype=statistics_dtype(x))
        out = {name: nan(x, 1, O) for name in ("linear", "relu2", "residual")}
        ops.rmsnorm_linear_forward(out["linear"], norm, rstd, x, weight, **scratch)
        ops.rmsnorm_linear_relu2_forward(out["relu2"], norm, rstd, x, weight, **scratch)
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


def capped_classifier(draw: Draw, N: int, V: int, Vp: int, cap: float) -> Case:
    """Loss and gradient, the loss alone, and the capped logits."""
    inputs = classifier_inputs(draw, N, V, Vp)

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        options, before = {"vocab_size": V, "softcap": cap}, t["logits"].clone()
        losses, again = nan(t["scale"], N), nan(t["scale"], N)
        ops.classifier_forward(again, t["logits"], t["targets"], **options)
        assert torch.equal(t["logits"][:, :V], before[:, :V]) and (t["logits"][:, V:] == -math.inf).all()
        z, dlogits = before[:, :V].clone(), before
        ops.softcap_forward(z, softcap=cap)
        ops.classifier_forward_backward(losses, dlogits, t["targets"], t["scale"], **options)
        assert (dlogits[:, V:] == 0).all(), "the padded vocabulary must have no gradient at all"
        return {"losses": torch.stack([losses, again]), "dlogits": dlogits, "z": z}

    return inputs, run


def check_capped_classifier(draw: Draw, N: int, V: int, Vp: int, cap: float) -> None:
    """As `check` does. But two roundings of z are relative to the cap, of 1 - e and of e: z and the losses are off by as
    much, and a probability relatively. Of 16-bit logits the hyperbolic tangent is off by 2^-11 of itself, and a loss is a
    difference of two z."""
    inputs, run = capped_classifier(draw, N, V, Vp, cap)
    found, own = run(kernels, copy(inputs)), run(reference, copy(inputs))
    exact = run(reference, copy(inputs, torch.float64))
    largest = exact["z"].abs().max().item()
    for name, result in found.items():
        size = 1.0 if name == "dlogits" else exact[name].square().mean().sqrt().item()
        terms = 4 * (cap / size) ** 2 if result.dtype == torch.float32 else 1
        if name == "losses" and inputs["logits"].dtype != torch.float32 and result.is_cuda:
            terms = (2 * largest * 2**-11 / (size * ROUNDING[result.dtype])) ** 2
        close(name, result, own[name], exact[name], terms=max(1, terms))


def relu2_products(draw: Draw, N: int, C: int, F: int) -> Case:
    """Into a squared ReLU and out of it, after an RMS norm; and onto the residual stream without a bias."""
    inputs = {"x": draw.normal(N, C), "residual": draw.normal(N, C), "dout": draw.normal(N, C) / N**0.5}
    inputs |= {"fc": draw.normal(F, C) / C**0.5, "proj": draw.normal(C, F) / F**0.5}

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        scratch = {"scratch": poisoned(t["x"], tokens=N, channels=C, widest=F)}
        out, norm, dhidden = nan(t["x"], N, F), nan(t["x"], N, C), nan(t["x"], N, F)
        rstd, dweight = nan(t["x"], N, dtype=statistics_dtype(t["x"])), accumulator(t["x"], C, F)
        ops.rmsnorm_linear_relu2_forward(out, norm, rstd, t["x"], t["fc"], **scratch)
        stream = nan(t["x"], N, C)
        ops.linear_residual_forward(stream, t["residual"], out, t["proj"], None, **scratch)
        ops.relu2_linear_backward(dhidden, dweight, t["dout"], out, t["proj"], **scratch)
        return {"out": out, "norm": norm, "rstd": rstd, "stream": stream, "dhidden": dhidden, "dweight": dweight}

    return inputs, run
