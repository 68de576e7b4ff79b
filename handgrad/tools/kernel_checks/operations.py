"""Every operation in 16 or 32 bits, and those of dropout, beside the reference in float64.

A kernel works when its largest relative error over the tensors it changed is at most two units in the last place of the
precision, plus twice what the reference itself is wrong by in that precision.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.dropout import reference as dropout_reference
from handgrad.dropout.masks import Dropout
from handgrad.models.modern_tensors import GATE_CHANNELS
from handgrad.ops import CONTROLS, RESULTS, UPDATE, reference
from handgrad.tools.kernel_checks.checking import attempt, compare
from handgrad.tools.kernel_checks.draw import Arguments, B, C, Draw, F, H, N, T, V, Vp


def statistics(inp: Tensor) -> Arguments:
    x = inp.float()
    return {"mean": x.mean(1), "rstd": (x.var(1, correction=0) + 1e-5).rsqrt()}


def layernorm_forward(d: Draw) -> Arguments:
    made = {"out": d.empty(N, C), "mean": d.empty32(N), "rstd": d.empty32(N)}
    return {**made, "inp": d(N, C), "weight": d(C), "bias": d(C)}


def layernorm_backward(d: Draw) -> Arguments:
    inp = d(N, C)
    accumulators = {name: d.float32(C) for name in ("dweight_acc", "dbias_acc", "dbias_below_acc")}
    return {"dresidual_inout": d(N, C), "dout": d(N, C), "inp": inp, **statistics(inp), "weight": d(C), **accumulators}


def rmsnorm_forward(d: Draw) -> Arguments:
    return {"out": d.empty(N, C), "rstd": d.empty32(N), "inp": d(N, C)}


def rmsnorm_backward(d: Draw) -> Arguments:
    inp = d(N, C)
    rstd = inp.float().square().mean(1).rsqrt()
    return {"dresidual_inout": d(N, C), "dout": d(N, C), "inp": inp, "rstd": rstd}


def qk_norm_backward(d: Draw) -> Arguments:
    return {"dqkv_inout": d(N, 3 * C), "qkv": d(N, 3 * C), "rstd": d.float32(N, 2 * H).square() + 0.5}


def mixture(d: Draw) -> Arguments:
    scalars = {"residual_scalar": d(1, scale=0.1) + 1, "input_scalar": d(1, scale=0.1) + 0.3}
    return {"inp": d(N, C), "first": d(N, C), **scalars}


def mix_rmsnorm_forward(d: Draw) -> Arguments:
    return {"mixed": d.empty(N, C), "out": d.empty(N, C), "rstd": d.empty32(N), **mixture(d)}


def mix_rmsnorm_backward(d: Draw) -> Arguments:
    gradients = {"dstream_inout": d(N, C), "dfirst_inout": d(N, C), "dout": d(N, C), "rstd": d.float32(N).square() + 0.5}
    return {**gradients, "dresidual_scalar_acc": d.float32(1), "dinput_scalar_acc": d.float32(1), **mixture(d)}


def value_embedding(d: Draw) -> Arguments:
    gates = {"norm": d(N, C), "gate_weight": d(H, GATE_CHANNELS, scale=GATE_CHANNELS**-0.5)}
    return {**gates, "tokens": d.words(B, T), "table": d(Vp, C)}


def value_embedding_backward(d: Draw) -> Arguments:
    made = {"dvalues": d.empty(N, C), "dnorm_inout": d(N, C), "dgate_weight_acc": d.float32(H, GATE_CHANNELS)}
    return {**made, "dqkv": d(N, 3 * C), "gate": d.float32(N, H).square(), **value_embedding(d)}


def classifier(d: Draw) -> Arguments:
    return {"losses": d.empty32(N), "targets": d.words(N), "vocab_size": V}


def classifier_backward(d: Draw) -> Arguments:
    scale = torch.tensor([0.37], device=d.device)
    return {**classifier(d), "logits_to_dlogits_inout": d(N, Vp, scale=4), "scale": scale}


def untrained(made: Arguments) -> Arguments:
    """Every fifth token is not trained."""
    made["targets"][::5] = -1
    return {**made, "untrained": True}


def product_backward(d: Draw) -> Arguments:
    accumulators = {"dweight_acc": d.float32(F, C), "dbias_acc": d.float32(F)}
    return {"dinp": d.empty(N, C), **accumulators, "dout": d(N, F), **d.product(F, C)}


def gelu_product_backward(d: Draw) -> Arguments:
    return {"dhidden": d.empty(N, F), "dweight_acc": d.float32(C, F), "dout": d(N, C), "hidden": d(N, F), **d.product(C, F)}


def relu2_product_backward(d: Draw) -> Arguments:
    product = d.product(C, F)
    product["inp"] = product["inp"].square()
    return {"dhidden": d.empty(N, F), "dweight_acc": d.float32(C, F), "dout": d(N, C), **product}


def gained_rmsnorm_backward(d: Draw) -> Arguments:
    return {**rmsnorm_backward(d), "dgain_acc": d.float32(C), "gain": d(C)}


GROUPED = 4 * 64  # columns of two heads of queries that share one of keys and values
TURN = {"frequencies": tuple(500000.0 ** (-pair / 32) for pair in range(32)), "scale": 1.2}


def gained_qk_norm(d: Draw) -> Arguments:
    return {"qkv": d(N, GROUPED), "q_gain": d(64), "k_gain": d(64), "length": T, **TURN}


def gained_qk_norm_backward(d: Draw) -> Arguments:
    accumulators = {"dq_gain_acc": d.float32(64), "dk_gain_acc": d.float32(64)}
    return {"dqkv_inout": d(N, GROUPED), **accumulators, "rstd": d.float32(N, 3).square() + 0.5, **gained_qk_norm(d)}


def swiglu_product_backward(d: Draw) -> Arguments:
    outs = {"dhidden": d.empty(N, 2 * F), "dinp": d.empty(N, F), "dweight_acc": d.float32(C, F)}
    return {**outs, "dout": d(N, C), "hidden": d(N, 2 * F), **d.product(C, F)}


def attention(d: Draw, heads: int, columns: int = 3 * C, **more: Any) -> Arguments:
    """`more`: a site of dropout, or documents."""
    return {"out": d.empty(N, C), "lse": d.empty32(B, heads, T), "qkv": d(N, columns), **more}


def attention_backward(d: Draw, heads: int, columns: int = 3 * C, **more: Any) -> Arguments:
    """With an output and log-sums that belong to the queries, keys and values."""
    forward = attention(d, heads, columns, **more)
    (dropout_reference if "dropout" in more else reference).attention_forward(**forward)
    return {"dqkv": d.empty(N, columns), "dout": d(N, C), **forward}


def documents(d: Draw) -> dict[str, Any]:
    """Three in the first row, one of them a token; one in the second."""
    starts = torch.zeros(B, T, dtype=torch.int32, device=d.device)
    starts[0, 40:], starts[0, 41:] = 40, 41
    return {"document_starts": starts}


def site(d: Draw) -> dict[str, Any]:
    """Of samples on both sides of 2^32."""
    return {"dropout": Dropout(torch.tensor([7, (1 << 32) + 7], device=d.device), 0.1, 1337, 2)}


def token_embedding_backward(d: Draw) -> Arguments:
    tokens = d.words(B, T)
    positions = torch.sort(tokens.view(-1), stable=True).indices.int()
    return {"dwte_acc": d.float32(Vp, C), "dout": d(N, C), "tokens": tokens, "sorted_positions": positions}


def embedding_backward(d: Draw) -> Arguments:
    return {**token_embedding_backward(d), "dwpe_acc": d.float32(T, C)}


def verdict(d: Draw) -> Arguments:
    sums = {"sum_of_losses": d.float64(2.5 * N, 0.5 * N), "norm_partials": d.float32(64).square()}
    scale = {"loss_scale_inout": torch.tensor([1 / N, 1.0, 0.0], device=d.device)}
    limits = {"controls": d.float64(1.0, 1e-3, math.inf, math.inf, float(N))}
    settings = {"gradient_tokens": N, "clip_norm": 1.0, "dynamic_loss_scale": False}
    return {"results": d.empty(RESULTS, dtype=torch.float64), **sums, **scale, **limits, **settings}


CONTROLS_OF_MUON = (150.0, 0.02, *[math.inf] * (CONTROLS - 2))  # a step in which momentum grows
CLIPPED = (1.0, 1.0, 0.25, float(UPDATE), 1.0)


def adamw_update(d: Draw) -> Arguments:
    size = 3 * 4096
    state = {name: d.float32(size) for name in ("weight_inout", "m_inout", "gradient_inout")}
    results = d.float64(1.0, 1.0, 1.0, float(UPDATE), 1.0)
    settings = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}
    controls = d.float64(3.0, 0.5, *[math.inf] * (CONTROLS - 2))
    published = {"published": d.empty(size), "v_inout": d.float32(size).square()}
    return {**published, **state, "controls": controls, "results": results, **settings}


def muon_momentum(d: Draw) -> Arguments:
    tensors = {"update": d.empty(F, C), "m_inout": d.float32(F, C), "gradient": d.float32(F, C)}
    return {**tensors, "controls": d.float64(*CONTROLS_OF_MUON), "results": d.float64(*CLIPPED), "momentum": 0.95}


def muon_update(d: Draw) -> Arguments:
    """A factor some of whose rows are smaller than the rest."""
    factor = d(C, F, scale=F**-0.5) * torch.linspace(0.1, 1, C, device=d.device, dtype=d.dtype)[:, None]
    tensors = {"published": d.empty(C, F), "weight_inout": d.float32(C, F), "moments_inout": d.float32(C).square()}
    buffers = {"controls": d.float64(*CONTROLS_OF_MUON), "results": d.float64(*CLIPPED)}
    return {**tensors, "polar": factor, **buffers, "rate": 2.0, "beta2": 0.95, "weight_decay": 0.1}


def sums(d: Draw) -> Arguments:
    return {"sum_acc": d.float64(2.0), "losses": d.float32(N).square()}


def tree(d: Draw, rows: int) -> Arguments:
    return {"out": d.empty32(2 * 4096), "pieces": d.float32(rows, 2 * 4096)}


# Line: the arguments by name of the operation that it launches, which its name begins with. `scratch` is added where the
# operation takes one.
Cases = dict[str, Callable[[Draw], Arguments]]
CASES: Cases = {
    "embedding_forward": lambda d: {"out": d.empty(N, C), "tokens": d.words(B, T), "wte": d(Vp, C), "wpe": d(T, C)},
    "embedding_backward": embedding_backward,
    "token_embedding_forward": lambda d: {"out": d.empty(N, C), "tokens": d.words(B, T), "wte": d(Vp, C)},
    "token_embedding_backward": token_embedding_backward,
    "layernorm_forward": layernorm_forward,
    "layernorm_backward": layernorm_backward,
    "rmsnorm_forward": rmsnorm_forward,
    "rmsnorm_backward": rmsnorm_backward,
    "mix_rmsnorm_forward": mix_rmsnorm_forward,
    "mix_rmsnorm_backward": mix_rmsnorm_backward,
    "value_embedding_forward": lambda d: {"qkv_inout": d(N, 3 * C), "gate": d.empty32(N, H), **value_embedding(d)},
    "value_embedding_backward": value_embedding_backward,
    "rotary_forward": lambda d: {"qkv_inout": d(N, 3 * C), "num_heads": H, "length": T},
    "rotary_backward": lambda d: {"dqkv_inout": d(N, 3 * C), "num_heads": H, "length": T},
    "qk_norm_forward": lambda d: {"qkv_inout": d(N, 3 * C), "rstd": d.empty32(N, 2 * H)},
    "qk_norm_backward": qk_norm_backward,
    "qk_norm_rotary_forward": lambda d: {"qkv_inout": d(N, 3 * C), "rstd": d.empty32(N, 2 * H), "length": T},
    "qk_norm_rotary_backward": lambda d: {**qk_norm_backward(d), "length": T},
    "rotary_forward, of grouped heads": lambda d: {"qkv_inout": d(N, GROUPED), "num_heads": 2, "length": T, **TURN},
    "rotary_backward, of grouped heads": lambda d: {"dqkv_inout": d(N, GROUPED), "num_heads": 2, "length": T, **TURN},
    "gained_rmsnorm_forward": lambda d: {**rmsnorm_forward(d), "gain": d(C), "epsilon": 1e-5},
    "gained_rmsnorm_backward": gained_rmsnorm_backward,
    "gained_qk_norm_rotary_forward": lambda d: {
        "out": d.empty(N, GROUPED),
        "rstd": d.empty32(N, 3),
        "epsilon": 1e-6,
        **gained_qk_norm(d),
    },
    "gained_qk_norm_rotary_backward": gained_qk_norm_backward,
    "swiglu_forward": lambda d: {"out": d.empty(N, F), "hidden": d(N, 2 * F)},
    "swiglu_backward": lambda d: {"dhidden": d.empty(N, 2 * F), "dout": d(N, F), "hidden": d(N, 2 * F)},
    "linear_swiglu_forward": lambda d: {"out": d.empty(N, F), "hidden": d.empty(N, 2 * F), **d.product(2 * F, C)},
    "swiglu_linear_backward": swiglu_product_backward,
    "linear_forward": lambda d: {"out": d.empty(N, F), **d.product(F, C), "bias": d(F)},
    "linear_backward": product_backward,
    "linear_residual_forward": lambda d: {"out": d.empty(N, C), "residual": d(N, C), **d.product(C, F), "bias": d(C)},
    "linear_gelu_forward": lambda d: {"out": d.empty(N, F), "hidden": d.empty(N, F), **d.product(F, C), "bias": d(F)},
    "gelu_linear_backward": gelu_product_backward,
    "gelu_forward": lambda d: {"out": d.empty(N, F), "inp": d(N, F)},
    "gelu_backward": lambda d: {"dhidden_inout": d(N, F), "inp": d(N, F)},
    "relu2_forward": lambda d: {"hidden_inout": d(N, F)},
    "relu2_backward": lambda d: {"dhidden_inout": d(N, F), "out": d(N, F).square()},
    "linear_relu2_forward": lambda d: {"out": d.empty(N, F), **d.product(F, C)},
    "relu2_linear_backward": relu2_product_backward,
    "bias_backward": lambda d: {"dbias_acc": d.float32(F), "dout": d(N, F)},
    "attention_forward, heads of 64 channels": lambda d: attention(d, H),
    "attention_backward, heads of 64 channels": lambda d: attention_backward(d, H),
    "attention_forward, heads of 128 channels": lambda d: attention(d, 1),
    "attention_backward, heads of 128 channels": lambda d: attention_backward(d, 1),
    "attention_forward, of grouped heads": lambda d: attention(d, H, 2 * C),
    "attention_backward, of grouped heads": lambda d: attention_backward(d, H, 2 * C),
    "attention_forward, within documents": lambda d: attention(d, H, **documents(d)),
    "attention_backward, within documents": lambda d: attention_backward(d, H, **documents(d)),
    "attention_forward, of grouped heads within documents": lambda d: attention(d, H, 2 * C, **documents(d)),
    "attention_backward, of grouped heads within documents": lambda d: attention_backward(d, H, 2 * C, **documents(d)),
    "classifier_forward": lambda d: {**classifier(d), "logits_inout": d(N, Vp, scale=4)},
    "classifier_forward_backward": classifier_backward,
    "classifier_forward, with a cap": lambda d: {**classifier(d), "logits_inout": d(N, Vp, scale=4), "softcap": 15.0},
    "classifier_forward_backward, with a cap": lambda d: {**classifier_backward(d), "softcap": 15.0},
    "classifier_forward, some untrained": lambda d: untrained({**classifier(d), "logits_inout": d(N, Vp, scale=4)}),
    "classifier_forward_backward, some untrained": lambda d: untrained(classifier_backward(d)),
    "softcap_forward": lambda d: {"logits_inout": d(N, Vp, scale=4), "softcap": 15.0},
    "loss_sum": sums,
    "squared_norms": lambda d: {"out": d.empty32(16), "flat": d.float32(15 * 4096 + 640), "block_elements": 4096},
    "tree_sum": lambda d: {**tree(d, 4), "rounded": False},
    "tree_sum, rounded": lambda d: {**tree(d, 16), "rounded": True},
    "checksum": lambda d: {"out": torch.zeros(1, dtype=torch.int64, device=d.device), "flat": d(3 * 4096 + 5)},
    "digest": lambda d: {
        "out_acc": torch.zeros(2, dtype=torch.int64, device=d.device),
        "flat": d(3 * 4096 + 5),
        "controls": torch.full((CONTROLS,), 7.0, dtype=torch.float64, device=d.device),
        "first": 8 * 4096 - 16,
    },
    "verdict": verdict,
    "adamw_update": adamw_update,
    "muon_momentum": muon_momentum,
    "muon_polar, wide": lambda d: {"update_to_polar_inout": d(3, C, F)},
    "muon_polar, tall": lambda d: {"update_to_polar_inout": d(2, F, C)},
    "muon_update": muon_update,
}
DROPOUT_CASES: Cases = {
    "dropout_forward": lambda d: {"out": d.empty(N, C), "inp": d(N, C), **site(d)},
    "dropout_backward": lambda d: {"dinp": d.empty(N, C), "dout": d(N, C), **site(d)},
    "dropout_residual_forward": lambda d: {"branch_to_out_inout": d(N, C), "residual": d(N, C), **site(d)},
    "attention_forward, with dropout": lambda d: attention(d, H, **site(d)),
    "attention_backward, with dropout": lambda d: attention_backward(d, H, **site(d)),
    "attention_forward, with dropout within documents": lambda d: attention(d, H, **site(d), **documents(d)),
    "attention_backward, with dropout within documents": lambda d: attention_backward(d, H, **site(d), **documents(d)),
}


def operation_of(line: str) -> str:
    return line.split(",")[0]


def check_kernels(
    kernels: ModuleType, device: torch.device, dtype: torch.dtype, cases: Cases = CASES, specified: ModuleType = reference
) -> Iterator[tuple[bool, str]]:
    """(it works, line) for each case."""
    for line, make in cases.items():
        kernel, right = (getattr(ops, operation_of(line)) for ops in (kernels, specified))
        yield attempt(line, partial(compare, kernel, right, partial(make, Draw(dtype, device))))


def check_dropout_kernels(kernels: ModuleType, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[bool, str]]:
    yield from check_kernels(kernels, device, dtype, DROPOUT_CASES, dropout_reference)
