"""The frame of the tests of models in fp8, whatever their architecture: to the bit a model whose products round their
operands and that keeps no fp8 number anywhere, and near one that rounds nothing."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from handgrad.joins.fp8 import reference as fp8_ops
from handgrad.joins.fp8.formats import E4M3, E5M2, GRADIENT_FORMATS
from handgrad.joins.fp8.tables import Fp8Gemms, fp8_gemms
from handgrad.memory.arena import WHOLE_BLOCKS
from handgrad.ops import reference as ops
from tests.conftest import Model, quantized_weights
from tests.test_fp8_numbers import LARGEST, largest_scales, magnitudes, nearest_codes

LAYERS, PARTS = 2, ("qkv", "proj", "mlp")
LEVELS = range(WHOLE_BLOCKS + 1)  # of recomputation
BOTH_OF_THE_HEAD = "forward,dgrad"


def run(model: Model, *, recompute: int = 0) -> tuple[Tensor, Tensor]:
    """(losses, flat gradients) of the sum of the losses."""
    model.forward()
    model.backward(torch.ones(1), recompute)
    return model.act.losses.clone(), model.flat_gradients


def gemms_of(keep_bf16: str = "", head: str = "") -> Fp8Gemms:
    return fp8_gemms(keep_bf16, head, LAYERS, PARTS)


class RoundedProducts:
    """The reference on plain tensors, but a product that is wanted in fp8 rounds its operands to the nearest numbers of
    the format, each tensor at the largest scale that clips nothing."""

    PARTS: ClassVar = {"qkv_weight": "qkv", "proj_weight": "proj", "fc_weight": "mlp", "fcproj_weight": "mlp"}

    def __init__(self, model: Model, gemms: Fp8Gemms, gradients: str):
        self.gemms, self.gradients = gemms, GRADIENT_FORMATS[gradients]
        self.part_of = {
            getattr(block, name).data_ptr(): (layer, part)
            for layer, block in enumerate(model.weights.blocks)
            for name, part in self.PARTS.items()
        }

    def __getattr__(self, operation: str) -> Any:
        return getattr(ops, operation)

    def wants(self, weight: Tensor, product: str) -> bool:
        part = self.part_of.get(weight.data_ptr())
        return product in self.gemms.head if part is None else part in self.gemms.blocks

    def rounded(self, x: Tensor, kind: torch.dtype, scale: Tensor | None = None) -> Tensor:
        """The same numbers in float32, each rounded."""
        scale = largest_scales(x.abs().max().view(1), kind, 0) if scale is None else scale
        values = magnitudes(kind)[nearest_codes(x.double() * scale, kind)]
        return values.copysign(x.double()).div(scale).float()

    def linear_forward(self, out: Tensor, inp: Tensor, weight: Tensor, bias: Tensor | None, **scratch: Tensor) -> None:
        if not self.wants(weight, "forward"):
            ops.linear_forward(out, inp, weight, bias)
            return
        # The head reads its input by chunks, all of them at one scale.
        whole = inp if inp._base is None or self.part_of.get(weight.data_ptr()) else self.lnf
        scale = largest_scales(whole.abs().max().view(1), E4M3, 0)
        left, right = self.rounded(inp, E4M3, scale), self.rounded(weight, E4M3)
        out.copy_(torch.mm(left, right.t()) + (0 if bias is None else bias))

    def layernorm_forward(self, out: Tensor, *others: Tensor) -> None:
        ops.layernorm_forward(out, *others)
        self.lnf = out  # the last one, when the head reads it

    def linear_gelu_forward(self, out: Tensor, hidden: Tensor, *product: Tensor, **scratch: Tensor) -> None:
        self.linear_forward(hidden, *product)
        ops.gelu_forward(out, hidden)

    def linear_residual_forward(self, out: Tensor, residual: Tensor, *product: Tensor, **scratch: Tensor) -> None:
        self.linear_forward(out, *product)
        ops.residual_forward(out, residual, out)

    def linear_backward(
        self, dinp: Tensor, dweight: Tensor, dbias: Tensor | None, dout: Tensor, inp: Tensor, weight: Tensor, **rest: Tensor
    ) -> None:
        if weight.data_ptr() not in self.part_of:  # the head
            left = self.rounded(dout, E5M2, torch.tensor([2.0**15]))
            ops.linear_backward(dinp, None if "wgrad" in self.gemms.head else dweight, None, dout, inp, weight)
            if "dgrad" in self.gemms.head:
                dinp.copy_(torch.mm(left, self.rounded(weight, E4M3)))
            if "wgrad" in self.gemms.head:
                scale = largest_scales(self.lnf.abs().max().view(1), E4M3, 0)
                dweight.add_(torch.mm(left.t(), self.rounded(inp, E4M3, scale)))
        elif self.wants(weight, "dgrad"):
            usual, wide = self.gradients
            scale = largest_scales(dout.abs().max().view(1), usual, 0)
            rows = self.rounded(dout, usual, scale)
            columns = rows if self.part_of[weight.data_ptr()][1] != "qkv" else self.rounded(dout, wide, scale)
            dinp.copy_(torch.mm(rows, self.rounded(weight, E4M3)))
            dweight.add_(torch.mm(columns.t(), self.rounded(inp, E4M3)))
            if dbias is not None:
                dbias.add_(columns.t().contiguous().sum(1))
        else:
            ops.linear_backward(dinp, dweight, dbias, dout, inp, weight)

    def layernorm_linear_forward(self, out: Tensor, *tensors: Tensor, **scratch: Tensor) -> None:
        norm, product = (*tensors[:6],), tensors[6:]
        self.layernorm_forward(*norm)
        self.linear_forward(out, norm[0], *product)

    def layernorm_linear_gelu_forward(self, out: Tensor, hidden: Tensor, *tensors: Tensor, **scratch: Tensor) -> None:
        self.layernorm_forward(*tensors[:6])
        self.linear_gelu_forward(out, hidden, tensors[0], *tensors[6:])

    def gelu_linear_backward(self, dhidden: Tensor, dweight: Tensor, *rest: Tensor, **buffers: Any) -> None:
        dout, inp, hidden, weight = rest
        self.linear_backward(dhidden, dweight, None, dout, inp, weight)
        ops.gelu_backward(dhidden, hidden)

    def rmsnorm_forward(self, out: Tensor, *others: Tensor | None, **epsilon: float) -> None:
        ops.rmsnorm_forward(out, *others, **epsilon)
        self.lnf = out  # the last one, when the head reads it

    def rmsnorm_linear_forward(self, out: Tensor, *tensors: Tensor, scratch: Tensor, **epsilon: float) -> None:
        norm, product = tensors[:4], tensors[4:]
        self.rmsnorm_forward(*norm, **epsilon)
        self.linear_forward(out, norm[0], *product)


class RoundedModernProducts(RoundedProducts):
    def linear_relu2_forward(self, out: Tensor, inp: Tensor, weight: Tensor, **scratch: Tensor) -> None:
        self.linear_forward(out, inp, weight, None)
        ops.relu2_forward(out)

    def rmsnorm_linear_relu2_forward(self, out: Tensor, *tensors: Tensor, **scratch: Tensor) -> None:
        self.rmsnorm_forward(*tensors[:4])
        self.linear_relu2_forward(out, tensors[0], tensors[4])

    def mix_rmsnorm_forward(self, mixed: Tensor | None, *others: Tensor) -> None:
        ops.mix_rmsnorm_forward(mixed, *others)

    def mix_rmsnorm_linear_forward(self, out: Tensor, mixed: Tensor, *others: Tensor, **scratch: Tensor) -> None:
        *norm, weight = others
        self.mix_rmsnorm_forward(mixed, *norm)
        self.linear_forward(out, norm[0], weight, None)

    def relu2_linear_backward(self, dhidden: Tensor, dweight: Tensor, *rest: Tensor, **buffers: Any) -> None:
        dout, inp, weight = rest
        self.linear_backward(dhidden, dweight, None, dout, inp, weight)
        ops.relu2_backward(dhidden, inp)


class RoundedLlamaProducts(RoundedProducts):
    PARTS: ClassVar = {"qkv_weight": "qkv", "proj_weight": "proj", "gate_up_weight": "mlp", "down_weight": "mlp"}

    def linear_swiglu_forward(self, out: Tensor, hidden: Tensor, inp: Tensor, weight: Tensor, **scratch: Tensor) -> None:
        self.linear_forward(hidden, inp, weight, None)
        ops.swiglu_forward(out, hidden)

    def rmsnorm_linear_swiglu_forward(
        self, out: Tensor, hidden: Tensor, *tensors: Tensor, epsilon: float, **scratch: Tensor
    ) -> None:
        self.rmsnorm_forward(*tensors[:4], epsilon=epsilon)
        self.linear_swiglu_forward(out, hidden, tensors[0], tensors[4])

    def swiglu_linear_backward(
        self, dhidden: Tensor, dinp: Tensor, dweight: Tensor, dout: Tensor, inp: Tensor, *rest: Tensor, **scratch: Any
    ) -> None:
        hidden, weight = rest
        self.linear_backward(dinp, dweight, None, dout, inp, weight)
        ops.swiglu_backward(dhidden, dinp, hidden)


SETTINGS = {
    "all": (gemms_of(), "e5m2"),
    "e4m3 gradients": (gemms_of(), "e4m3"),
    "mixed gradients": (gemms_of(), "mixed"),
    "without qkv": (gemms_of("qkv"), "e5m2"),
    "without parts of layers": (gemms_of("0.mlp, 1.proj"), "e5m2"),
    "one part alone": (gemms_of("mlp,qkv,0.proj"), "e5m2"),
    "head forward": (gemms_of("", "forward"), "e5m2"),
    "head dgrad": (gemms_of("", "dgrad"), "e5m2"),
    "head alone": (gemms_of("qkv,proj,mlp", BOTH_OF_THE_HEAD), "e5m2"),
    "all and head": (gemms_of("", BOTH_OF_THE_HEAD), "e4m3"),
    "head with its weight gradient": (gemms_of("", "forward,dgrad,wgrad"), "e4m3"),
    "head backward alone": (gemms_of("qkv,proj,mlp", "dgrad,wgrad"), "e5m2"),
}


# The unit roundoff of a format, which bounds the relative error of every number that is neither clipped nor subnormal.
ROUNDOFF = {E4M3: 2.0**-4, E5M2: 2.0**-3}


def bound(gemms: Fp8Gemms, gradients: str, *, of_each_mlp: float = 0.0) -> float:
    """Of a gradient's relative error. It passes at most every forward product, every input gradient and one weight
    gradient, and each operand brings its roundoff. Errors of different roundings are independent, so they add in squares;
    the residual stream and the layer norms hand an error on about as large as it is. (That an operand's error is taken
    at its largest, 2.6 times the root of its mean square, leaves room for both.)
    `of_each_mlp`: squares that a nonlinearity adds, in roundoffs of e4m3."""
    activation, gradient = ROUNDOFF[E4M3] ** 2, max(ROUNDOFF[kind] for kind in GRADIENT_FORMATS[gradients]) ** 2
    in_blocks = sum({"qkv": 1, "proj": 1, "mlp": 2}[part] for _, part in gemms.blocks)
    squares = in_blocks * (2 * activation + (gradient + activation)) + bool(in_blocks) * (gradient + activation)
    squares += ("forward" in gemms.head) * 2 * activation
    squares += sum(name in gemms.head for name in ("dgrad", "wgrad")) * (ROUNDOFF[E5M2] ** 2 + activation)
    squares += sum(part == "mlp" for _, part in gemms.blocks) * of_each_mlp * activation
    return math.sqrt(squares)


def rounds_its_operands(plain: Model, make: Callable[[int], Model]) -> None:
    """`make` of every recompute level has the bits of `plain`, whose products round."""
    losses, gradients = run(plain)
    for recompute in LEVELS:
        found_losses, found = run(make(recompute), recompute=recompute)
        assert torch.equal(found_losses, losses)
        for row in plain.table:
            assert torch.equal(row.view(found), row.view(gradients)), row.name


def is_as_near_as(admitted: float, exact: Model, rounded: Model) -> None:
    """Both in float32, from weights that bf16 holds: each gradient's relative error."""
    exact.flat.copy_(exact.flat.bfloat16())
    rounded.flat.copy_(exact.flat)
    for form in quantized_weights(rounded).values():
        fp8_ops.quantize(form, form.plain)
    (losses, expected), (found_losses, found) = run(exact), run(rounded)
    for row in exact.table:
        error = ((row.view(found) - row.view(expected)).norm() / row.view(expected).norm()).item()
        if row.elements > 1:  # a single number's terms may cancel
            assert 0 < error <= admitted, f"{row.name}: relative error {error:.3f}, admitted {admitted:.3f}"
    assert ((found_losses - losses).norm() / losses.norm()) <= admitted


def ignores_padding(clean: Model, poisoned: Model, *, recompute: int = 0) -> None:
    """With the largest numbers of the format in the padded rows of the head's matrix, the same bits."""
    V, head = clean.shape.vocab_size, poisoned.weights.head
    assert head.rows is not None and head.columns is not None and head.plain is not None
    assert head.statistics[0, 0] == head.plain[:V].float().abs().max()
    head.rows[V:] = LARGEST[E4M3]
    head.columns[:, V:] = -LARGEST[E4M3]
    for expected, found in zip(run(clean, recompute=recompute), run(poisoned, recompute=recompute), strict=True):
        assert torch.equal(found, expected)
