"""The GEMMs of a block and of the loss head in fp8 beside bf16: operands, launches and errors."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.fp8_kernels import GRADIENT, NORMAL, WEIGHT_DEVIATION, Making, Step
from handgrad.joins.fp8.cuda import linear
from handgrad.joins.fp8.formats import E4M3, E5M2, Form, Operands, Quantized, fp8_operands
from handgrad.tools.kernel_checks.checking import relative_error
from handgrad.tools.kernel_checks.fp8 import FP8_SUMS

FORWARD, DGRAD, WGRAD = "forward", "dgrad", "wgrad"

# Layer: its outputs and inputs in units of C (0: the padded vocabulary), True if it adds the residual stream, and the GEMMs
# that may run in fp8.
LAYERS: dict[str, tuple[int, int, bool, tuple[str, ...]]] = {
    "qkv": (3, 1, False, (FORWARD, DGRAD, WGRAD)),
    "proj": (1, 1, True, (FORWARD, DGRAD, WGRAD)),
    "fc": (4, 1, False, (FORWARD, DGRAD, WGRAD)),
    "fcproj": (1, 4, True, (FORWARD, DGRAD, WGRAD)),
    "head": (0, 1, False, (FORWARD, DGRAD, WGRAD)),
}

# Rows of a result that are also computed in float64.
CHECKED_ROWS = {FORWARD: 2048, DGRAD: 2048, WGRAD: 512}

# The largest error of quantising: e5m2 rounds by 2^-3 at most, about 0.05 in the mean, e4m3 by half of that.
LARGEST_COST = 0.1


@dataclass
class Variant:
    """An fp8 GEMM: as shipped, and its operands for the other kind of sums."""

    gradients: str  # format of the output gradient; "" in the forward
    step: Step
    operands: Operands


@dataclass
class Product:
    """out (M, N) = left (M, K) right (N, K)^T, where left and right are in 16 bits; a wgrad adds to out."""

    direction: str
    out: Tensor
    left: Tensor
    right: Tensor
    plain: Step
    variants: list[Variant]
    bias: Tensor | None
    added: Tensor | None
    scratch: Tensor

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N, K."""
        return self.left.shape[0], self.right.shape[0], self.left.shape[1]

    def with_sums(self, variant: Variant, fast_sums: bool) -> None:
        added = {"bias": self.bias, "added": self.added}
        linear.fp8_gemm(self.out, variant.operands, **added, fast_sums=fast_sums, scratch=self.scratch)


def make(m: Making, layer: str, direction: str) -> Product:
    """Inputs are normal, weights small, output gradients heavy-tailed. Bias and residual stream are zero: the errors are
    those of the product."""
    outputs, inputs, residual, _ = LAYERS[layer]
    rows, O, I = m.size.chunk if layer == "head" else m.N, outputs * m.C or m.Vp, inputs * m.C
    inp, weight = m.normal(rows, I), m.normal(O, I, deviation=WEIGHT_DEVIATION)
    inp8, weight8, scratch = m.operand(inp, E4M3), m.operand(weight, E4M3), m.scratch
    if direction == FORWARD:
        out, stream = m.empty(rows, O), torch.zeros(rows, O, device=m.device, dtype=m.dtype) if residual else None
        bias = None if layer == "head" else torch.zeros(O, device=m.device, dtype=m.dtype)

        def forward(x: Form, w: Form) -> None:
            if stream is None:
                linear.linear_forward(out, x, w, bias, scratch=scratch)
            else:
                assert bias is not None
                linear.linear_residual_forward(out, stream, x, w, bias, scratch=scratch)

        operands = operands_of(inp8, "rows", weight8, "rows")
        shipped = Variant("", lambda: forward(inp8, weight8), operands)
        return Product(direction, out, inp, weight, lambda: forward(inp, weight), [shipped], bias, stream, scratch)

    dout = m.gradient(rows, O)
    if direction == DGRAD:
        out, added, form, other = m.empty(rows, I), None, "rows", weight8
        left, right, backward, second = dout, weight.t(), linear.input_backward, weight
    else:
        out, form, other = m.zeros(O, I), "columns", inp8
        left, right, backward, second, added = dout.t(), inp.t(), linear.weight_backward, inp, out
    variants = []
    for name, number_format in (("e5m2", E5M2), ("e4m3", E4M3)):
        dout8 = m.operand(dout, number_format)
        step = partial(backward, out, dout8, other, scratch=scratch)
        variants.append(Variant(name, step, operands_of(dout8, form, other, "columns")))
    plain = partial(backward, out, dout, second, scratch=scratch)
    return Product(direction, out, left, right, plain, variants, None, added, scratch)


def operands_of(left: Quantized, left_form: str, right: Quantized, right_form: str) -> Operands:
    operands = fp8_operands(left, left_form, right, right_form)
    assert operands is not None
    return operands


def result(product: Product, step: Step) -> Tensor:
    """The whole result of one launch."""
    product.out.zero_()
    step()
    return product.out.clone()


def rows_in_float64(tensor: Tensor, rows: Tensor) -> Tensor:
    """Some rows of a tensor, which may be in fp8."""
    if tensor.itemsize == 1:
        return tensor.view(torch.uint8)[rows].view(tensor.dtype).double()
    return tensor[rows].double()


@dataclass
class Exact:
    """Some rows of the product of the operands in 16 bits, in float64, and the error of the bf16 GEMM there."""

    rows: Tensor
    result: Tensor
    bf16_error: float


def exact(product: Product) -> Exact:
    M = product.sizes[0]
    rows = torch.randperm(M, device=product.out.device)[: CHECKED_ROWS[product.direction]]
    right = rows_in_float64(product.left, rows) @ product.right.double().t()
    return Exact(rows, right, relative_error(result(product, product.plain)[rows], right))


def errors(product: Product, variant: Variant, right: Exact) -> dict[str, Any]:
    """Relative errors of the Frobenius norm: `sums_error` and `other_sums_error`, of the result with the shipped and with
    the other kind of sums, from the exact product of the fp8 operands themselves; `error` and `bf16_error`, of the fp8 and
    of the bf16 result, from that of the operands in 16 bits. `failed`: the errors beyond their limits."""
    fast = linear.has_fast_sums(product.out, product.sizes[2])
    a, b, (a_inverse, b_inverse) = variant.operands
    own = rows_in_float64(a, right.rows) @ b.double().t() * (a_inverse.double() * b_inverse.double())
    shipped = result(product, variant.step)
    same = torch.equal(shipped, result(product, lambda: product.with_sums(variant, fast)))
    other = result(product, lambda: product.with_sums(variant, not fast))
    sums_error, error = relative_error(shipped[right.rows], own), relative_error(shipped[right.rows], right.result)
    largest = torch.finfo(product.out.dtype).eps / 2 + FP8_SUMS
    failed = {
        f"as shipped is not the product with fast_sums={fast}": not same,
        f"sums off by {sums_error:.1e}": not sums_error <= largest,
        f"fp8 off by {error:.1e}": not error <= LARGEST_COST,
        f"bf16 off by {right.bf16_error:.1e}": not right.bf16_error <= largest,
    }
    return {
        "sums_error": sums_error,
        "other_sums_error": relative_error(other[right.rows], own),
        "error": error,
        "bf16_error": right.bf16_error,
        "failed": [text for text, is_so in failed.items() if is_so],
    }


# One launch in bf16, two in fp8.


def fc_with_gelu(m: Making) -> tuple[Step, Step]:
    """(in 16 bits, in fp8)."""
    inp, weight, bias = m.normal(m.N, m.C), m.normal(m.F, m.C, deviation=WEIGHT_DEVIATION), m.normal(m.F)
    inp8, weight8, hidden, out = m.operand(inp, E4M3), m.operand(weight, E4M3), m.empty(m.N, m.F), m.empty(m.N, m.F)
    out8 = replace(m.quantized((m.N, m.F), E4M3, NORMAL), columns=None)
    return (
        lambda: linear.linear_gelu_forward(out, hidden, inp, weight, bias, scratch=m.scratch),
        lambda: linear.linear_gelu_forward(out8, hidden, inp8, weight8, bias, scratch=m.scratch),
    )


def fcproj_backward_with_gelu(m: Making) -> tuple[Step, Step]:
    """Both gradients of fcproj, and the one before the GELU: (in 16 bits, in fp8)."""
    hidden, dout, weight = m.normal(m.N, m.F), m.gradient(m.N, m.C), m.normal(m.C, m.F, deviation=WEIGHT_DEVIATION)
    gelu, dhidden, dweight = m.normal(m.N, m.F), m.empty(m.N, m.F), m.zeros(m.C, m.F)
    dout8, weight8 = m.operand(dout, E5M2), m.operand(weight, E4M3)
    gelu8 = replace(m.quantized((m.N, m.F), E4M3, NORMAL), rows=None)
    dhidden8 = replace(m.quantized((m.N, m.F), E5M2, GRADIENT), workspace=m.empty(m.N, m.F))

    def step(dhidden: Form, dout: Form, inp: Form, weight: Form) -> None:
        linear.gelu_linear_backward(dhidden, dweight, dout, inp, hidden, weight, scratch=m.scratch)

    return lambda: step(dhidden, dout, gelu, weight), lambda: step(dhidden8, dout8, gelu8, weight8)


JOINED: dict[str, Callable[[Making], tuple[Step, Step]]] = {
    "fc with GELU, forward": fc_with_gelu,
    "fcproj with GELU', backward": fcproj_backward_with_gelu,
}
