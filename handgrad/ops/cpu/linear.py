"""GEMMs with weights, float32 ones by the faster of torch's two libraries: MKL on an Intel CPU, else oneDNN. Also their
activations: GELU by torch's kernels, squared ReLU and gates in few passes over memory."""

from collections.abc import Callable

import torch
from torch import Tensor

from handgrad.machine import processor
from handgrad.machine.devices import accumulation_dtype
from handgrad.ops import compose, reference
from handgrad.ops.reference.activations import gates

aten = torch.ops.aten

# Rows of a weight gradient per GEMM, if the GEMM itself cannot add to the accumulator: a temporary of 1024 rows stays in
# the last-level cache, and the GEMM is as fast as over all rows at once.
ACCUMULATE_ROWS = 1024

# On Intel CPUs torch's default GEMMs, by MKL, are as fast as oneDNN's, and they write and accumulate in place.
MKL_IS_AS_FAST = torch.backends.mkl.is_available() and processor.is_intel()
# The exception is generation: its few rows cost a pass over the weight, and MKL is slower there in the mode whose sums do
# not depend on the number of threads (benchmarks/results/cpu-intel-few-rows.json).
FEW_ROWS, LARGE_WEIGHT_ELEMENTS = 8 if torch.backends.mkldnn.is_available() else 0, 1 << 20


def gemm(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """left (M, K) right (N, K)^T + bias (N), by oneDNN. In float32 it runs at 293 to 440 GFLOP/s on two AMD cores with
    AVX-512, where the BLAS behind `torch.mm` runs at 190; it can neither accumulate nor write to an out= tensor."""
    return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")


def prefers_onednn(tensor: Tensor) -> bool:
    """True for float32 if this torch has oneDNN. In bf16 `torch.mm` calls oneDNN itself; oneDNN has no float64."""
    return not MKL_IS_AS_FAST and tensor.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def linear_forward(out: Tensor, inp: Tensor, weight: Tensor, bias: Tensor | None, *, scratch: Tensor | None = None) -> None:
    is_pass_over_weight = inp.shape[0] <= FEW_ROWS and weight.numel() >= LARGE_WEIGHT_ELEMENTS
    if prefers_onednn(inp) or (is_pass_over_weight and inp.dtype == torch.float32):
        out.copy_(gemm(inp, weight, bias))
    else:
        reference.linear_forward(out, inp, weight, bias)


def linear_backward(
    dinp: Tensor,
    dweight_acc: Tensor | None,
    dbias_acc: Tensor | None,
    dout: Tensor,
    inp: Tensor,
    weight: Tensor,
    *,
    scratch: Tensor | None = None,
) -> None:
    if prefers_onednn(dout):
        dinp.copy_(gemm(dout, weight.t()))
    else:
        torch.mm(dout, weight, out=dinp)
    if dweight_acc is not None:
        weight_backward(dweight_acc, dout, inp)
    if dbias_acc is not None:
        reference.bias_backward(dbias_acc, dout)


def weight_backward(dweight_acc: Tensor, dout: Tensor, inp: Tensor) -> None:
    """Adds to dweight_acc: in place if the GEMM can accumulate, else by blocks of rows whose temporary stays in cache."""
    onednn = prefers_onednn(inp)
    if dweight_acc.dtype == inp.dtype and not onednn:
        dweight_acc.addmm_(dout.t(), inp)
        return
    for row in range(0, dweight_acc.shape[0], ACCUMULATE_ROWS):
        rows = slice(row, row + ACCUMULATE_ROWS)
        left = dout[:, rows].t()
        dweight_acc[rows].add_(gemm(left, inp.t()) if onednn else torch.mm(left, inp))


def linear_residual_forward(
    out: Tensor, residual: Tensor, inp: Tensor, weight: Tensor, bias: Tensor | None, *, scratch: Tensor | None = None
) -> None:
    linear_forward(out, inp, weight, bias)
    out.add_(residual)


# The bits of an elementwise operation must not depend on the number of threads. torch gives each thread an equal range of a
# tensor and computes the last few elements of a range one by one, where some functions (GELU, sigmoid) round differently
# than in a vector. `by_whole_vectors` makes every range but the last a multiple of the vector length.

GRAIN_ELEMENTS = 32768  # the smallest range that torch gives a thread: at::internal::GRAIN_SIZE
VECTOR_ELEMENTS = 64  # a multiple of every vector length in torch's loops: two AVX-512 registers of 16-bit numbers


def by_whole_vectors(operation: Callable[..., object], *tensors: Tensor) -> None:
    """Calls the elementwise `operation` on contiguous tensors of one size: once if the threads' ranges are whole vectors
    anyway, else on the leading elements that divide into whole vectors, then on the rest."""
    elements = tensors[0].numel()
    whole = whole_vectors(elements, torch.get_num_threads())
    flat = [tensor.view(-1) for tensor in tensors]
    for stretch in (slice(0, whole), slice(whole, elements)):
        if stretch.start < stretch.stop:
            operation(*(tensor[stretch] for tensor in flat))


def whole_vectors(elements: int, threads: int) -> int:
    """The number of leading elements that torch cuts into equal ranges of whole vectors."""
    for used in range(min(threads, -(-elements // GRAIN_ELEMENTS)), 1, -1):
        whole = elements - elements % (used * VECTOR_ELEMENTS)
        if -(-whole // GRAIN_ELEMENTS) >= used:  # torch still uses this many threads for them
            return whole
    return elements


def gelu_forward(out: Tensor, inp: Tensor) -> None:
    by_whole_vectors(lambda y, x: aten.gelu.out(x, approximate="tanh", out=y), out, inp)


def gelu_backward(dhidden_inout: Tensor, inp: Tensor) -> None:
    backward = aten.gelu_backward.grad_input
    by_whole_vectors(lambda dy, x: backward(dy, x, approximate="tanh", grad_input=dy), dhidden_inout, inp)


def silu_forward(out: Tensor, inp: Tensor) -> None:
    torch.mul(inp, sigmoid(inp), out=out)


def silu_backward(dhidden_inout: Tensor, inp: Tensor) -> None:
    s = sigmoid(inp)
    dhidden_inout.mul_(torch.addcmul(s, inp, s).addcmul_(inp * s, s, value=-1))  # s (1 + x (1 - s)) = s + x s - x s s


def relu2_forward(hidden_inout: Tensor) -> None:
    """In 16 bits max(x, 0) is exact, and the square is rounded once."""
    hidden_inout.clamp_(min=0)
    hidden_inout.mul_(hidden_inout)


def relu2_backward(dhidden_inout: Tensor, out: Tensor) -> None:
    """2 sqrt(y) = y / sqrt(y / 4): there are many zeros, at which torch's square root is slow and its reciprocal root is
    not. The smallest normal number replaces zero to avoid 0 / 0."""
    y = out.to(accumulation_dtype(out.dtype))
    slope = (y * 0.25).clamp_(min=torch.finfo(y.dtype).tiny).rsqrt_().mul_(y)
    dhidden_inout.mul_(slope)


def swiglu_forward(out: Tensor, hidden: Tensor) -> None:
    g, u = gates(hidden)
    y = sigmoid(g).mul_(g)
    torch.mul(y, u, out=y if out.dtype != y.dtype else out)
    if out.dtype != y.dtype:
        out.copy_(y)


def swiglu_backward(dhidden: Tensor, dout: Tensor, hidden: Tensor) -> None:
    g, u = gates(hidden)
    dy, s = dout.to(g.dtype), sigmoid(g)
    dg, du = dhidden.chunk(2, dim=1)
    silu = g * s
    slope = torch.addcmul(s, silu, s, value=-1).add_(silu)  # s (1 + g (1 - s)) = s - g s s + g s
    dg.copy_(slope.mul_(u).mul_(dy))
    du.copy_(silu.mul_(dy))


def geglu_forward(out: Tensor, hidden: Tensor) -> None:
    g, u = gates(hidden)
    out.copy_(gelu(g).mul_(u))


def geglu_backward(dhidden: Tensor, dout: Tensor, hidden: Tensor) -> None:
    g, u = gates(hidden)
    dy, (dg, du) = dout.to(g.dtype), dhidden.chunk(2, dim=1)
    before = dy * u
    gelu_backward(before, g.contiguous())
    dg.copy_(before)
    du.copy_(gelu(g).mul_(dy))


def gelu(gates: Tensor) -> Tensor:
    """Like `sigmoid`."""
    y = gates.clone(memory_format=torch.contiguous_format)
    gelu_forward(y, y)
    return y


def sigmoid(gates: Tensor) -> Tensor:
    """The sigmoid of the gates, a view of the hidden layer, in a new contiguous tensor."""
    s = gates.clone(memory_format=torch.contiguous_format)
    by_whole_vectors(torch.sigmoid_, s)
    return s


gemms = linear_forward, linear_backward
linear_gelu_forward, gelu_linear_backward = compose.with_gelu(*gemms, gelu_forward, gelu_backward)
linear_relu2_forward, relu2_linear_backward = compose.with_relu2(*gemms, relu2_forward, relu2_backward)
linear_swiglu_forward, swiglu_linear_backward = compose.with_swiglu(*gemms, swiglu_forward, swiglu_backward)
