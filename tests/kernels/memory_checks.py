"""Checks of the memory-bound kernels, for the interpreter on a CPU and for a GPU alike.

A case makes its inputs, rounded to a dtype, and runs an operation of a backend on a copy of them. Its results in float64
(by the reference) are what is right. A kernel may be wrong by twice what the reference in the kernel's own dtype is wrong
by, plus one rounding of the result, or of the sum of magnitudes where the result is a sum over tokens: errors of summation
are relative to that. All outputs hold NaN before, all accumulators a sentinel, all scratch NaN.
"""

import math
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from handgrad import ops
from handgrad.dropout import cuda as dropout_kernels, reference as dropout_reference
from handgrad.dropout.masks import Dropout
from handgrad.ops import cuda as kernels, reference
from handgrad.ops.cuda.scratch import scratch_bytes

SENTINEL = 3.25
SUMS = {"dweight", "dbias", "dbias_below", "dwte", "dwpe"}  # over tokens
TERMS = {"mean": 4, "rstd": 16}  # two roundings (sum, quotient), and four (mean, variance, root, reciprocal), squared
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

Tensors = dict[str, Tensor]
Case = tuple[Tensors, Callable[[ModuleType, Tensors], Tensors]]


def statistics_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def nan(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.full(shape, math.nan, dtype=dtype or like.dtype, device=like.device)


def accumulator(like: Tensor, *shape: int) -> Tensor:
    return torch.full(shape, SENTINEL, dtype=statistics_dtype(like), device=like.device)


def poisoned(like: Tensor, **sizes: int) -> Tensor:
    """Scratch of exactly the promised size, all NaN as float32."""
    return torch.full((scratch_bytes(**sizes),), 255, dtype=torch.uint8, device=like.device)


class Draw:
    """Random inputs, the same on every device."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype, self.device, self.generator = dtype, device, torch.Generator().manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, dtype or self.dtype)

    def integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self.generator).to(self.device)


def copy(inputs: Tensors, dtype: torch.dtype | None = None) -> Tensors:
    """Copies; of another dtype where they are of floating point."""
    return {k: t.to(dtype, copy=True) if dtype and t.is_floating_point() else t.clone() for k, t in inputs.items()}


def check(case: Case, sums: dict[str, int] | None = None) -> None:
    """`sums`: results in float32 that are sums, with their number of terms."""
    inputs, run = case
    found = run(kernels, copy(inputs))
    own = run(reference, copy(inputs))
    exact = run(reference, copy(inputs, torch.float64))
    for name, result in found.items():
        terms = inputs["dout"].shape[0] if name in SUMS else TERMS.get(name, 1)
        if sums and name in sums and result.dtype == torch.float32:
            terms = sums[name]
        close(name, result, own[name], exact[name], terms=terms)


def close(name: str, found: Tensor, own: Tensor, exact: Tensor, *, terms: float) -> None:
    """`terms` of random sign: the sum of their magnitudes is sqrt(terms) times the size of their sum."""
    assert found.dtype == own.dtype and torch.isfinite(found).all(), name
    error, reference_error = ((t.double() - exact).norm().item() for t in (found, own))
    floor = math.sqrt(terms) * ROUNDING.get(found.dtype, 1e-15) * exact.norm().item()
    assert error <= 2 * reference_error + floor, f"{name}: {error:.3g}, reference {reference_error:.3g}, floor {floor:.3g}"


def check_repeats(case: Case, repeats: int = 10) -> None:
    """The same bits every time."""
    inputs, run = case
    first = run(kernels, copy(inputs))
    for _ in range(repeats - 1):
        for name, again in run(kernels, copy(inputs)).items():
            assert torch.equal(again, first[name]), name


def layernorm_forward(draw: Draw, N: int, C: int) -> Case:
    inputs = {"inp": draw.normal(N, C) * 2 + 0.5, "weight": draw.normal(C), "bias": draw.normal(C)}

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        out, exact = nan(t["inp"], N, C), statistics_dtype(t["inp"])
        mean, rstd = nan(t["inp"], N, dtype=exact), nan(t["inp"], N, dtype=exact)
        ops.layernorm_forward(out, mean, rstd, t["inp"], t["weight"], t["bias"])
        return {"out": out, "mean": mean, "rstd": rstd}

    return inputs, run


def layernorm_backward(draw: Draw, N: int, C: int, below: bool) -> Case:
    inputs = {name: draw.normal(N, C) for name in ("dresidual", "dout", "inp")} | {"weight": draw.normal(C)}
    # rstd from 1/2 to 2: sums over 65,536 rows of its products still fit float16.
    inputs["mean"] = draw.normal(N, dtype=torch.float32) * 0.1
    inputs["rstd"] = torch.exp2(torch.tanh(draw.normal(N, dtype=torch.float32)))

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        acc = {name: accumulator(t["inp"], C) for name in ("dweight", "dbias", "dbias_below")}
        lowest = acc["dbias_below"] if below else None
        ops.layernorm_backward(
            t["dresidual"],
            acc["dweight"],
            acc["dbias"],
            *(t[name] for name in ("dout", "inp", "mean", "rstd", "weight")),
            lowest,
            scratch=poisoned(t["inp"], tokens=N, channels=C, widest=C),
        )
        return {"dresidual": t["dresidual"], **acc}

    return inputs, run


def check_sums_of_what_was_stored(draw: Draw, N: int, C: int) -> None:
    """The bias gradient below is that of the rounded stream, not of the stream before its rounding."""
    inputs, run = layernorm_backward(draw, N, C, below=True)
    found = run(kernels, copy(inputs))
    exact = found["dresidual"].double().sum(0) + SENTINEL
    own = found["dresidual"].sum(0, dtype=torch.float32) + SENTINEL
    close("dbias_below", found["dbias_below"], own, exact, terms=N)


def bias_backward(draw: Draw, N: int, O: int) -> Case:
    def run(ops: ModuleType, t: Tensors) -> Tensors:
        dbias_acc = accumulator(t["dout"], O)
        ops.bias_backward(dbias_acc, t["dout"], scratch=poisoned(dbias_acc, tokens=N, channels=O, widest=O))
        return {"dbias": dbias_acc}

    return {"dout": draw.normal(N, O)}, run


def classifier_inputs(draw: Draw, N: int, V: int, Vp: int) -> Tensors:
    logits = draw.normal(N, Vp) * 4
    logits[:, V:] = math.nan
    targets = draw.integers(V, N)
    targets[0], targets[-1] = V - 1, 0
    return {"logits": logits, "targets": targets, "scale": torch.tensor([0.37], device=draw.device)}


def classifier_forward(draw: Draw, N: int, V: int, Vp: int) -> Case:
    inputs = classifier_inputs(draw, N, V, Vp)

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        before, losses = t["logits"].clone(), nan(t["scale"], N)
        ops.classifier_forward(losses, t["logits"], t["targets"], vocab_size=V)
        assert torch.equal(t["logits"][:, :V], before[:, :V]) and (t["logits"][:, V:] == -math.inf).all()
        return {"losses": losses}

    return inputs, run


def classifier_forward_backward(draw: Draw, N: int, V: int, Vp: int) -> Case:
    inputs = classifier_inputs(draw, N, V, Vp)

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        losses = nan(t["scale"], N)
        ops.classifier_forward_backward(losses, t["logits"], t["targets"], t["scale"], vocab_size=V)
        assert (t["logits"][:, V:] == 0).all(), "the padded vocabulary must have no gradient at all"
        return {"losses": losses, "dlogits": t["logits"]}

    return inputs, run


def gelu_forward(draw: Draw, N: int, F: int) -> Case:
    def run(ops: ModuleType, t: Tensors) -> Tensors:
        out = nan(t["inp"], N, F)
        ops.gelu_forward(out, t["inp"])
        return {"out": out}

    return {"inp": draw.normal(N, F) * 3}, run


def gelu_backward(draw: Draw, N: int, F: int) -> Case:
    def run(ops: ModuleType, t: Tensors) -> Tensors:
        ops.gelu_backward(t["dhidden"], t["inp"])
        return {"dhidden": t["dhidden"]}

    return {"inp": draw.normal(N, F) * 3, "dhidden": draw.normal(N, F)}, run


def sorted_by_token(tokens: Tensor) -> Tensor:
    return torch.sort(tokens.view(-1), stable=True).indices.int()


def embedding_forward(draw: Draw, tokens: Tensor, C: int, Vp: int) -> Case:
    B, T = tokens.shape
    inputs = {"tokens": tokens.to(draw.device), "wte": draw.normal(Vp, C), "wpe": draw.normal(T + 3, C)}

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        out = nan(t["wte"], B * T, C)
        ops.embedding_forward(out, t["tokens"], t["wte"], t["wpe"])
        return {"out": out}

    return inputs, run


def embedding_backward(draw: Draw, tokens: Tensor, C: int, Vp: int) -> Case:
    B, T = tokens.shape
    inputs = {"tokens": tokens.to(draw.device), "dout": draw.normal(B * T, C)}

    def run(ops: ModuleType, t: Tensors) -> Tensors:
        dwte_acc, dwpe_acc = accumulator(t["dout"], Vp, C), accumulator(t["dout"], T + 3, C)
        scratch = poisoned(dwte_acc, tokens=B * T, channels=C, widest=C)
        places = sorted_by_token(t["tokens"])
        ops.embedding_backward(dwte_acc, dwpe_acc, t["dout"], t["tokens"], places, scratch=scratch)
        assert (dwpe_acc[T:] == SENTINEL).all()
        return {"dwte": dwte_acc, "dwpe": dwpe_acc}

    return inputs, run


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
