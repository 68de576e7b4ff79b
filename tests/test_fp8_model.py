"""The model with products in fp8: to the bit one whose products round their operands, and near one that rounds nothing."""

import math
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from handgrad.config import ModelShape
from handgrad.fp8 import reference as fp8_ops
from handgrad.fp8.formats import E4M3, E5M2, GRADIENT_FORMATS
from handgrad.fp8.tables import Fp8Gemms, fp8_gemms
from handgrad.models import gpt2
from handgrad.ops import reference as ops
from handgrad.presets import preset
from handgrad.run.resolve import resolve
from tests.conftest import Model, make_model, quantized_weights
from tests.test_fp8_numbers import LARGEST, bits, largest_scales, magnitudes, nearest_codes

SHAPE = ModelShape(vocab_size=57, sequence_length=16, num_layers=2, num_heads=2, channels=32)
BATCH, LENGTH = 3, 16
BOTH_OF_THE_HEAD = "forward,dgrad"


def run(model: Model, *, recompute: int = 0) -> tuple[Tensor, Tensor]:
    """(losses, flat gradients) of the sum of the losses."""
    model.forward()
    model.backward(torch.ones(1), recompute)
    return model.act.losses.clone(), model.flat_gradients


def gemms_of(keep_bf16: str = "", head: str = "") -> Fp8Gemms:
    return fp8_gemms(keep_bf16, head, SHAPE.num_layers, gpt2.FP8_PARTS)


def make(dtype: torch.dtype, fp8: Fp8Gemms | None = None, gradients: str = "e5m2", *, recompute: int = 0) -> Model:
    settings = {"recompute": recompute, "chunk": 20, "fp8": fp8, "gradients": GRADIENT_FORMATS[gradients]}
    return make_model(SHAPE, BATCH, LENGTH, dtype, **settings)


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


@pytest.mark.parametrize("name", SETTINGS)
def test_the_products_that_are_wanted_and_no_others_round_their_operands(name: str) -> None:
    """At every recompute level, the bits of a model that keeps no fp8 number anywhere."""
    plain = make(torch.bfloat16)
    plain.ops = RoundedProducts(plain, *SETTINGS[name])
    losses, gradients = run(plain)
    for recompute in (0, 1, 2, 3):
        found_losses, found = run(make(torch.bfloat16, *SETTINGS[name], recompute=recompute), recompute=recompute)
        assert torch.equal(found_losses, losses)
        for row in plain.table:
            assert torch.equal(row.view(found), row.view(gradients)), row.name


# The unit roundoff of a format, which bounds the relative error of every number that is neither clipped nor subnormal.
ROUNDOFF = {E4M3: 2.0**-4, E5M2: 2.0**-3}


def bound(gemms: Fp8Gemms, gradients: str) -> float:
    """Of a gradient's relative error. It passes at most every forward product, every input gradient and one weight
    gradient, and each operand brings its roundoff. Errors of different roundings are independent, so they add in squares;
    the residual stream and the layer norms hand an error on about as large as it is. (That an operand's error is taken
    at its largest, 2.6 times the root of its mean square, leaves room for both.)"""
    activation, gradient = ROUNDOFF[E4M3] ** 2, max(ROUNDOFF[kind] for kind in GRADIENT_FORMATS[gradients]) ** 2
    in_blocks = sum({"qkv": 1, "proj": 1, "mlp": 2}[part] for _, part in gemms.blocks)
    squares = in_blocks * (2 * activation + (gradient + activation)) + bool(in_blocks) * (gradient + activation)
    squares += ("forward" in gemms.head) * 2 * activation
    squares += sum(name in gemms.head for name in ("dgrad", "wgrad")) * (ROUNDOFF[E5M2] ** 2 + activation)
    return math.sqrt(squares)


@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_are_as_near_as_the_formats_admit(name: str) -> None:
    admitted = bound(*SETTINGS[name])
    exact = make(torch.float32)
    exact.flat.copy_(exact.flat.bfloat16())
    rounded = make(torch.float32, *SETTINGS[name])
    rounded.flat.copy_(exact.flat)
    for form in quantized_weights(rounded).values():
        fp8_ops.quantize(form, form.plain)
    (losses, expected), (found_losses, found) = run(exact), run(rounded)
    for row in exact.table:
        error = ((row.view(found) - row.view(expected)).norm() / row.view(expected).norm()).item()
        assert 0 < error <= admitted, f"{row.name}: relative error {error:.3f}, admitted {admitted:.3f}"
    assert ((found_losses - losses).norm() / losses.norm()) <= admitted


@pytest.mark.parametrize("recompute", [0, 2])
def test_the_padded_vocabulary_touches_nothing(recompute: int) -> None:
    """With the largest numbers of the format in the padded rows of the embedding, the same bits and the same statistics:
    no amax has seen a padded number, nor any gradient."""
    V, gemms = SHAPE.vocab_size, gemms_of("", BOTH_OF_THE_HEAD)
    clean, poisoned = (make(torch.bfloat16, gemms, recompute=recompute) for _ in range(2))
    wte = quantized_weights(poisoned)["wte"]
    assert wte.rows is not None and wte.columns is not None and wte.plain is not None
    assert wte.statistics[0, 0] == wte.plain[:V].float().abs().max()
    wte.rows[V:] = LARGEST[E4M3]
    wte.columns[:, V:] = -LARGEST[E4M3]
    for expected, found in zip(run(clean, recompute=recompute), run(poisoned, recompute=recompute), strict=True):
        assert torch.equal(found, expected)
    for name in ("fp8.statistics", "fp8.scaling"):
        assert torch.isfinite(clean.views[name][:-1]).all() and torch.equal(
            clean.views[name][:-1], poisoned.views[name][:-1]
        )
    assert (clean.table[0].view(clean.flat_gradients)[V:] == 0).all(), "padded rows have no gradient"


def test_a_tensor_has_the_forms_that_are_read_and_no_others() -> None:
    """In a layer that keeps a part in bf16, its tensors are plain ones; elsewhere a gradient has no 16-bit form."""
    model = make(torch.bfloat16, gemms_of("0.qkv", "dgrad"))
    first, second = model.act.blocks
    assert isinstance(first.ln1, Tensor) and isinstance(model.weights.blocks[0].qkv_weight, Tensor)
    assert not isinstance(second.ln1, Tensor) and second.ln1.plain is None
    gradients = [block.dqkv for block in model.d.blocks]
    assert isinstance(gradients[0], Tensor) and not isinstance(gradients[1], Tensor) and gradients[1].plain is None
    head = quantized_weights(model)["wte"]
    assert head.rows is None and head.columns is not None, "its forward stays in 16 bits"
    other = quantized_weights(make(torch.bfloat16, gemms_of("", "forward")))["wte"]
    assert other.rows is not None and other.columns is None
    for name, weight in quantized_weights(model).items():
        if name != "wte":
            assert torch.equal(bits(weight.columns), bits(weight.rows).t()), name


@pytest.mark.parametrize("gradients", GRADIENT_FORMATS)
def test_a_run_in_fp8_takes_less_memory(gradients: str) -> None:
    """GPT-2 124M as its recipe trains it. The two fp8 forms of the weights cost what bf16 weights take once more."""

    def sizes(**settings: str) -> dict[str, int]:
        return resolve(replace(preset("d12"), device="cpu", **settings), 50257).plan.size_bytes

    bf16, fp8 = sizes(precision="bf16"), sizes(precision="fp8", fp8_gradients=gradients)
    N, C, L = 64 * 1024, 768, 12
    assert fp8["fp8 weights"] == 2 * L * 12 * C * C
    assert fp8["fp8 scales"] < 1 << 20
    # 23 instead of 32 bytes per layer and token and channel are kept.
    assert abs(bf16["activations"] - fp8["activations"] - 9 * N * C * L) < 0.15 * 9 * N * C * L
    assert sum(fp8.values()) < sum(bf16.values())
