"""Each kernel launched once on small tensors, beside the reference in float64.

A kernel works when its largest relative error over the tensors it changed is at most one unit in the last place of the
precision, plus twice what the reference itself is wrong by in that precision.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.ops import CONTROLS, RESULTS, UPDATE, reference

B, T, V, Vp = 2, 96, 300, 384
N, C, H, F = B * T, 128, 2, 512
SCRATCH_BYTES = 64 << 20  # more than any of them needs at this size

Arguments = dict[str, Any]


class Draw:
    """Inputs of a precision, outputs full of NaN, accumulators that hold something already."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device, self.generator = dtype, device, torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        return (torch.randn(*shape, generator=self.generator) * scale).to(self.device, dtype or self.dtype)

    def float32(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self(*shape, scale=scale, dtype=torch.float32)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.full(shape, math.nan, dtype=dtype or self.dtype, device=self.device)

    def words(self, *shape: int) -> Tensor:
        return torch.randint(V, shape, generator=self.generator).to(self.device)

    def product(self, O: int, I: int) -> Arguments:
        """Input and weight of a product, scaled so that its result is about 1."""
        return {"inp": self(N, I), "weight": self(O, I, scale=I**-0.5)}

    def float64(self, *values: float) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.device)


def statistics(draw: Draw, inp: Tensor) -> Arguments:
    x = inp.float()
    return {"mean": x.mean(1), "rstd": (x.var(1, correction=0) + 1e-5).rsqrt()}


def layernorm_backward(d: Draw) -> Arguments:
    inp = d(N, C)
    accumulators = {name: d.float32(C) for name in ("dweight_acc", "dbias_acc", "dbias_below_acc")}
    return {"dresidual_inout": d(N, C), "dout": d(N, C), "inp": inp, **statistics(d, inp), "weight": d(C), **accumulators}


def classifier(d: Draw) -> Arguments:
    return {"losses": d.empty(N, dtype=torch.float32), "targets": d.words(N), "vocab_size": V}


def product_backward(d: Draw) -> Arguments:
    accumulators = {"dweight_acc": d.float32(F, C), "dbias_acc": d.float32(F)}
    return {"dinp": d.empty(N, C), **accumulators, "dout": d(N, F), **d.product(F, C)}


def gelu_product_backward(d: Draw) -> Arguments:
    accumulators = {"dweight_acc": d.float32(C, F), "dbias_acc": d.float32(C)}
    return {"dhidden": d.empty(N, F), **accumulators, "dout": d(N, C), "hidden": d(N, F), **d.product(C, F)}


def attention_backward(d: Draw, heads: int) -> Arguments:
    """With an output and log-sums that belong to the queries, keys and values."""
    qkv, out, lse = d(N, 3 * C), d.empty(N, C), d.empty(B, heads, T, dtype=torch.float32)
    reference.attention_forward(out, lse, qkv)
    return {"dqkv": d.empty(N, 3 * C), "dout": d(N, C), "out": out, "lse": lse, "qkv": qkv}


def embedding_backward(d: Draw) -> Arguments:
    tokens = d.words(B, T)
    positions = torch.sort(tokens.view(-1), stable=True).indices.int()
    accumulators = {"dwte_acc": d.float32(Vp, C), "dwpe_acc": d.float32(T, C)}
    return {**accumulators, "dout": d(N, C), "tokens": tokens, "sorted_positions": positions}


def verdict(d: Draw) -> Arguments:
    sums = {"sum_of_losses": d.float64(3.0 * N), "norm_partials": d.float32(64).square()}
    scale = {"loss_scale_inout": torch.tensor([1 / N, 1.0, 0.0], device=d.device)}
    limits = {"controls": d.float64(1.0, 1e-3, math.inf, math.inf)}
    settings = {"tokens_per_step": N, "clip_norm": 1.0, "dynamic_loss_scale": False}
    return {"results": d.empty(RESULTS, dtype=torch.float64), **sums, **scale, **limits, **settings}


def adamw_update(d: Draw) -> Arguments:
    size = 3 * 4096
    state = {name: d.float32(size) for name in ("weight_inout", "m_inout", "gradient_inout")}
    results = d.float64(1.0, 1.0, 1.0, float(UPDATE), 1.0)
    settings = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}
    controls = d.float64(3.0, 0.5, *[math.inf] * (CONTROLS - 2))
    published = {"published": d.empty(size), "v_inout": d.float32(size).square()}
    return {**published, **state, "controls": controls, "results": results, **settings}


def attention(d: Draw, heads: int) -> Arguments:
    return {"out": d.empty(N, C), "lse": d.empty(B, heads, T, dtype=torch.float32), "qkv": d(N, 3 * C)}


def sums(d: Draw) -> Arguments:
    return {"sum_acc": d.float64(2.0), "losses": d.float32(N).square()}


# Line: the operation it launches, and that operation's arguments by name. `scratch` is added where it takes one.
CASES: dict[str, tuple[str, Callable[[Draw], Arguments]]] = {
    name: (name.split(",")[0], make)
    for name, make in {
        "embedding_forward": lambda d: {"out": d.empty(N, C), "tokens": d.words(B, T), "wte": d(Vp, C), "wpe": d(T, C)},
        "embedding_backward": embedding_backward,
        "layernorm_forward": lambda d: {
            "out": d.empty(N, C),
            "mean": d.empty(N, dtype=torch.float32),
            "rstd": d.empty(N, dtype=torch.float32),
            "inp": d(N, C),
            "weight": d(C),
            "bias": d(C),
        },
        "layernorm_backward": layernorm_backward,
        "linear_forward": lambda d: {"out": d.empty(N, F), **d.product(F, C), "bias": d(F)},
        "linear_backward": product_backward,
        "linear_residual_forward": lambda d: {
            "out": d.empty(N, C),
            "residual": d(N, C),
            **d.product(C, F),
            "bias": d(C),
        },
        "linear_gelu_forward": lambda d: {
            "out": d.empty(N, F),
            "hidden": d.empty(N, F),
            **d.product(F, C),
            "bias": d(F),
        },
        "gelu_linear_backward": gelu_product_backward,
        "gelu_forward": lambda d: {"out": d.empty(N, F), "inp": d(N, F)},
        "gelu_backward": lambda d: {"dhidden_inout": d(N, F), "inp": d(N, F)},
        "bias_backward": lambda d: {"dbias_acc": d.float32(F), "dout": d(N, F)},
        "attention_forward, heads of 64 channels": lambda d: attention(d, H),
        "attention_backward, heads of 64 channels": lambda d: attention_backward(d, H),
        "attention_forward, heads of 128 channels": lambda d: attention(d, 1),
        "attention_backward, heads of 128 channels": lambda d: attention_backward(d, 1),
        "classifier_forward": lambda d: {**classifier(d), "logits_inout": d(N, Vp, scale=4)},
        "classifier_forward_backward": lambda d: {
            **classifier(d),
            "logits_to_dlogits_inout": d(N, Vp, scale=4),
            "scale": torch.tensor([0.37], device=d.device),
        },
        "loss_sum": sums,
        "squared_norms": lambda d: {"out": d.empty(16, dtype=torch.float32), "flat": d.float32(16 * 4096)},
        "verdict": verdict,
        "adamw_update": adamw_update,
    }.items()
}


def check_kernels(kernels: ModuleType, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[bool, str]]:
    """(whether it works, line) for each case."""
    for line, (operation, make) in CASES.items():
        try:
            error, allowed = errors(getattr(kernels, operation), getattr(reference, operation), make(Draw(dtype, device)))
        # The compiler, cuBLASLt, cuDNN and the driver have no exception in common. Nothing is hidden: each failure is a
        # line of its own that makes `doctor` fail, and the cases after it still run.
        except Exception as failure:
            told = " ".join(f"{type(failure).__name__}: {failure}".split())
            yield False, f"{line} failed: {told:.200}; use --backend reference"
            continue
        figures = f"relative error {error:.1e}, at most {allowed:.1e} expected"
        if error <= allowed:  # false for NaN, too
            yield True, f"{line} works ({figures})"
        else:
            yield False, f"{line} failed: {figures}; use --backend reference"


def errors(kernel: Callable[..., None], specified: Callable[..., None], arguments: Arguments) -> tuple[float, float]:
    """The kernel's relative error and what is allowed."""
    tensors = [t for t in arguments.values() if isinstance(t, Tensor)]
    if "scratch" in inspect.signature(kernel).parameters:
        arguments["scratch"] = torch.full((SCRATCH_BYTES,), 255, dtype=torch.uint8, device=tensors[0].device)
    found, own, exact = (copies(arguments, double=double) for double in (False, False, True))
    for operation, values in ((kernel, found), (specified, own), (specified, exact)):
        operation(**values)
    # The tensor that is furthest beyond what its own precision allows (two units, and twice the reference's error) counts.
    worst = (0.0, 1.0)
    for name, tensor in exact.items():
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            error, own_error = (relative_error(t[name], tensor) for t in (found, own))
            allowed = 2 * torch.finfo(found[name].dtype).eps + 2 * own_error
            if not error * worst[1] <= worst[0] * allowed:  # true for NaN, too
                worst = error, allowed
    return worst


def copies(arguments: Arguments, *, double: bool) -> Arguments:
    """Copies of the tensors, in float64 if `double`; what is no tensor stays."""

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(torch.float64 if double and value.is_floating_point() else value.dtype, copy=True)

    return {name: copied(value) for name, value in arguments.items()}


def relative_error(found: Tensor, exact: Tensor) -> float:
    """The norm of the difference over that of what is right; infinite where one is finite and the other is not."""
    finite = exact.isfinite()
    if not (torch.equal(found.isfinite(), finite) and torch.equal(found.double()[~finite], exact[~finite])):
        return math.inf  # a NaN here would get lost in the largest of several errors
    difference = (found.double() - exact)[finite].norm().item()
    return difference / max(exact[finite].norm().item(), 1e-30)
