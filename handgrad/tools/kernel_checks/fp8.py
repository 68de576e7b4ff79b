"""The operations that make and multiply fp8 numbers.

A kernel that quantises works when it writes, to the bit, what the reference makes of the 16-bit numbers that it writes
otherwise; a GEMM, when it is off by little more than the rounding of its result.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from handgrad.joins.fp8 import reference
from handgrad.joins.fp8.formats import (
    CLIPPED,
    E4M3,
    E5M2,
    INVERSE,
    LARGEST_EXPONENT,
    REPORT_PLACES,
    SATURATED_STEPS,
    SCALE,
    SCALING_PLACES,
    STATISTICS_PLACES,
    Quantized,
)
from handgrad.ops import CONTROLS
from handgrad.ops.cases import Arguments, C, Draw, F, N, Vp, copies
from handgrad.tools.kernel_checks.checking import Compared, attempt, compare, launch
from handgrad.tools.kernel_checks.fp8_checking import Fp8Case, Fp8Draw, numbers, product, requantized
from handgrad.tools.kernel_checks.operations import CASES

OLDEST_FP8 = (8, 9)  # compute capability of the first GPUs whose tensor cores take fp8: Ada, then Hopper

# Operations that write the 16-bit form as well: it changes in place, the backward reads it, or two kernels need not add it
# up in one order (attention's backward).
WITH_PLAIN = ("layernorm_backward", "rmsnorm_backward", "mix_rmsnorm_backward")
WITH_PLAIN += ("attention_forward", "attention_backward")


def fused(
    operation: str,
    place: str,
    make: Callable[[Draw], Arguments],
    form: torch.dtype,
    exponent: int,
    columns: torch.dtype | None = None,
) -> Fp8Case:
    """A case: the operation with a quantised tensor instead of a 16-bit one, beside the 16-bit operation; at a given
    scale, then at one made from the tensor. `columns`: their format, if it is not `form`."""

    def case(ops: ModuleType, d: Fp8Draw) -> Compared:
        for current in (False, True):
            yield from beside_16_bits(ops, d, current)

    def beside_16_bits(ops: ModuleType, d: Fp8Draw, current: bool) -> Compared:
        plain = make(d)
        given = copies(plain)
        kept = given[place] if operation in WITH_PLAIN else None
        out = d.output(given[place].shape, form, exponent, plain=kept, current=current)
        assert out.columns is not None
        out = replace(out, columns=out.columns.view(columns or form))
        scaling = out.scaling.clone()
        launch(getattr(ops, operation), {**given, place: out})
        launch(getattr(ops, operation), plain)
        yield from requantized(out, scaling, plain[place] if kept is None else kept)
        for name, tensor in plain.items():
            if isinstance(tensor, Tensor) and (name != place or kept is not None):
                yield given[name], tensor, 2 * torch.finfo(d.dtype).eps

    return case


def quantize(ops: ModuleType, d: Fp8Draw) -> Compared:
    """Quantises numbers, some too large and some that vanish; then at a scale of their own."""
    inp = d(N, C) ** 7
    for form, current in ((E4M3, False), (E5M2, False), (E4M3, True)):
        out = d.output((N, C), form, 2, current=current)
        scaling = out.scaling.clone()
        ops.quantize(out, inp)
        yield from requantized(out, scaling, inp)


def transpose(ops: ModuleType, d: Fp8Draw) -> Compared:
    """Columns made from rows, as for a frozen weight."""
    made = d.operand(d(N, C))
    assert made.rows is not None and made.columns is not None
    columns = made.columns.clone()
    made.columns.fill_(0)
    ops.transpose(made.columns, made.rows)
    yield made.columns.float(), columns.float(), 0


def products(*operations: str) -> Fp8Case:
    """A case: GEMMs of fp8 numbers, beside the reference of the same numbers in float64."""

    def case(ops: ModuleType, d: Fp8Draw) -> Compared:
        for operation in operations:
            given = CASES[operation](d)
            operands = {"inp": E4M3, "weight": E4M3, "dout": E5M2}
            given |= {name: d.operand(given[name], form) for name, form in operands.items() if name in given}
            exact = {name: numbers(value) if isinstance(value, Quantized) else value for name, value in given.items()}
            exact = copies(exact, dtype=torch.float64)
            launch(getattr(reference, operation), exact)
            launch(getattr(ops, operation), given)
            yield from (product(found, exact[name]) for name, found in given.items() if isinstance(found, Tensor))

    return case


def fp8_chunk_backward(ops: ModuleType, d: Fp8Draw) -> Compared:
    """The backward of a GEMM of some rows, whose columns keep the stride of the whole tensor."""
    given, chunk = CASES["linear_backward"](d), slice(16, N)
    given |= {name: d.operand(given[name], form)[chunk] for name, form in (("dout", E5M2), ("inp", E4M3))}
    given |= {"dinp": given["dinp"][chunk], "dbias_acc": None, "weight": d.operand(given["weight"])}
    exact = copies({k: numbers(v) if isinstance(v, Quantized) else v for k, v in given.items()}, dtype=torch.float64)
    launch(reference.linear_backward, exact)
    launch(ops.linear_backward, given)
    yield from (product(given[name], exact[name]) for name in ("dinp", "dweight_acc"))


def before_gelu_or_swiglu(name: str, exponent: int, currents: tuple[bool, ...] = (False,)) -> Fp8Case:
    """A case, the forward: the GEMM, whose result stays in 16 bits, and the fp8 rows of its GELU or SwiGLU."""

    def case(ops: ModuleType, d: Fp8Draw) -> Compared:
        for current in currents:
            given = CASES[f"linear_{name}_forward"](d)
            inp, weight, plain, hidden = d.operand(given["inp"]), d.operand(given["weight"]), given["out"], given["hidden"]
            out = d.output((N, F), E4M3, exponent, columns=None, current=current)
            scaling = out.scaling.clone()
            launch(getattr(ops, f"linear_{name}_forward"), {**given, "out": out, "inp": inp, "weight": weight})
            yield product(hidden, numbers(inp) @ numbers(weight).t() + given.get("bias", 0))
            getattr(ops, f"{name}_forward")(plain, hidden)
            yield from requantized(out, scaling, plain)

    return case


def after_gelu_or_relu2(name: str, exponent: int) -> Fp8Case:
    """A case, the backward: the gradient before a GELU or a squared ReLU, the columns of its output, and the weight's
    gradient from these."""

    def case(ops: ModuleType, d: Fp8Draw) -> Compared:
        arguments = CASES[f"{name}_linear_backward"](d)
        plain, hidden, before = arguments["inp"], arguments.get("hidden"), arguments["dweight_acc"].double()
        if hidden is not None:  # which the GELU reads; a squared ReLU reads its output
            ops.gelu_forward(plain, hidden)
        dout, weight = d.operand(arguments["dout"], E5M2), d.operand(arguments["weight"])
        dhidden = d.output((N, F), E5M2, 14, workspace=d.empty(N, F))
        inp = d.output((N, F), E4M3, exponent, rows=None, plain=plain if hidden is None else None)
        scaling = dhidden.scaling.clone()
        given: Arguments = {**arguments, "dhidden": dhidden, "dout": dout, "inp": inp, "weight": weight}
        launch(getattr(ops, f"{name}_linear_backward"), given)
        yield product(arguments["dweight_acc"], before + numbers(dout).t() @ numbers(inp))

        dplain = d.empty(N, F)
        gradients = {"dinp": dplain, "dweight_acc": d.float32(C, F), "dbias_acc": None}
        launch(ops.linear_backward, {**gradients, "dout": dout, "inp": inp, "weight": weight})
        getattr(ops, f"{name}_backward")(dplain, plain if hidden is None else hidden)
        yield from requantized(dhidden, scaling, dplain)
        yield from requantized(inp, inp.scaling.clone(), plain, counted=False)

    return case


def fp8_relu2(ops: ModuleType, d: Fp8Draw) -> Compared:
    """Forward: the GEMM, and its squared ReLU in 16 bits and in fp8 rows."""
    inp, weight = d.product(F, C)
    for current in (False, True):
        out, hidden = d.output((N, F), E4M3, 7, columns=None, plain=d.empty(N, F), current=current), d.empty(N, F)
        scaling = out.scaling.clone()
        launch(ops.linear_relu2_forward, {"out": out, "inp": inp, "weight": weight})
        launch(ops.linear_forward, {"out": hidden, "inp": inp, "weight": weight, "bias": None})
        yield product(hidden, numbers(inp) @ numbers(weight).t())
        ops.relu2_forward(hidden)
        assert out.plain is not None
        yield out.plain, hidden, 0
        yield from requantized(out, scaling, hidden)


def fp8_swiglu_backward(ops: ModuleType, d: Fp8Draw) -> Compared:
    """The gradient before the SwiGLU, the columns of its output, and the weight's gradient from these."""
    for current in (False, True):
        arguments = CASES["swiglu_linear_backward"](d)
        hidden, dinp, before = arguments["hidden"], arguments["dinp"], arguments["dweight_acc"].double()
        dout, weight = d.operand(arguments["dout"], E5M2), d.operand(arguments["weight"])
        dhidden = d.output((N, 2 * F), E5M2, 12, current=current)
        inp = d.output((N, F), E4M3, 5, rows=None)
        scaling = dhidden.scaling.clone()
        given: Arguments = {**arguments, "dhidden": dhidden, "dout": dout, "inp": inp, "weight": weight}
        launch(ops.swiglu_linear_backward, given)
        yield product(dinp, numbers(dout) @ numbers(weight))
        yield product(arguments["dweight_acc"], before + numbers(dout).t() @ numbers(inp))
        dplain, plain = d.empty(N, 2 * F), d.empty(N, F)
        ops.swiglu_backward(dplain, dinp, hidden)
        yield from requantized(dhidden, scaling, dplain)
        ops.swiglu_forward(plain, hidden)
        yield from requantized(replace(inp, rows=None), inp.scaling.clone(), plain, counted=False)


def turn_back(operation: str, make: Callable[[Draw], Arguments], columns: torch.dtype = E4M3) -> Fp8Case:
    """A case: the gradient before queries' and keys' turn, near the 16-bit kernel's, and its fp8 forms, made from
    its own 16-bit numbers; and the gradients of gains, where there are some."""

    def case(ops: ModuleType, d: Fp8Draw) -> Compared:
        for current in (False, True):
            given = make(d)
            turned = given["dqkv_inout"]
            own, after = torch.full_like(turned, math.nan), turned.clone()
            out = d.output(turned.shape, E4M3, 5, plain=own, workspace=after, current=current)
            assert out.columns is not None
            out = replace(out, columns=out.columns.view(columns))
            scaling = out.scaling.clone()
            quantised = copies(given)
            launch(getattr(ops, operation), {**quantised, "dqkv_inout": out})
            launch(getattr(ops, operation), given)
            yield own, turned, 2 * torch.finfo(d.dtype).eps
            yield from ((quantised[name], given[name], 2.0**-20) for name in given if name.endswith("_acc"))
            yield from requantized(out, scaling, own)

    return case


def fp8_classifier(ops: ModuleType, d: Fp8Draw) -> Compared:
    """The gradient of the logits, at a scale that admits every number of it."""
    for more in ("", ", with a cap", ", some untrained"):
        plain = CASES["classifier_forward_backward" + more](d)
        given, logits = copies(plain), "logits_to_dlogits_inout"
        out = d.output((N, Vp), E5M2, 16, columns=None, plain=given[logits])
        launch(ops.classifier_forward_backward, {**given, logits: out})
        launch(ops.classifier_forward_backward, plain)
        yield from requantized(out, out.scaling.clone(), plain[logits], counted=False)
        for name in ("losses", logits):
            yield given[name], plain[name], 0


def fold_statistics(d: Draw) -> Arguments:
    found = d.float32(4, STATISTICS_PLACES, 300).square()
    found[:, CLIPPED:].round_()  # counts
    return {"totals_inout": d.float64(*range(12)).view(4, STATISTICS_PLACES), "statistics": found}


def update_scaling(d: Draw) -> Arguments:
    """Tensors in both formats, of which one saturates for the last time before it gets more margin."""
    scaling = torch.zeros(4, SCALING_PLACES, device=d.device)
    exponents = torch.tensor([7.0, 15.0, 10.0, 3.0], device=d.device)
    scaling[:, SCALE], scaling[:, INVERSE], scaling[:, SATURATED_STEPS] = exponents.exp2(), (-exponents).exp2(), 2.0
    totals = torch.cat([d.float64(3.0, 4.0, 1e-9, 1e4).view(4, 1), d.float64(*range(8)).view(4, 2)], 1)
    formats = [LARGEST_EXPONENT[form] for form in (E4M3, E5M2, E4M3, E4M3)]
    return {
        "scaling_inout": scaling,
        "history_inout": d.float32(4, 5, scale=1e-3).abs(),
        "totals_inout": totals,
        "report": d.empty(4, REPORT_PLACES, dtype=torch.float64),
        "largest_exponents": torch.tensor(formats, dtype=torch.int32, device=d.device),
        "controls": d.float64(7.0, *[math.inf] * (CONTROLS - 1)),
        "count_every": 4,
        "saturation_steps": 3,
        "widen": True,
    }


def beside_the_reference(operation: str, make: Callable[[Draw], Arguments]) -> Fp8Case:
    """A case: an operation on statistics and scales."""
    return lambda ops, d: compare(getattr(ops, operation), getattr(reference, operation), partial(make, d))


NORMS, MIXED = ("layernorm", "rmsnorm"), "mix_rmsnorm"
# Line: a case, which launches the operations of a backend and yields the tensors to compare.
FP8_CASES: dict[str, Fp8Case] = {
    "quantize to fp8": quantize,
    "transpose of fp8": transpose,
    **{
        f"{name}_forward to fp8": fused(f"{name}_forward", "out", CASES[f"{name}_forward"], E4M3, 7)
        for name in (*NORMS, MIXED)
    },
    **{
        f"{name}_backward to fp8": fused(f"{name}_backward", "dresidual_inout", CASES[f"{name}_backward"], E5M2, 14)
        for name in NORMS
    },
    "rmsnorm_forward to fp8, without a gain": fused(
        "rmsnorm_forward", "out", CASES["rmsnorm_forward, without a gain"], E4M3, 7
    ),
    "rmsnorm_backward to fp8, without a gain": fused(
        "rmsnorm_backward", "dresidual_inout", CASES["rmsnorm_backward, without a gain"], E5M2, 14
    ),
    "mix_rmsnorm_backward to fp8": fused("mix_rmsnorm_backward", "dstream_inout", CASES["mix_rmsnorm_backward"], E5M2, 14),
    "attention_forward to fp8, heads of 64 channels": fused(
        "attention_forward", "out", CASES["attention_forward"], E4M3, 7
    ),
    "attention_forward to fp8, heads of 128 channels": fused(
        "attention_forward", "out", CASES["attention_forward, heads of 128 channels"], E4M3, 7
    ),
    "attention_forward to fp8, of grouped heads": fused(
        "attention_forward", "out", CASES["attention_forward, of grouped heads"], E4M3, 7
    ),
    "attention_backward to fp8": fused("attention_backward", "dqkv", CASES["attention_backward"], E5M2, 14),
    "attention_backward to fp8, columns in e5m2": fused(
        "attention_backward", "dqkv", CASES["attention_backward"], E4M3, 7, columns=E5M2
    ),
    "rotary_backward to fp8": turn_back("rotary_backward", CASES["rotary_backward"]),
    "rotary_backward to fp8, of grouped heads": turn_back("rotary_backward", CASES["rotary_backward, of grouped heads"]),
    "gained_qk_norm_rotary_backward to fp8": turn_back(
        "gained_qk_norm_rotary_backward", CASES["gained_qk_norm_rotary_backward"], E5M2
    ),
    "qk_norm_backward to fp8": turn_back("qk_norm_backward", CASES["qk_norm_backward"]),
    "qk_norm_rotary_backward to fp8": turn_back("qk_norm_rotary_backward", CASES["qk_norm_rotary_backward"]),
    "qk_norm_rotary_backward to fp8, columns in e5m2": turn_back(
        "qk_norm_rotary_backward", CASES["qk_norm_rotary_backward"], E5M2
    ),
    "linear_gelu_forward in fp8": before_gelu_or_swiglu("gelu", 7),
    "gelu_linear_backward in fp8": after_gelu_or_relu2("gelu", 7),
    "linear_relu2_forward in fp8": fp8_relu2,
    "relu2_linear_backward in fp8": after_gelu_or_relu2("relu2", 5),
    "linear_swiglu_forward in fp8": before_gelu_or_swiglu("swiglu", 6, (False, True)),
    "swiglu_linear_backward in fp8": fp8_swiglu_backward,
    "linear_forward in fp8": products("linear_forward", "linear_residual_forward"),
    "linear_backward in fp8": products("linear_backward"),
    "linear_backward in fp8, of some rows": fp8_chunk_backward,
    "classifier_forward_backward to fp8": fp8_classifier,
    "fold_statistics": beside_the_reference("fold_statistics", fold_statistics),
    "update_scaling": beside_the_reference("update_scaling", update_scaling),
}


def check_fp8_kernels(kernels: ModuleType, device: torch.device) -> Iterator[tuple[bool, str]]:
    """(it works, line) for each case."""
    for line, case in FP8_CASES.items():
        yield attempt(line, partial(case, kernels, Fp8Draw(kernels, device)))
