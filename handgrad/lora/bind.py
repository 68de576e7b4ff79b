"""Binds adapters into the operations of a model.

With an adapter a product is y = x W^T + b + s (x A^T) B^T, and W, b and all else stay as they are. The model calls the
operations by their plain names; those with such a product are bound here, written out of the plain pieces, so that the
addition comes before an activation function.

The products of one matrix share a product with their A's, one above the other, and one with s B, in which each product's B
stands in the rows of its outputs and the columns of its A, zeros elsewhere:

    u = x A^T (N, R),  y += u (s B)^T.   Backward: du = dy (s B),  dB += s dy^T u,  dx += du A,  dA += du^T x
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.lora import reference
from handgrad.lora.tables import Adapter
from handgrad.models.overlay import Overlay
from handgrad.models.passes import Stage
from handgrad.ops.compose import after_attention, after_gained_rmsnorm, after_layernorm
from handgrad.training.state import TrainingState
from handgrad.training.step import Program


def added_products(ops: ModuleType) -> tuple[Callable[..., None], Callable[..., None]]:
    """`add_linear_forward` and `add_linear_backward` beside the plain operations `ops`."""
    if not ops.__name__.startswith("handgrad.ops.cuda"):
        return reference.add_linear_forward, reference.add_linear_backward
    from handgrad.lora import cuda  # imports the library of a GPU

    tf32 = ops.__name__.endswith("tf32")
    return partial(cuda.add_linear_forward, tf32=tf32), partial(cuda.add_linear_backward, tf32=tf32)


@dataclass(frozen=True)
class Bound:
    """An adapter's tensors: A (R, I), B (outputs of its parts, r) and their gradients."""

    adapter: Adapter
    a: Tensor
    b: Tensor
    da_acc: Tensor
    db_acc: Tensor


class WithAdapters(Overlay):
    """The operations `ops` of a model whose weights have adapters.

    The weight that a call carries, the very object that the model passes, tells its adapter. Frozen matrices have no
    gradients. Those of frozen vectors are by-products of other kernels and go into memory that nothing reads.
    """

    def __init__(self, ops: ModuleType, bound: Mapping[Any, Bound], memory: Mapping[str, Tensor], others: Any = None):
        """`bound`: by their weights; `memory`: views of `adapter_buffers`; `others`: the module of all other operations,
        `ops` or those of generation."""
        super().__init__(ops)
        self.bound, self.memory, self.others = bound, memory, ops if others is None else others
        self.add_linear_forward, self.add_linear_backward = added_products(ops)
        norm, gained = ops.layernorm_forward, ops.gained_rmsnorm_forward
        # Operations that end with a product, as two, for a weight with an adapter.
        self.in_two: dict[str, Callable[..., None]] = {
            "attention_linear_residual_forward": after_attention(ops.decode.attention_decode, self.linear_residual_forward),
            "layernorm_linear_forward": after_layernorm(norm, self.linear_forward),
            "layernorm_linear_gelu_forward": after_layernorm(norm, self.linear_gelu_forward),
            "gained_rmsnorm_linear_forward": after_gained_rmsnorm(gained, self.linear_forward, 1),
            "gained_rmsnorm_linear_swiglu_forward": after_gained_rmsnorm(gained, self.linear_swiglu_forward, 2),
        }

    def __getattr__(self, name: str) -> Any:
        if name == "decode":
            return WithAdapters(self.ops, self.bound, self.memory, self.ops.decode)
        if name in self.in_two:
            return partial(self.in_one_or_two, name)
        return getattr(self.others, name)

    def in_one_or_two(self, name: str, *tensors: Tensor | None, **options: Any) -> None:
        """As the backend has the operation, unless its weight has an adapter."""
        has_adapter = any(tensor in self.bound for tensor in tensors)
        operation = self.in_two[name] if has_adapter else getattr(self.others, name)
        operation(*tensors, **options)

    # Forward.

    def linear_forward(self, out: Tensor, inp: Tensor, weight: Tensor, bias: Tensor | None, *, scratch: Tensor) -> None:
        self.ops.linear_forward(out, inp, weight, bias, scratch=scratch)
        self.add_forward(out, inp, weight, scratch)

    def linear_residual_forward(
        self, out: Tensor, residual: Tensor, inp: Tensor, weight: Tensor, bias: Tensor | None, *, scratch: Tensor
    ) -> None:
        self.others.linear_residual_forward(out, residual, inp, weight, bias, scratch=scratch)
        self.add_forward(out, inp, weight, scratch)

    def linear_gelu_forward(
        self, out: Tensor, hidden: Tensor, inp: Tensor, weight: Tensor, bias: Tensor, *, scratch: Tensor
    ) -> None:
        self.linear_forward(hidden, inp, weight, bias, scratch=scratch)
        self.ops.gelu_forward(out, hidden)

    def linear_swiglu_forward(self, out: Tensor, hidden: Tensor, inp: Tensor, weight: Tensor, *, scratch: Tensor) -> None:
        self.linear_forward(hidden, inp, weight, None, scratch=scratch)
        self.ops.swiglu_forward(out, hidden)

    # Backward.

    def linear_backward(
        self,
        dinp: Tensor,
        dweight_acc: None,
        dbias_acc: None,
        dout: Tensor,
        inp: Tensor,
        weight: Tensor,
        *,
        scratch: Tensor,
    ) -> None:
        self.ops.linear_backward(dinp, None, None, dout, inp, weight, scratch=scratch)
        self.add_backward(dinp, dout, inp, weight, scratch)

    def gelu_linear_backward(self, dhidden: Tensor, dweight_acc: None, *inputs: Tensor, scratch: Tensor) -> None:
        dout, inp, hidden, weight = inputs
        self.linear_backward(dhidden, None, None, dout, inp, weight, scratch=scratch)
        self.ops.gelu_backward(dhidden, hidden)

    def swiglu_linear_backward(
        self, dhidden: Tensor, dinp: Tensor, dweight_acc: None, *inputs: Tensor, scratch: Tensor
    ) -> None:
        dout, inp, hidden, weight = inputs
        self.linear_backward(dinp, None, None, dout, inp, weight, scratch=scratch)
        self.ops.swiglu_backward(dhidden, dinp, hidden)

    def layernorm_backward(
        self, dresidual_inout: Tensor, dweight_acc: None, dbias_acc: None, *inputs: Any, scratch: Tensor
    ) -> None:
        *_, weight, _ = inputs
        self.ops.layernorm_backward(dresidual_inout, *self.unread(weight), *inputs, scratch=scratch)

    def gained_rmsnorm_backward(self, dresidual_inout: Tensor, dgain_acc: None, *inputs: Tensor, scratch: Tensor) -> None:
        unread, _ = self.unread(inputs[-1])
        self.ops.gained_rmsnorm_backward(dresidual_inout, unread, *inputs, scratch=scratch)

    def gained_qk_norm_rotary_backward(
        self, dqkv_inout: Tensor, dq_gain_acc: None, dk_gain_acc: None, *inputs: Tensor, **options: Any
    ) -> None:
        self.ops.gained_qk_norm_rotary_backward(dqkv_inout, *self.unread(inputs[-1]), *inputs, **options)

    def embedding_backward(self, *tensors: Tensor | None, scratch: Tensor) -> None:
        """Nothing below the blocks is trained."""

    def token_embedding_backward(self, *tensors: Tensor | None, scratch: Tensor) -> None:
        """Nothing below the blocks is trained."""

    def unread(self, vector: Tensor) -> Iterator[Tensor]:
        """Memory for two gradients of vectors that nobody reads."""
        return (row[: vector.numel()] for row in self.memory["lora.unread"])

    # The adapter.

    def add_forward(self, out: Tensor, inp: Tensor, weight: Tensor, scratch: Tensor) -> None:
        """out (N, O) += s (x A^T) B^T, as many tokens at a time as there is memory for: generation may have more."""
        bound = self.bound.get(weight)
        if bound is None:
            return
        wide, ranks = self.wide(bound), bound.adapter.ranks
        most = self.memory["lora.u"].numel() // ranks
        for first in range(0, inp.shape[0], most):
            rows = slice(first, first + most)
            u = self.tokens_of("lora.u", len(inp[rows]), ranks)
            self.ops.linear_forward(u, inp[rows], bound.a, None, scratch=scratch)
            self.add_linear_forward(out[rows], u, wide, scratch=scratch)

    def add_backward(self, dinp: Tensor, dout: Tensor, inp: Tensor, weight: Tensor, scratch: Tensor) -> None:
        """dinp (N, I) += du A, and the gradients of A and B. u is made again: that takes less than its memory for every
        layer."""
        bound = self.bound.get(weight)
        if bound is None:
            return
        adapter, N = bound.adapter, inp.shape[0]
        wide, dwide = self.wide(bound), self.matrix("lora.dwide", adapter)
        u, du = (self.tokens_of(name, N, adapter.ranks) for name in ("lora.u", "lora.du"))
        self.ops.linear_forward(u, inp, bound.a, None, scratch=scratch)
        dwide.zero_()
        self.ops.linear_backward(du, dwide, None, dout, u, wide, scratch=scratch)
        for part, columns, rows in adapter.places():
            bound.db_acc[rows].add_(dwide[part.outputs, columns], alpha=adapter.scale)
        self.add_linear_backward(dinp, bound.da_acc, du, inp, bound.a, scratch=scratch)

    def wide(self, bound: Bound) -> Tensor:
        """s B (O, R) of all parts."""
        adapter, wide = bound.adapter, self.matrix("lora.wide", bound.adapter)
        if adapter.parts[0].outputs != slice(0, adapter.outputs):  # else every number is written below
            wide.zero_()
        for part, columns, rows in adapter.places():
            torch.mul(bound.b[rows], adapter.scale, out=wide[part.outputs, columns])
        return wide

    def matrix(self, name: str, adapter: Adapter) -> Tensor:
        """(O, R)"""
        return self.memory[name][: adapter.outputs * adapter.ranks].view(adapter.outputs, adapter.ranks)

    def tokens_of(self, name: str, tokens: int, ranks: int) -> Tensor:
        """(tokens, R)"""
        return self.memory[name][: tokens * ranks].view(tokens, ranks)


def bound_adapters(state: TrainingState, weights: Any) -> dict[Any, Bound]:
    """The adapters of a state, by the `weights` of their matrices."""
    views = {row.name: row.view(state.parameters) for row in state.design.parameters}
    return bind(state.design.lora.adapters, weights, views, state.named_gradients)


def bind(
    adapters: Iterable[Adapter], weights: Any, views: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> dict[Any, Bound]:
    """The adapters of a model with these weights, from their tensors and gradients by name."""
    found = {}
    for adapter in adapters:
        _, layer, name = adapter.weight.split(".")
        weight, a, b = getattr(weights.blocks[int(layer)], name), adapter.a, adapter.b
        found[weight] = Bound(adapter, views[a], views[b], gradients[a], gradients[b])
    return found


def with_adapters(program: Program, trained: set[str]) -> Program:
    """The program whose stages name the buckets of parameters that are `trained`: no other gradient leaves, and no other
    weight is waited for."""
    stages = [stage if stage.bucket in trained else Stage("", stage.run) for stage in program.micro_step]
    return replace(program, micro_step=stages)
