"""Checks of kernels beside the reference, for the interpreter on a CPU and for a GPU alike.

A case is inputs, rounded to a dtype, and a function that runs an operation of a backend on a copy of them; `case` draws it
from `handgrad.ops.cases`. Its results in float64 (by the reference) are what is right; `handgrad.ops.rounding` derives how
far a kernel may be from them. All outputs hold NaN before,
all accumulators a sentinel, all scratch NaN; what an operation reads keeps its bits.
"""

import inspect
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad import ops
from handgrad.joins.dropout import cuda as dropout_kernels, reference as dropout_reference
from handgrad.joins.dropout.reference import Dropout
from handgrad.ops import cases, cuda as kernels, reference, rounding
from handgrad.ops.cases import SENTINEL, Arguments
from handgrad.ops.sizes import scratch_bytes

Tensors = dict[str, Tensor]
Case = tuple[Arguments, Callable[[ModuleType, Arguments], Tensors]]


class Draw(cases.Draw):
    normal = cases.Draw.__call__


def statistics_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def nan(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.full(shape, math.nan, dtype=dtype or like.dtype, device=like.device)


def accumulator(like: Tensor, *shape: int) -> Tensor:
    return torch.full(shape, SENTINEL, dtype=statistics_dtype(like), device=like.device)


def poisoned(like: Tensor, **sizes: int) -> Tensor:
    """Scratch of exactly the promised size, all NaN as float32."""
    return torch.full((scratch_bytes(**sizes),), 255, dtype=torch.uint8, device=like.device)


def check_all(case: Case) -> None:
    """On a GPU: as exact as the reference, and the same bits every time."""
    check(case)
    check_repeats(case)
    torch.cuda.empty_cache()


def case(draw: Draw, operation: str, **changes: Any) -> Case:
    """One operation, drawn from its case, and the tensors that it writes. `changes` as `Draw.arguments` takes it."""
    inputs = draw.arguments(operation, **changes)
    written = {name for name, _, _ in cases.TENSOR.findall(cases.CALLS[operation].partition("<-")[0])}
    changed = {name for name in inputs if inputs[name] is not None and (name in written or name.endswith("_acc"))}
    shape = next((inputs[name].shape for name in ("dout", "norm", "dqkv_inout") if name in inputs), (0, 0))
    N, columns = math.prod(shape[:-1]), shape[-1]

    def run(ops: ModuleType, t: Arguments) -> Tensors:
        function, before = getattr(ops, operation), copy(t)
        tensors = {name: tensor for name, tensor in t.items() if isinstance(tensor, Tensor)}
        scratch = {}
        if "scratch" in inspect.signature(function).parameters:
            scratch = {"scratch": poisoned(next(iter(tensors.values())), tokens=N, channels=columns, widest=columns)}
        function(**t, **scratch)
        read = tensors.keys() - changed
        assert all(torch.equal(t[name], before[name]) for name in read), "what is read keeps its bits"
        found = {name: t[name] for name in changed}
        if "vocab_size" in t:
            found |= within_the_vocabulary(operation, t["vocab_size"], before, found)
        return found

    return inputs, run


def within_the_vocabulary(operation: str, V: int, before: Tensors, found: Tensors) -> Tensors:
    """The columns of the logits that are words. No word is likely behind them, and none has a gradient, to the bit."""
    (name,) = (name for name in found if name.startswith("logits"))
    logits, backward = found[name], operation.endswith("backward")
    assert (logits[:, V:] == (0 if backward else -math.inf)).all()
    assert backward or torch.equal(logits[:, :V], before[name][:, :V]), "a loss alone leaves the logits as they are"
    return {name: logits[:, :V]}


def classifier_inputs(draw: Draw, N: int, V: int, Vp: int) -> Tensors:
    arguments = draw.arguments("classifier_forward_backward", N=N, V=V, Vp=Vp)
    return {"logits": arguments["logits_to_dlogits_inout"]} | {name: arguments[name] for name in ("targets", "scale")}


def both(draw: Draw, operation: str, **changes: Any) -> list[Case]:
    """The operation's forward and backward."""
    return [case(draw, f"{operation}_{way}", **changes) for way in ("forward", "backward")]


def copy(inputs: Arguments, dtype: torch.dtype | None = None) -> Arguments:
    """Copies; of another dtype where they are of floating point."""
    return cases.copies(inputs, dtype)


def check(case: Case, sums: dict[str, int] | None = None) -> None:
    """`sums`: results in float32 that are sums, with their number of terms."""
    inputs, run = case
    found = run(kernels, copy(inputs))
    own = run(reference, copy(inputs))
    exact = run(reference, copy(inputs, torch.float64))
    for name, result in found.items():
        if sums and name in sums and result.dtype == torch.float32:
            close(name, result, own[name], exact[name], terms=sums[name])
        else:
            within(name, result, own[name], exact[name], rounding.floor(name, inputs, exact, result.dtype))


def close(name: str, found: Tensor, own: Tensor, exact: Tensor, *, terms: float) -> None:
    """`terms` of random sign: the sum of their magnitudes is sqrt(terms) times the size of their sum."""
    within(name, found, own, exact, rounding.root_of(terms, found.dtype, exact))


def within(name: str, found: Tensor, own: Tensor, exact: Tensor, floor: float) -> None:
    assert found.dtype == own.dtype and torch.isfinite(found).all(), name
    error, allowed = rounding.error(found, exact), rounding.allowed(own, exact, floor)
    assert error <= allowed, f"{name}: {error:.3g}, allowed {allowed:.3g} with a floor of {floor:.3g}"


def check_repeats(case: Case, repeats: int = 10) -> None:
    """The same bits every time."""
    inputs, run = case
    first = run(kernels, copy(inputs))
    for _ in range(repeats - 1):
        for name, again in run(kernels, copy(inputs)).items():
            assert torch.equal(again, first[name]), name


def check_sums_of_what_was_stored(draw: Draw, N: int, C: int) -> None:
    """The bias gradient below is that of the rounded stream, not of the stream before its rounding."""
    inputs, run = case(draw, "layernorm_backward", N=N, C=C)
    found = run(kernels, copy(inputs))
    exact = found["dresidual_inout"].double().sum(0) + SENTINEL
    own = found["dresidual_inout"].sum(0, dtype=torch.float32) + SENTINEL
    close("dbias_below", found["dbias_below_acc"], own, exact, terms=N)


def embedding(draw: Draw, operation: str, tokens: Tensor, C: int, Vp: int) -> Case:
    """With three positions more than there are in a row."""
    B, T = tokens.shape
    return case(draw, operation, B=B, T=T, C=C, Vp=Vp, M=T + 3, tokens=tokens.to(draw.device))


def check_embedding(draw: Draw, tokens: Tensor, C: int, Vp: int) -> None:
    """Forward the reference's bits. No gradient at positions that no row has."""
    inputs, run = embedding(draw, "embedding_forward", tokens, C, Vp)
    assert torch.equal(run(kernels, copy(inputs))["out"], run(reference, copy(inputs))["out"])
    inputs, run = embedding(draw, "embedding_backward", tokens, C, Vp)
    assert (run(kernels, copy(inputs))["dwpe_acc"][tokens.shape[1] :] == SENTINEL).all()
    check((inputs, run))


def zipf_tokens(V: int, B: int, T: int) -> Tensor:
    """Tokens whose k-th word has a share of 1/k: the commonest of 50,257 makes up 9 % of them."""
    weights = 1.0 / torch.arange(1, V + 1)
    generator = torch.Generator().manual_seed(1)
    return torch.multinomial(weights, B * T, replacement=True, generator=generator).view(B, T) * 7919 % V


def dropouts(draw: Draw, B: int, T: int, C: int) -> Case:
    """Samples of both halves of their numbers, a stream whose highest bit is set, and a tensor of ones for the mask."""
    samples = torch.arange(B, device=draw.device) * ((1 << 33) + 1) + 5
    site = next(place for place in (Dropout(samples, 0.3, 1337, n) for n in range(99)) if place.stream >> 31)

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        x, stream = t["x"], t["stream"]
        out, dx, branch, ones = nan(x, B * T, C), nan(x, B * T, C), x.clone(), torch.ones_like(x)
        dropping = dropout_reference if ops is reference else dropout_kernels
        dropping.dropout_forward(out, x, site)
        dropping.dropout_backward(dx, x, site)
        dropping.dropout_backward(ones, ones, site)
        dropping.dropout_residual_forward(branch, stream, site)
        return {"out": out, "dx": dx, "mask": ones, "joined": branch}

    return {"x": draw.normal(B * T, C), "stream": draw.normal(B * T, C)}, run


def check_dropouts(draw: Draw, B: int, T: int, C: int) -> None:
    """The same factor in the same precision gives the same bits; but of the sum, where one rounding may be missing."""
    case = dropouts(draw, B, T, C)
    check(case)
    inputs, run = case
    found, own = run(kernels, copy(inputs)), run(reference, copy(inputs))
    assert all(torch.equal(found[name], own[name]) for name in ("out", "dx", "mask"))
    assert 0 < (found["mask"] == 0).double().mean() < 1 or B * T * C < 9


def squared_norms(draw: Draw, blocks: int, size: int, last: int) -> Case:
    """`last`: elements of the last block."""

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        out = nan(t["flat"], blocks)
        ops.squared_norms(out, t["flat"], block_elements=size)
        return {"norms": out}

    return {"flat": draw.normal((blocks - 1) * size + last, dtype=torch.float32)}, run


def adamw(draw: Draw, elements: int, steps: int, *, betas: tuple[float, float], clip: float) -> Case:
    """Several steps; the last is forbidden by its verdict and must change nothing."""
    names = ("weight", "m", "v", "gradient")
    inputs = {name: draw.normal(elements, dtype=torch.float32) for name in names}
    inputs["m"] *= 0.01
    inputs["v"] = inputs["v"].square() * 1e-4
    settings = {"beta1": betas[0], "beta2": betas[1], "epsilon": 1e-8, "weight_decay": 0.1}

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        like = t["weight"]
        exact = like.dtype == torch.float64
        published = like if draw.dtype == torch.float32 else nan(like, elements, dtype=like.dtype if exact else draw.dtype)
        controls = torch.zeros(4, dtype=torch.float64, device=like.device)
        results = torch.tensor([1.0, 1.0, clip, 0.0, 1.0], dtype=torch.float64, device=like.device)
        gradient = t["gradient"]
        for step in range(1, steps + 2):
            controls[0], controls[1] = step, 1e-3 * step
            before = [like.clone(), t["m"].clone(), t["v"].clone(), published.clone()]
            results[3] = 0.0 if step <= steps else 3.0
            g = gradient * (1.0 + 0.25 * step)
            ops.adamw_update(published, like, t["m"], t["v"], g, controls, results, **settings)
        after = [like, t["m"], t["v"], published]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True)), "a forbidden update changes nothing"
        return {"weight": like, "m": t["m"], "v": t["v"], "published": published}

    return inputs, run


def check_stochastic_rounding(device: str, *, moments: torch.dtype = torch.float32) -> None:
    draw, n, first = Draw(torch.float32, device), 5000, 3 << 30
    weight, m, g = draw.normal(n).bfloat16(), draw.normal(n) * 0.1, draw.normal(n)
    controls, results = (torch.zeros(8, dtype=torch.float64, device=device) for _ in range(2))
    controls[ops.CONTROL_STEP], controls[ops.CONTROL_LEARNING_RATE] = 7, 1e-3
    results[ops.RESULT_SCALE] = 0.5
    settings = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1, "seed": 1337, "first_element": first}
    found = []
    for backend in (reference, kernels):
        w, state = weight.clone(), [m.to(moments, copy=True), m.square().to(moments)]
        backend.adamw_update(w, w, *state, g.clone(), controls, results, **settings)
        found.append([tensor for tensor in (w, *state) if tensor.dtype == torch.bfloat16])
    assert (found[0][0] != weight).float().mean() > 0.1, "an update that moves nothing shows nothing"
    for one, other in zip(*found, strict=True):
        assert (one == other).float().mean() > 0.999
        assert ((one.view(torch.int16).int() - other.view(torch.int16).int()).abs() <= 1).all()
