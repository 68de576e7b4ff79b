"""Products with weights, in float32 by the faster library of the two in torch: MKL on an Intel CPU, else oneDNN; what they
end or begin with: GELU by torch's kernels, squared ReLU and SwiGLU in few passes over memory."""

from collections.abc import Callable

import torch
from torch import Tensor

from handgrad.machine import processor
from handgrad.machine.devices import accumulation_dtype
from handgrad.ops import compose, reference
from handgrad.ops.reference.activations import gates

aten = torch.ops.aten

# Rows of a weight gradient that are multiplied before they are added to the accumulator, where the GEMM itself cannot
# accumulate: the temporary of 1024 rows stays in the last-level cache, and the GEMM runs as fast as in one piece.
ACCUMULATE_ROWS = 1024

# On Intel's CPUs torch's own GEMMs, which MKL makes, are as fast as oneDNN's, and they write and add in place.
MKL_IS_AS_FAST = torch.backends.mkl.is_available() and processor.is_intel()
# But for the few rows of generated text, which cost a pass over the weight: in the mode whose sums depend on no thread, MKL
# takes longer for them (benchmarks/results/cpu-intel-few-rows.json).
FEW_ROWS, LARGE_WEIGHT_ELEMENTS = 8 if torch.backends.mkldnn.is_available() else 0, 1 << 20


def gemm(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """left (M, K) right (N, K)^T + bias (N), by oneDNN. In float32 it runs at 293 to 440 GFLOP/s on two AVX-512 cores of
    AMD's, where the BLAS behind `torch.mm` runs at 190; it has no accumulating and no out= form."""
    return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")


def prefers_onednn(tensor: Tensor) -> bool:
    """Float32, if this torch has oneDNN. In bf16 `torch.mm` calls oneDNN itself; it has no float64."""
    return not MKL_IS_AS_FAST and tensor.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def is_pass_over_weight(inp: Tensor, weight: Tensor) -> bool:
    """True for few rows of a large weight in float32, if this torch has oneDNN."""
    return inp.shape[0] <= FEW_ROWS and weight.numel() >= LARGE_WEIGHT_ELEMENTS and inp.dtype == torch.float32


def linear_forward(out: Tensor, inp: Tensor, weight: Tensor, bias: Tensor | None, *, scratch: Tensor | None = None) -> None:
    if prefers_onednn(inp) or is_pass_over_weight(inp, weight):
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
    """By blocks of rows, whose temporary stays in cache, where the GEMM cannot accumulate."""
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


# The bits of an operation on each element do not depend on the number of threads. torch gives each thread an equal stretch
# of a tensor and computes the few elements at its end one by one, where the formula of some functions (GELU, sigmoid)
# rounds otherwise than in a vector. `by_whole_vectors` makes all stretches but the last whole vectors.

GRAIN_ELEMENTS = 32768  # torch's least share of a thread: at::internal::GRAIN_SIZE
VECTOR_ELEMENTS = 64  # a multiple of all that torch's loops take at once: two AVX-512 registers of 16-bit numbers


def by_whole_vectors(operation: Callable[..., object], *tensors: Tensor) -> None:
    """Calls `operation`, which computes an element of its output from those at the same place, on contiguous tensors of one
    size: at once if the threads' stretches are whole vectors anyway, else on most of the elements and on the rest."""
    elements = tensors[0].numel()
    whole = whole_vectors(elements, torch.get_num_threads())
    flat = [tensor.view(-1) for tensor in tensors]
    for stretch in (slice(0, whole), slice(whole, elements)):
        if stretch.start < stretch.stop:
            operation(*(tensor[stretch] for tensor in flat))


def whole_vectors(elements: int, threads: int) -> int:
    """The number of first elements that torch cuts into equal stretches of whole vectors."""
    for used in range(min(threads, -(-elements // GRAIN_ELEMENTS)), 1, -1):
        whole = elements - elements % (used * VECTOR_ELEMENTS)
        if -(-whole // GRAIN_ELEMENTS) >= used:  # so many threads take part in them as well
            return whole
    return elements


def gelu_forward(out: Tensor, inp: Tensor) -> None:
    by_whole_vectors(lambda y, x: aten.gelu.out(x, approximate="tanh", out=y), out, inp)


def gelu_backward(dhidden_inout: Tensor, inp: Tensor) -> None:
    backward = aten.gelu_backward.grad_input
    by_whole_vectors(lambda dy, x: backward(dy, x, approximate="tanh", grad_input=dy), dhidden_inout, inp)


def relu2_forward(hidden_inout: Tensor) -> None:
    """In 16 bits the largest of x and 0 is exact, and the square is rounded once."""
    hidden_inout.clamp_(min=0)
    hidden_inout.mul_(hidden_inout)


def relu2_backward(dhidden_inout: Tensor, out: Tensor) -> None:
    """2 sqrt(y) = y / sqrt(y / 4): torch's square root is slow at zeros, of which there are many; the reciprocal root is
    not. The smallest normal number takes the place of zero, lest 0 / 0 be formed."""
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


def sigmoid(gates: Tensor) -> Tensor:
    """The sigmoid of a view of the hidden layer, in a new tensor."""
    s = gates.clone(memory_format=torch.contiguous_format)
    by_whole_vectors(torch.sigmoid_, s)
    return s


linear_gelu_forward, gelu_linear_backward = compose.with_gelu(linear_forward, linear_backward, gelu_forward, gelu_backward)
linear_relu2_forward, relu2_linear_backward = compose.with_relu2(
    linear_forward, linear_backward, relu2_forward, relu2_backward
)
linear_swiglu_forward, swiglu_linear_backward = compose.with_swiglu(
    linear_forward, linear_backward, swiglu_forward, swiglu_backward
)
