"""Checks of the kernels of generation, for the interpreter on a CPU and for a GPU alike: the rules are those of
`memory_checks`."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.ops.cuda import decode as kernels
from handgrad.ops.reference import decode as reference
from tests.kernels.memory_checks import Case, Draw, Tensors, close, copy, nan, statistics_dtype

PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def check(case: Case, *, terms: int = 1) -> None:
    inputs, run = case
    found = run(kernels, copy(inputs))
    own = run(reference, copy(inputs))
    exact = run(reference, copy(inputs, torch.float64))
    for name, result in found.items():
        close(name, result, own[name], exact[name], terms=terms)


def workspace(x: Tensor, F: int = 0) -> list[Tensor]:
    """fc if there is one, ln, mean, rstd."""
    B, C = x.shape
    statistics = [nan(x, B, dtype=statistics_dtype(x)) for _ in range(2)]
    return [*([nan(x, B, F)] if F else []), nan(x, B, C), *statistics]


def row_gemms(draw: Draw, C: int, O: int) -> Case:
    """The products of one row: after a layer norm (with and without bias), into a GELU, onto the residual stream."""
    inputs = {"x": draw.normal(1, C) * 2 + 0.5, "ln_weight": draw.normal(C), "ln_bias": draw.normal(C)}
    inputs |= {"weight": draw.normal(O, C) / C**0.5, "bias": draw.normal(O), "residual": draw.normal(1, O)}

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        norm, scratch = (t["x"], t["ln_weight"], t["ln_bias"], t["weight"]), {"scratch": torch.empty(0)}
        out = {name: nan(t["x"], 1, O) for name in ("with bias", "without", "gelu", "residual")}
        ops.layernorm_linear_forward(out["with bias"], *workspace(t["x"]), *norm, t["bias"], **scratch)
        ops.layernorm_linear_forward(out["without"], *workspace(t["x"]), *norm, None, **scratch)
        ops.layernorm_linear_gelu_forward(out["gelu"], *workspace(t["x"], O), *norm, t["bias"], **scratch)
        ops.linear_residual_forward(out["residual"], t["residual"], t["x"], t["weight"], t["bias"], **scratch)
        return out | gained(ops, t, O)

    return inputs, run


def gained(ops: ModuleType, t: Tensors, O: int) -> Tensors:
    """The products of the Llama family after an RMS norm with a gain, with and without bias, and of Gemma."""
    out = {name: nan(t["x"], 1, O) for name in ("gained", "gained with bias", "of 1 + w", "alone")}
    rstd, options = nan(t["x"], 1, dtype=statistics_dtype(t["x"])), {"epsilon": 1e-3, "scratch": torch.empty(0)}
    norm = nan(t["x"], *t["x"].shape), rstd, t["x"], t["ln_weight"]
    ops.rmsnorm_linear_forward(out["gained"], *norm, t["weight"], None, **options)
    ops.rmsnorm_linear_forward(out["gained with bias"], *norm, t["weight"], t["bias"], **options)
    ops.rmsnorm_linear_forward(out["of 1 + w"], *norm, t["weight"], None, **options, plus=1)
    ops.linear_forward(out["alone"], t["x"], t["weight"], None, scratch=torch.empty(0))
    return out


def swiglu_product(draw: Draw, C: int, F: int) -> Case:
    """Alone and after an RMS norm with a gain: a product of two products, whose errors add up."""
    inputs = {"x": draw.normal(1, C) * 2 + 0.5, "gain": draw.normal(C), "weight": draw.normal(2 * F, C) / C**0.5}

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        out, hidden = nan(t["x"], 1, F), nan(t["x"], 1, 2 * F)
        norm = nan(t["x"], 1, C), nan(t["x"], 1, dtype=statistics_dtype(t["x"])), t["x"], t["gain"]
        options = {"epsilon": 1e-3, "scratch": torch.empty(0)}
        ops.rmsnorm_linear_swiglu_forward(out, hidden, *norm, t["weight"], **options)
        alone = nan(t["x"], 1, F)
        ops.linear_swiglu_forward(alone, hidden, t["x"], t["weight"], scratch=torch.empty(0))
        return {"out": out, "alone": alone}

    return inputs, run


def split_attention(
    draw: Draw, H: int, K: int, maxT: int, D: int, position: int, *, with_bias: bool = True, window: int = 0
) -> Case:
    """Attention of one row and the product after it: what lies behind the position may be anything, and stays."""
    C = 24
    inputs = {"qkv": draw.normal(1, (H + 2 * K) * D), "weight": draw.normal(C, H * D) / (H * D) ** 0.5}
    inputs |= {name: draw.normal(1, K, maxT, D) for name in ("keys", "values")}
    inputs |= {"bias": draw.normal(C), "residual": draw.normal(1, C)}
    positions = torch.tensor([position], device=draw.device)

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        caches = t["keys"].clone(), t["values"].clone()
        for cache in caches:
            cache[:, :, position:] = torch.nan
            cache[:, :, : max(0, position + 1 - window) if window and ops is kernels else 0] = torch.nan
        out, attended = nan(t["qkv"], 1, C), nan(t["qkv"], 1, H * D)
        scratch = torch.full((1 << 20,), 255, dtype=torch.uint8, device=draw.device)
        arrivals = torch.zeros(1, H, dtype=torch.int32, device=draw.device)
        bias = t["bias"] if with_bias else None
        tensors = *caches, t["residual"], t["qkv"], positions, t["weight"], bias
        options = {"window": window, "scratch": scratch, "arrivals": arrivals}
        ops.attention_linear_residual_forward(out, attended, *tensors, **options)
        assert not arrivals.any()
        assert all(torch.isnan(cache[:, :, position + 1 :]).all() for cache in caches)
        return {"out": out, "written": torch.stack([cache[:, :, position] for cache in caches])}

    return inputs, run


def attention_append(draw: Draw, T: int, starts: list[int], H: int, K: int, maxT: int, D: int, window: int = 0) -> Case:
    """New tokens of sequences in slots of a larger batch, some padded beyond the cache's end."""
    B, slots = len(starts), torch.arange(len(starts), device=draw.device).flip(0) * 2
    inputs = {name: draw.normal(2 * B, K, maxT, D) for name in ("keys", "values")}
    inputs["qkv"] = draw.normal(B * T, (H + 2 * K) * D)
    places = torch.tensor(starts, device=draw.device).unsqueeze(1) + torch.arange(T, device=draw.device)
    positions = places.clamp(max=maxT - 1).view(-1)
    real = (places.view(-1) < maxT - 1).nonzero().view(-1)

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        out, caches = nan(t["qkv"], B * T, H * D), (t["keys"].clone(), t["values"].clone())
        for cache in caches:
            for slot, start in zip(slots.tolist(), starts, strict=True):
                cache[slot, :, start:] = torch.nan
        ops.store_keys_values_at(*caches, t["qkv"], slots, positions)
        ops.attention_append(out, *caches, t["qkv"], slots, positions, window=window, scratch=torch.empty(0))
        return {"out": out[real]}

    return inputs, run


def advance(draw: Draw, B: int) -> None:
    """Exactly the reference's."""
    chosen, active = draw.integers(50, B) - 1, draw.integers(2, B)
    chosen[0] = -1
    results = []
    for ops in (kernels, reference):
        state = [torch.full((B,), 9, device=draw.device), *(torch.arange(B, device=draw.device) for _ in range(2))]
        ops.advance(*state, chosen, active)
        results.append(torch.stack(state))
    assert torch.equal(*results) and results[0][0, 0] == 0


def attention(draw: Draw, B: int, H: int, maxT: int, D: int, positions: list[int], window: int = 0) -> Case:
    """The result, and the caches: what lies behind a sequence's position may be anything, and stays. So may what lies
    before its window, but for the reference, which multiplies it by 0."""
    inputs = {"qkv": draw.normal(B, 3 * H * D), "positions": torch.tensor(positions, device=draw.device)}
    inputs |= {name: draw.normal(B, H, maxT, D) for name in ("keys", "values")}

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        out = nan(t["qkv"], B, H * D)
        keys, values = t["keys"].clone(), t["values"].clone()
        for b, position in enumerate(positions):
            keys[b, :, position:] = torch.nan
            values[b, :, position:] = torch.nan
            if window and ops is kernels:
                keys[b, :, : max(0, position + 1 - window)] = torch.nan
                values[b, :, : max(0, position + 1 - window)] = torch.nan
        ops.attention_decode(out, keys, values, t["qkv"], t["positions"], window=window, scratch=torch.empty(0))
        written = [cache[b, :, p] for cache in (keys, values) for b, p in enumerate(positions)]
        untouched = [cache[b, :, p + 1 :] for cache in (keys, values) for b, p in enumerate(positions)]
        assert all(torch.isnan(part).all() for part in untouched)
        return {"out": out, "written": torch.stack(written)}

    return inputs, run


def embedding(draw: Draw, B: int, C: int) -> None:
    """Exactly the reference's: one sum, rounded once."""
    wte, wpe = draw.normal(50, C), draw.normal(20, C)
    tokens, positions = draw.integers(50, B), draw.integers(20, B)
    out, expected = nan(wte, B, C), nan(wte, B, C)
    kernels.embedding_decode(out, tokens, positions, wte, wpe)
    reference.embedding_decode(expected, tokens, positions, wte, wpe)
    assert torch.equal(out, expected)


def choices(draw: Draw, V: int, Vp: int, **options: float) -> None:
    """The reference's tokens: greedy ones always; drawn ones unless two scores lie within the logarithm's error, which
    among these never happens."""
    B = 6
    logits = draw.normal(B, Vp) * 3
    logits[:, V:] = 1e4  # behind the vocabulary: never chosen
    logits[0, 7] = logits[0, 3] = 50.0  # equals: the lower id
    logits[4, V - 1] = torch.inf
    logits[5, 0] = torch.nan
    seeds = torch.tensor([0, 1, 1 << 31, (1 << 40) + 5, 4, 5], device=draw.device)
    positions = torch.tensor([0, 9, 1 << 20, 3, 4, 5], device=draw.device)
    penalised = options.get("repetition_penalty", 1.0) != 1
    results = []
    for ops in (kernels, reference):
        seen = torch.zeros(B, V, dtype=torch.bool, device=draw.device)
        seen[:, ::3] = True
        tokens = torch.full((B,), -7, device=draw.device)
        size = kernels.choosing_scratch_bytes(batch=B, vocab_size=V)
        scratch = torch.full((size,), 255, dtype=torch.uint8, device=draw.device)
        extra: dict[str, Any] = {**PLAIN, **options, "vocab_size": V, "scratch": scratch}
        ops.choose_tokens(tokens, logits.clone(), seen if penalised else None, seeds, positions, **extra)
        results.append((tokens.tolist(), seen[:4]))
    assert results[0][0] == results[1][0]
    assert results[0][0][4:] == [-1, -1] and all(0 <= token < V for token in results[0][0][:4])
    assert torch.equal(results[0][1], results[1][1])
