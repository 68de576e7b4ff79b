"""The operations that make and multiply fp8 numbers, on the arguments of the operations in 16 bits.

A kernel that quantises works when it writes, to the bit, what the reference makes of the 16-bit numbers that it writes
otherwise; a GEMM, when it is off by little more than the rounding of its result.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.joins.fp8 import reference
from handgrad.joins.fp8.formats import (
    AMAX,
    CLIPPED,
    COUNTING,
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
from handgrad.ops.cases import Arguments, B, C, Draw, F, H, N, T, Vp, copies
from handgrad.tools.kernel_checks.checking import Compared, attempt, compare, launch
from handgrad.tools.kernel_checks.operations import CASES

OLDEST_FP8 = (8, 9)  # compute capability of the first GPUs whose tensor cores take fp8: Ada, then Hopper
# The error that a GEMM may have beyond its result's rounding: tensor cores add fp8 products up in fewer bits than float32.
FP8_SUMS = 2.0**-10


class Fp8Draw(Draw):
    """Draws quantised tensors as well, with room for the statistics of a backend."""

    def __init__(self, ops: ModuleType, device: torch.device):
        super().__init__(torch.bfloat16, device)
        sizes = {"batch": B, "length": T, "channels": C, "feed_forward": F, "widest": 2 * F, "padded_vocab_size": Vp}
        self.parts = max(ops.statistics_parts(num_heads=n, head_width=C // n, **sizes) for n in (1, H))

    def output(self, shape: Sequence[int], form: torch.dtype, exponent: int, **changes: Any) -> Quantized:
        """Forms of a tensor of this shape, full of NaN, at a scale of 2^exponent."""
        rows, columns = (
            torch.full(sides, 0x7F, dtype=torch.uint8, device=self.device).view(form)
            for sides in (tuple(shape), tuple(shape)[::-1])
        )
        scaling = torch.zeros(SCALING_PLACES, device=self.device)
        scaling[SCALE], scaling[INVERSE], scaling[COUNTING] = 2.0**exponent, 2.0**-exponent, 1.0
        statistics = torch.zeros(STATISTICS_PLACES, self.parts, device=self.device)
        return replace(Quantized(rows, columns, scaling, statistics), **changes)

    def operand(self, x: Tensor, form: torch.dtype = E4M3) -> Quantized:
        """x in fp8, at the scale that suits it."""
        quantized = self.output(x.shape, form, 0, current=True)
        reference.quantize(quantized, x)
        return quantized


Fp8Case = Callable[[ModuleType, Fp8Draw], Compared]


def numbers(tensor: Quantized) -> Tensor:
    """The numbers that a tensor in fp8 stands for, in float64."""
    if tensor.rows is not None:
        return tensor.rows.double() * tensor.inverse_scale
    assert tensor.columns is not None
    return tensor.columns.t().double() * tensor.inverse_scale


def requantized(result: Quantized, scaling: Tensor, plain: Tensor, *, counted: bool = True) -> Compared:
    """Compares a quantised tensor with the reference's, made from the 16-bit `plain` at the `scaling` from before."""
    rows, columns = (None if form is None else torch.empty_like(form) for form in (result.rows, result.columns))
    right = Quantized(rows, columns, scaling, torch.zeros_like(result.statistics), current=result.current)
    reference.quantize(right, plain)
    for own, wanted in ((result.rows, right.rows), (result.columns, right.columns)):
        if own is not None and wanted is not None:
            yield own.float(), wanted.float(), 0
    if counted:
        yield result.scaling, right.scaling, 0
        yield result.statistics[AMAX].amax(), right.statistics[AMAX].amax(), 0
        yield result.statistics[CLIPPED:].sum(1), right.statistics[CLIPPED:].sum(1), 0


def product(result: Tensor, exact: Tensor) -> tuple[Tensor, Tensor, float]:
    return result, exact, torch.finfo(result.dtype).eps / 2 + FP8_SUMS


# Operations that write the 16-bit form as well: it changes in place, the backward reads it, or the order of sums is free.
WITH_PLAIN = ("layernorm_backward", "rmsnorm_backward", "mix_rmsnorm_backward")
WITH_PLAIN += ("attention_forward", "attention_backward")


def to_fp8(operation: str, arguments: str, field: str, exponent: int, form: torch.dtype, columns: torch.dtype) -> Fp8Case:
    """A case: the operation with a quantised tensor as `field` of its `arguments`, beside the 16-bit operation; at a scale
    of 2^exponent, then at one made from the tensor. `columns`: their format.

    What turns dqkv back reads it from a workspace, and need only come near the 16-bit kernel."""

    def case(ops: ModuleType, d: Fp8Draw) -> Compared:
        for current in (False, True):
            yield from beside_16_bits(ops, d, current)

    def beside_16_bits(ops: ModuleType, d: Fp8Draw, current: bool) -> Compared:
        plain = CASES[arguments](d)
        values, turns = copies(plain), field == "dqkv_inout"
        plain_out = torch.full_like(plain[field], math.nan) if turns else values[field] if operation in WITH_PLAIN else None
        workspace = values[field] if turns else None
        out = d.output(plain[field].shape, form, exponent, plain=plain_out, workspace=workspace, current=current)
        assert out.columns is not None
        out = replace(out, columns=out.columns.view(columns))
        scaling = out.scaling.clone()
        launch(getattr(ops, operation), {**values, field: out})
        launch(getattr(ops, operation), plain)
        yield from requantized(out, scaling, plain[field] if plain_out is None else plain_out)
        if plain_out is not None:
            values[field] = plain_out
        for name, tensor in plain.items():
            if isinstance(tensor, Tensor) and (name != field or plain_out is not None):
                exact = turns and name.endswith("_acc")
                yield values[name], tensor, 2.0**-20 if exact else 2 * torch.finfo(d.dtype).eps

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
    operand = d.operand(d(N, C))
    assert operand.rows is not None and operand.columns is not None
    columns = operand.columns.clone()
    operand.columns.fill_(0)
    ops.transpose(operand.columns, operand.rows)
    yield operand.columns.float(), columns.float(), 0


OPERANDS = {"inp": E4M3, "weight": E4M3, "dout": E5M2}


def gemms(*operations: str, rows: slice = slice(None)) -> Fp8Case:
    """A case: GEMMs of fp8 numbers, beside the reference of the same numbers in float64. `rows`: some of the tokens, whose
    columns keep the stride of the whole tensor; no bias has a gradient then."""

    def case(ops: ModuleType, d: Fp8Draw) -> Compared:
        for operation in operations:
            arguments = CASES[operation](d)
            arguments |= {name: d.operand(arguments[name], form) for name, form in OPERANDS.items() if name in arguments}
            if rows != slice(None):
                arguments |= {name: arguments[name][rows] for name in ("dout", "inp", "dinp")} | {"dbias_acc": None}
            exact = {name: numbers(value) if isinstance(value, Quantized) else value for name, value in arguments.items()}
            exact = copies(exact, dtype=torch.float64)
            launch(getattr(reference, operation), exact)
            launch(getattr(ops, operation), arguments)
            yield from (product(result, exact[name]) for name, result in arguments.items() if isinstance(result, Tensor))

    return case


def into_nonlinearity(name: str, exponent: int, currents: tuple[bool, ...]) -> Fp8Case:
    """A case, the forward: the GEMM, whose result stays in 16 bits, and the fp8 rows of its GELU, SwiGLU or squared ReLU.
    The latter works in place and keeps 16 bits of its own."""

    def case(ops: ModuleType, d: Fp8Draw) -> Compared:
        for current in currents:
            arguments = CASES[f"linear_{name}_forward"](d)
            inp, weight = d.operand(arguments["inp"]), d.operand(arguments["weight"])
            plain, in_place = arguments["out"], name == "relu2"
            plain_out = d.empty(N, F) if in_place else None
            out = d.output((N, F), E4M3, exponent, columns=None, plain=plain_out, current=current)
            scaling = out.scaling.clone()
            launch(getattr(ops, f"linear_{name}_forward"), {**arguments, "out": out, "inp": inp, "weight": weight})
            hidden = plain if in_place else arguments["hidden"]
            if in_place:
                launch(ops.linear_forward, {"out": hidden, "inp": inp, "weight": weight, "bias": None})
            yield product(hidden, numbers(inp) @ numbers(weight).t() + arguments.get("bias", 0))
            getattr(ops, f"{name}_forward")(*([hidden] if in_place else [plain, hidden]))
            if plain_out is not None:
                yield plain_out, hidden, 0
            yield from requantized(out, scaling, plain)

    return case


def out_of_nonlinearity(name: str, exponents: tuple[int, int], currents: tuple[bool, ...]) -> Fp8Case:
    """A case, the backward: the gradient before a GELU, SwiGLU or squared ReLU, the columns of its output, which the last
    one has in 16 bits, and the weight's gradient from these. `exponents`: of the gradient's scale and the output's."""

    def case(ops: ModuleType, d: Fp8Draw) -> Compared:
        for current in currents:
            arguments = CASES[f"{name}_linear_backward"](d)
            before, gated = arguments["dweight_acc"].double(), name == "swiglu"
            plain = d.empty(N, F) if gated else arguments["inp"]
            hidden = arguments.get("hidden", plain)  # a squared ReLU's backward reads its output
            if name != "relu2":
                getattr(ops, f"{name}_forward")(plain, hidden)
            dout, weight = d.operand(arguments["dout"], E5M2), d.operand(arguments["weight"])
            workspace = None if gated else d.empty(N, F)
            dhidden = d.output(arguments["dhidden"].shape, E5M2, exponents[0], workspace=workspace, current=current)
            inp = d.output((N, F), E4M3, exponents[1], rows=None, plain=plain if name == "relu2" else None)
            scaling = dhidden.scaling.clone()
            tensors = {"dhidden": dhidden, "dout": dout, "inp": inp, "weight": weight}
            launch(getattr(ops, f"{name}_linear_backward"), arguments | tensors)
            yield product(arguments["dweight_acc"], before + numbers(dout).t() @ numbers(inp))

            dplain, dinp = torch.empty_like(arguments["dhidden"]), arguments.get("dinp", d.empty(N, F))
            if gated:
                yield product(dinp, numbers(dout) @ numbers(weight))
                ops.swiglu_backward(dplain, dinp, hidden)
            else:
                gradients = {"dinp": dplain, "dweight_acc": d.float32(C, F), "dbias_acc": None}
                launch(ops.linear_backward, {**gradients, "dout": dout, "inp": inp, "weight": weight})
                getattr(ops, f"{name}_backward")(dplain, hidden)
            yield from requantized(dhidden, scaling, dplain)
            yield from requantized(inp, inp.scaling.clone(), plain, counted=False)

    return case


def classifier(ops: ModuleType, d: Fp8Draw) -> Compared:
    """The gradient of the logits, at a scale that admits every number of it."""
    for more in ("", ", with a cap", ", some untrained"):
        plain = CASES["classifier_forward_backward" + more](d)
        arguments, logits = copies(plain), "logits_to_dlogits_inout"
        out = d.output((N, Vp), E5M2, 16, columns=None, plain=arguments[logits])
        launch(ops.classifier_forward_backward, {**arguments, logits: out})
        launch(ops.classifier_forward_backward, plain)
        yield from requantized(out, out.scaling.clone(), plain[logits], counted=False)
        for name in ("losses", logits):
            yield arguments[name], plain[name], 0


def fold_statistics(d: Draw) -> Arguments:
    statistics = d.float32(4, STATISTICS_PLACES, 300).square()
    statistics[:, CLIPPED:].round_()  # counts
    return {"totals_inout": d.float64(*range(12)).view(4, STATISTICS_PLACES), "statistics": statistics}


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


BACKWARD, TURNED = ("dresidual_inout", 14, E5M2, E5M2), ("dqkv_inout", 5, E4M3)
# Of a line: the case of its arguments, the tensor that is quantised, its scale's exponent, formats of rows and columns.
QUANTISED: dict[str, tuple[str, str, int, torch.dtype, torch.dtype]] = {
    **{
        f"{name}_forward to fp8": (f"{name}_forward", "out", 7, E4M3, E4M3)
        for name in ("layernorm", "rmsnorm", "mix_rmsnorm")
    },
    **{f"{name}_backward to fp8": (f"{name}_backward", *BACKWARD) for name in ("layernorm", "rmsnorm")},
    "rmsnorm_forward to fp8, without a gain": ("rmsnorm_forward, without a gain", "out", 7, E4M3, E4M3),
    "rmsnorm_backward to fp8, without a gain": ("rmsnorm_backward, without a gain", *BACKWARD),
    "mix_rmsnorm_backward to fp8": ("mix_rmsnorm_backward", "dstream_inout", 14, E5M2, E5M2),
    **{
        f"attention_forward to fp8, {heads}": (f"attention_forward{more}", "out", 7, E4M3, E4M3)
        for heads, more in (
            ("heads of 64 channels", ""),
            ("heads of 128 channels", ", heads of 128 channels"),
            ("of grouped heads", ", of grouped heads"),
        )
    },
    "attention_backward to fp8": ("attention_backward", "dqkv", 14, E5M2, E5M2),
    "attention_backward to fp8, columns in e5m2": ("attention_backward", "dqkv", 7, E4M3, E5M2),
    "rotary_backward to fp8": ("rotary_backward", *TURNED, E4M3),
    "rotary_backward to fp8, of grouped heads": ("rotary_backward, of grouped heads", *TURNED, E4M3),
    "gained_qk_norm_rotary_backward to fp8": ("gained_qk_norm_rotary_backward", *TURNED, E5M2),
    "qk_norm_backward to fp8": ("qk_norm_backward", *TURNED, E4M3),
    "qk_norm_rotary_backward to fp8": ("qk_norm_rotary_backward", *TURNED, E4M3),
    "qk_norm_rotary_backward to fp8, columns in e5m2": ("qk_norm_rotary_backward", *TURNED, E5M2),
}
# Line: a case, which launches the operations of a backend and yields the tensors to compare.
FP8_CASES: dict[str, Fp8Case] = {
    "quantize to fp8": quantize,
    "transpose of fp8": transpose,
    **{line: to_fp8(line.partition(" ")[0], *row) for line, row in QUANTISED.items()},
    "linear_gelu_forward in fp8": into_nonlinearity("gelu", 7, (False,)),
    "gelu_linear_backward in fp8": out_of_nonlinearity("gelu", (14, 7), (False,)),
    "linear_relu2_forward in fp8": into_nonlinearity("relu2", 7, (False, True)),
    "relu2_linear_backward in fp8": out_of_nonlinearity("relu2", (14, 5), (False,)),
    "linear_swiglu_forward in fp8": into_nonlinearity("swiglu", 6, (False, True)),
    "swiglu_linear_backward in fp8": out_of_nonlinearity("swiglu", (12, 5), (False, True)),
    "linear_forward in fp8": gemms("linear_forward", "linear_residual_forward"),
    "linear_backward in fp8": gemms("linear_backward"),
    "linear_backward in fp8, of some rows": gemms("linear_backward", rows=slice(16, N)),
    "classifier_forward_backward to fp8": classifier,
    "fold_statistics": beside_the_reference("fold_statistics", fold_statistics),
    "update_scaling": beside_the_reference("update_scaling", update_scaling),
}


def check_fp8_kernels(kernels: ModuleType, device: torch.device) -> Iterator[tuple[bool, str]]:
    """(it works, line) for each case."""
    for line, case in FP8_CASES.items():
        yield attempt(line, partial(case, kernels, Fp8Draw(kernels, device)))
