"""GELU by torch's kernels, squared ReLU and SwiGLU in few passes over memory, and the GEMMs that end or begin with them.

The bits of an operation on each element do not depend on the number of threads. torch gives each thread an equal stretch of
a tensor and computes the few elements at its end one by one, where the formula of some functions (GELU, sigmoid) rounds
otherwise than in a vector. `by_whole_vectors` makes all stretches but the last whole vectors.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from handgrad.machine.devices import accumulation_dtype
from handgrad.ops import compose
from handgrad.ops.cpu.linear import linear_backward, linear_forward
from handgrad.ops.reference import residual_forward
from handgrad.ops.reference.activations import gates

aten = torch.ops.aten

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
    def backward(dy: Tensor, x: Tensor) -> None:
        aten.gelu_backward.grad_input(dy, x, approximate="tanh", grad_input=dy)

    by_whole_vectors(backward, dhidden_inout, inp)


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
linear_residual_forward = compose.with_residual(linear_forward, residual_forward)
