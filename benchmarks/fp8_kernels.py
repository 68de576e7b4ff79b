"""The kernels that make fp8 numbers as cases to be timed: one launch, what it moves, its 16-bit counterpart."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.fp8_bytes import ROWS
from handgrad.joins.fp8 import cuda as kernels, reference
from handgrad.joins.fp8.cuda import activations
from handgrad.joins.fp8.formats import E4M3, E5M2, INVERSE, SCALE, SCALING_PLACES, STATISTICS_PLACES, Form, Quantized
from handgrad.joins.fp8.sizes import NONLINEARITY_ELEMENTS, QUADS_TILE, attention_parts, tiles
from handgrad.models import head_chunk_tokens
from handgrad.ops.sizes import backward_tile, cdiv, forward_tile
from handgrad.settings.config import ModelShape

Step = Callable[[], None]

# Exponents of scales that admit these random numbers: normal ones, weights, gradients of normal logits.
NORMAL, WEIGHT, GRADIENT, LOGITS = 4, 11, 11, 15
WEIGHT_DEVIATION = 0.02

QUANTIZED_TENSORS = 8  # per block, without the weights: what one call of fold_statistics folds


@dataclass(frozen=True)
class Size:
    """A model and its micro-batch."""

    name: str
    shape: ModelShape
    batch: int
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16

    @property
    def tokens(self) -> int:
        return self.batch * self.shape.sequence_length

    @property
    def chunk(self) -> int:
        """Tokens of a chunk of the loss head."""
        return head_chunk_tokens(0, self.tokens, self.shape.padded_vocab_size, self.dtype)


@dataclass
class Case:
    """A kernel at one size. `moved` are the tensors that it reads and writes, one twice if it is both or read twice.
    `pairs` are (result, approximate expectation) after one launch of both kinds."""

    fp8: Step
    moved: Sequence[Tensor]
    pairs: Sequence[tuple[Form, Tensor]]
    plain: Step | None = None
    counts: Quantized | None = None  # whose clipped and vanished numbers are counted in some steps

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.moved)

    def units(self, size: Size) -> float:
        """The tensors (N, C) and larger in units of C bytes per token."""
        unit_bytes = size.tokens * size.shape.channels
        return sum(tensor.nbytes for tensor in self.moved if tensor.numel() >= unit_bytes) / unit_bytes


class Making:
    """Makes tensors for a size."""

    def __init__(self, size: Size):
        shape = size.shape
        self.size, self.device, self.dtype = size, torch.device(size.device), size.dtype
        self.B, self.T, self.H, self.C, self.F = (
            *(size.batch, shape.sequence_length, shape.num_heads),
            *(shape.channels, shape.feed_forward),
        )
        self.N, self.V, self.Vp = size.tokens, shape.vocab_size, shape.padded_vocab_size
        self.heads = heads = {"batch": self.B, "length": self.T, "num_heads": self.H, "head_width": self.C // self.H}
        sizes = {"channels": self.C, "widest": self.F}
        self.parts = kernels.statistics_parts(**heads, **sizes, feed_forward=self.F, padded_vocab_size=self.Vp)
        self.scratch = self.empty(kernels.scratch_bytes(tokens=self.N, **sizes), dtype=torch.uint8)
        needed = kernels.attention_scratch_bytes(dtype=self.dtype, **heads)
        self.attention_scratch = self.empty(needed, dtype=torch.uint8)

    def normal(self, *shape: int, deviation: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=self.device) * deviation).to(self.dtype)

    def gradient(self, *shape: int) -> Tensor:
        """Heavy-tailed: a normal number times the exponential of another."""
        found = torch.randn(*shape, device=self.device)
        return found.mul_(torch.randn(*shape, device=self.device).exp_()).to(self.dtype)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(*shape, dtype=dtype or self.dtype, device=self.device)

    def zeros(self, *shape: int) -> Tensor:
        """Of accumulators and statistics."""
        return torch.zeros(*shape, device=self.device)

    def quantized(self, shape: tuple[int, int], form: torch.dtype, exponent: int, plain: Tensor | None = None) -> Quantized:
        """Both forms, for numbers at a scale of 2^exponent."""
        scaling = self.zeros(SCALING_PLACES)
        scaling[SCALE], scaling[INVERSE] = 2.0**exponent, 2.0**-exponent
        rows, columns = self.empty(*shape, dtype=form), self.empty(*shape[::-1], dtype=form)
        return Quantized(rows, columns, scaling, self.zeros(STATISTICS_PLACES, self.parts), plain)

    def operand(self, tensor: Tensor, form: torch.dtype) -> Quantized:
        """A tensor in fp8, at the scale for its own largest number."""
        made = replace(self.quantized((tensor.shape[0], tensor.shape[1]), form, 0), current=True)
        kernels.quantize(made, tensor)
        return made


def written(tensor: Quantized, parts: int) -> list[Tensor]:
    forms = [form for form in (tensor.rows, tensor.columns) if form is not None]
    return [*forms, tensor.statistics[:, :parts]]


def rows_of(tensor: Quantized) -> Tensor:
    assert tensor.rows is not None
    return tensor.rows


def layernorm_forward(m: Making) -> Case:
    inp, out16, weight, bias = m.normal(m.N, m.C), m.empty(m.N, m.C), m.normal(m.C), m.normal(m.C)
    mean, rstd, out = m.zeros(m.N), m.zeros(m.N), m.quantized((m.N, m.C), E4M3, NORMAL)
    inputs = mean, rstd, inp, weight, bias
    return Case(
        lambda: kernels.layernorm_forward(out, *inputs),
        [*inputs, *written(out, cdiv(m.N, forward_tile(m.C)[1])), rows_of(out)],
        [(out, out16)],
        lambda: kernels.layernorm_forward(out16, *inputs),
        counts=out,
    )


def layernorm_backward(m: Making) -> Case:
    stream, stream16, dout, inp = (m.normal(m.N, m.C) for _ in range(4))
    mean, rstd, weight = m.zeros(m.N), m.zeros(m.N) + 1, m.normal(m.C)
    sums = m.zeros(m.C), m.zeros(m.C), m.zeros(m.C)
    out = m.quantized((m.N, m.C), E5M2, GRADIENT, plain=stream)

    def step(form: Form) -> None:
        inputs = dout, inp, mean, rstd, weight
        kernels.layernorm_backward(form, *sums[:2], *inputs, sums[2], scratch=m.scratch)

    once = dout, inp, mean, rstd, weight
    moved = [*once, stream, stream, *sums, *sums, *written(out, backward_tile(m.N, m.C, 2)[0]), rows_of(out)]
    return Case(lambda: step(out), moved, [(out, stream)], lambda: step(stream16), counts=out)


def attention_forward(m: Making) -> Case:
    qkv, out16, lse = m.normal(m.N, 3 * m.C), m.empty(m.N, m.C), m.zeros(m.B, m.H, m.T)
    kept = m.empty(m.N, m.C)
    out = m.quantized((m.N, m.C), E4M3, NORMAL, plain=kept)
    moved = [qkv, kept, lse, *written(out, attention_parts("forward", **m.heads))]
    return Case(
        lambda: kernels.attention_forward(out, lse, qkv, scratch=m.scratch),
        moved,
        [(out, out16), (out, kept)],
        lambda: kernels.attention_forward(out16, lse, qkv, scratch=m.scratch),
        counts=out,
    )


def attention_backward(m: Making) -> Case:
    qkv, dout, out, lse = m.normal(m.N, 3 * m.C), m.normal(m.N, m.C), m.empty(m.N, m.C), m.zeros(m.B, m.H, m.T)
    kernels.attention_forward(out, lse, qkv, scratch=m.scratch)
    dqkv16, dqkv = m.empty(m.N, 3 * m.C), m.quantized((m.N, 3 * m.C), E5M2, GRADIENT)
    inputs, scratch = (dout, out, lse, qkv), m.attention_scratch
    return Case(
        lambda: kernels.attention_backward(dqkv, *inputs, scratch=scratch),
        [*inputs, *written(dqkv, attention_parts("dq", "dkdv", **m.heads))],
        [(dqkv, dqkv16)],
        lambda: kernels.attention_backward(dqkv16, *inputs, scratch=scratch),
        counts=dqkv,
    )


def gelu_forward(m: Making) -> Case:
    hidden, out16 = m.normal(m.N, m.F), m.empty(m.N, m.F)
    out = replace(m.quantized((m.N, m.F), E4M3, NORMAL), columns=None)
    return Case(
        lambda: activations.gelu_forward_fp8(out, hidden),
        [hidden, *written(out, cdiv(m.N * m.F, NONLINEARITY_ELEMENTS))],
        [(out, out16)],
        lambda: kernels.gelu_forward(out16, hidden),
        counts=out,
    )


def gelu_backward(m: Making) -> Case:
    hidden, dgelu, gelu16 = m.normal(m.N, m.F), m.normal(m.N, m.F), m.empty(m.N, m.F)
    kernels.gelu_forward(gelu16, hidden)
    dhidden16 = dgelu.clone()
    dhidden = m.quantized((m.N, m.F), E5M2, GRADIENT)
    gelu = replace(m.quantized((m.N, m.F), E4M3, NORMAL), rows=None)
    return Case(
        lambda: activations.gelu_backward_fp8(dhidden, gelu, dgelu, hidden),
        [dgelu, hidden, *written(dhidden, tiles(m.N, m.F, QUADS_TILE)), *written(gelu, 0)],
        [(dhidden, dhidden16), (gelu, gelu16)],
        lambda: kernels.gelu_backward(dhidden16, hidden),  # in place
        counts=dhidden,
    )


def bias_backward(m: Making, width: int) -> Case:
    dout, sums, sums16 = m.normal(m.N, width), m.zeros(width), m.zeros(width)
    form = m.operand(dout, E5M2)
    assert form.columns is not None
    return Case(
        lambda: kernels.bias_backward(sums, form, scratch=m.scratch),
        [form.columns, sums, sums],
        [(sums, sums16)],
        lambda: kernels.bias_backward(sums16, dout, scratch=m.scratch),
    )


def classifier(m: Making) -> Case:
    """A chunk of the loss head, whose input gradient is in fp8."""
    rows, one = m.size.chunk, m.zeros(1) + 1
    logits, logits16, losses = m.normal(rows, m.Vp), m.normal(rows, m.Vp), m.zeros(rows)
    targets = torch.randint(m.V, (rows,), device=m.device)
    out = replace(m.quantized((rows, m.Vp), E5M2, LOGITS, plain=logits), columns=None)
    step = kernels.classifier_forward_backward
    return Case(
        lambda: step(losses, out, targets, one, vocab_size=m.V),
        [logits, logits, targets, losses, rows_of(out)],
        [(out, logits)],
        lambda: step(losses, logits16, targets, one, vocab_size=m.V),
    )


def quantize_weight(m: Making) -> Case:
    weight = m.normal(m.F, m.C, deviation=WEIGHT_DEVIATION)
    out = m.quantized((m.F, m.C), E4M3, WEIGHT)
    moved = [weight, *written(out, m.parts)]  # the parts that it does not use become zero
    return Case(lambda: kernels.quantize(out, weight), moved, [(out, weight)], counts=out)


def fold_statistics(m: Making) -> Case:
    """Of all activations and gradients of a micro-step."""
    statistics = torch.rand(QUANTIZED_TENSORS * m.size.shape.num_layers, STATISTICS_PLACES, m.parts, device=m.device)
    totals, right = (
        torch.zeros(len(statistics), STATISTICS_PLACES, device=m.device, dtype=torch.float64) for _ in range(2)
    )
    reference.fold_statistics(right, statistics)
    return Case(lambda: kernels.fold_statistics(totals, statistics), [totals, totals, statistics], [(totals, right)])


# Name: its maker, and its operations in the byte table.
CASES: dict[str, tuple[Callable[[Making], Case], tuple[str, ...]]] = {
    "layernorm_forward": (layernorm_forward, ("layer norm 1", "layer norm 1, transposed")),
    "layernorm_backward": (layernorm_backward, ("layer norm 2'", "layer norm 2', transposed")),
    "attention_forward": (attention_forward, ("attention",)),
    "attention_backward": (attention_backward, ("attention'",)),
    "gelu_forward": (gelu_forward, ("GELU",)),
    "gelu_backward": (gelu_backward, ("GELU'",)),
    "bias sums of q, k, v": (lambda m: bias_backward(m, 3 * m.C), ("qkv bias",)),
    "bias sums of fc": (lambda m: bias_backward(m, m.F), ("fc bias",)),
    "classifier, a chunk": (classifier, ()),
    "quantize weight (4C, C)": (quantize_weight, ()),
    "fold_statistics": (fold_statistics, ()),
}


def check_units(case: Case, operations: tuple[str, ...], size: Size) -> None:
    """Checks that a case moves the tensors that the byte table counts."""
    if operations:
        counted = sum(sum(row.fp8_units) for row in ROWS if row.name in operations)
        found = case.units(size)
        assert found == counted, f"moves {found:g} C bytes per token, the byte table says {counted}"


def numbers(form: Form) -> Tensor:
    """The values of a tensor, (N, C); its two forms must agree."""
    if isinstance(form, Tensor):
        return form.float()
    if form.rows is None:
        assert form.columns is not None
        return form.columns.t().float() * form.inverse_scale
    if form.columns is not None:
        assert torch.equal(form.columns.view(torch.uint8).t(), form.rows.view(torch.uint8)), "columns are not the rows'"
    return form.rows.float() * form.inverse_scale


def compile_all(sizes: Sequence[Size]) -> dict[str, float]:
    """Compiles all Triton kernels at once, instead of each at its first launch."""
    started = time.monotonic()

    def launch_all(size: Size) -> None:
        making = Making(size)
        for form in (E4M3, E5M2):
            making.operand(making.normal(64, 64), form)
        for make, _ in CASES.values():
            case = make(making)
            case.fp8()
            if case.plain is not None:
                case.plain()

    kernels.compile_ahead(*(lambda size=size: launch_all(size) for size in sizes))
    return {"seconds": time.monotonic() - started}
