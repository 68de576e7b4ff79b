"""The operations of a model with adapters. The model passes an `AdaptedWeight` instead of a weight.

The model calls the operations by their plain names. This module binds GEMMs that are composed of plain operations, because
an adapter's output must be added before an activation function. All parts of one matrix share a GEMM with their stacked A's
and one with the block matrix B' = s B: each part's B is in the rows of its outputs and the columns of its A, with zeros
elsewhere (docs/lora.md):

    u = x A^T (N, R),  y += u B'^T.   Backward: du = dy B',  dB' = dy^T u,  dB += s dB' in its blocks,
                                                dx += du A,  dA += du^T x
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from handgrad.joins.lora.tables import Adapter
from handgrad.models.passes import Stage
from handgrad.ops.compose import Overlay, after_attention, after_layernorm, after_rmsnorm
from handgrad.ops.reference.linear import weight_backward
from handgrad.training.state import TrainingState
from handgrad.training.step import Program


@dataclass(frozen=True)
class AdaptedWeight:
    """A frozen weight (O, I) with its adapter: A (R, I), B (outputs of its parts, r) and their gradients."""

    frozen: Any  # in the form that a plain GEMM reads
    adapter: Adapter
    a: Tensor
    b: Tensor
    da_acc: Tensor
    db_acc: Tensor


def adapted(adapters: Iterable[Adapter], weights: Any, views: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Any:
    """A model's weights with adapters. `views` and `gradients`: the adapters' tensors and gradients by name."""
    blocks = list(weights.blocks)
    for adapter in adapters:
        _, layer, name = adapter.weight.split(".")
        block, a, b = blocks[int(layer)], adapter.a, adapter.b
        weight = AdaptedWeight(getattr(block, name), adapter, views[a], views[b], gradients[a], gradients[b])
        blocks[int(layer)] = replace(block, **{name: weight})
    return replace(weights, blocks=blocks)


def with_adapters(state: TrainingState, weights: Any) -> Any:
    """A run's weights with its adapters, if it has any."""
    if state.design.lora is None:
        return weights
    views = {row.name: row.view(state.parameters) for row in state.design.parameters}
    return adapted(state.design.lora.adapters, weights, views, state.named_gradients)


def without_adapter(weight: Any) -> Any:
    return weight.frozen if isinstance(weight, AdaptedWeight) else weight


# Accumulating GEMMs in plain torch; `joins.lora.cuda` on NVIDIA GPUs. With u = x A^T: y += u B^T.
# Backward: du = dy B,  dB = dy^T u,  dx += du A,  dA = du^T x.


def add_linear_forward(out_inout: Tensor, inp: Tensor, weight: Tensor, *, scratch: Tensor | None = None) -> None:
    """out_inout (N, O) += inp (N, I) weight (O, I)^T."""
    out_inout.addmm_(inp, weight.t())


def add_linear_backward(
    dinp_inout: Tensor, dweight_acc: Tensor, dout: Tensor, inp: Tensor, weight: Tensor, *, scratch: Tensor | None = None
) -> None:
    """dinp_inout (N, I) += dout (N, O) weight (O, I); dweight_acc (O, I) += dout^T inp."""
    dinp_inout.addmm_(dout, weight)
    weight_backward(dweight_acc, dout, inp)


def add_linear_operations(ops: ModuleType) -> tuple[Callable[..., None], Callable[..., None]]:
    """(add_linear_forward, add_linear_backward) to match the backend's operations `ops`."""
    if ops.BACKEND.name != "cuda":
        return add_linear_forward, add_linear_backward
    from handgrad.joins.lora import cuda  # imports the library of a GPU

    tf32 = ops.BACKEND.tf32
    return partial(cuda.add_linear_forward, tf32=tf32), partial(cuda.add_linear_backward, tf32=tf32)


class WithAdapters(Overlay):
    """The operations `ops` for a model whose weights have adapters.

    Frozen matrices have no gradients. Some kernels always compute vector gradients; for frozen vectors they write to memory
    that nothing reads."""

    def __init__(self, ops: ModuleType, memory: Mapping[str, Tensor], module: ModuleType | None = None):
        """`memory`: views of `tables.buffers`, for u, du, B' and dB'; `module`: has the operations that the model calls,
        `ops` (default) or `ops.decode`."""
        super().__init__(ops)
        self.memory, self.module = memory, module or ops
        self.add_linear_forward, self.add_linear_backward = add_linear_operations(ops)
        layernorm, rmsnorm = ops.layernorm_forward, ops.rmsnorm_forward
        # Fused operations that end with a GEMM, each as two operations. This class provides the second.
        self.composed: dict[str, Callable[..., None]] = {
            "attention_linear_residual_forward": after_attention(ops.decode.attention_decode, self.linear_residual_forward),
            "layernorm_linear_forward": after_layernorm(layernorm, self.linear_forward),
            "layernorm_linear_gelu_forward": after_layernorm(layernorm, self.linear_gelu_forward),
            "rmsnorm_linear_forward": after_rmsnorm(rmsnorm, self.linear_forward, 1),
            "rmsnorm_linear_swiglu_forward": after_rmsnorm(rmsnorm, self.linear_swiglu_forward, 2),
        }

    def __getattr__(self, name: str) -> Any:
        if name == "decode":
            return WithAdapters(self.ops, self.memory, self.ops.decode)
        return partial(self.composed_or_fused, name) if name in self.composed else getattr(self.module, name)

    def composed_or_fused(self, name: str, *tensors: Tensor | None, **options: Any) -> None:
        """Runs the composed form for a weight with an adapter, whose output is added in between; else the fused kernel."""
        has_adapter = any(isinstance(tensor, AdaptedWeight) for tensor in tensors)
        operation = self.composed[name] if has_adapter else getattr(self.module, name)
        operation(*tensors, **options)

    def add_forward(self, out: Tensor, inp: Tensor, weight: Any, scratch: Tensor) -> None:
        """out (N, O) += u B'^T, in chunks of tokens that fit the memory: generation may have more tokens."""
        if not isinstance(weight, AdaptedWeight):
            return
        scaled_b, ranks = self.scaled_b(weight), weight.adapter.ranks
        most = self.memory["lora.u"].numel() // ranks
        for first in range(0, inp.shape[0], most):
            rows = slice(first, first + most)
            u = self.view("lora.u", len(inp[rows]), ranks)
            self.ops.linear_forward(u, inp[rows], weight.a, None, scratch=scratch)
            self.add_linear_forward(out[rows], u, scaled_b, scratch=scratch)

    def add_backward(self, dinp: Tensor, dout: Tensor, inp: Tensor, weight: Any, scratch: Tensor) -> None:
        """dinp (N, I) += du A; accumulates the gradients of A and B. Recomputing u is cheaper than keeping it."""
        if not isinstance(weight, AdaptedWeight):
            return
        adapter, N = weight.adapter, inp.shape[0]
        scaled_b, dscaled_b = self.scaled_b(weight), self.view("lora.dwide", adapter.outputs, adapter.ranks)
        u, du = (self.view(name, N, adapter.ranks) for name in ("lora.u", "lora.du"))
        self.ops.linear_forward(u, inp, weight.a, None, scratch=scratch)
        dscaled_b.zero_()
        self.ops.linear_backward(du, dscaled_b, None, dout, u, scaled_b, scratch=scratch)
        for part, columns, rows in adapter.places():
            weight.db_acc[rows].add_(dscaled_b[part.outputs, columns], alpha=adapter.scale)
        self.add_linear_backward(dinp, weight.da_acc, du, inp, weight.a, scratch=scratch)

    def scaled_b(self, weight: AdaptedWeight) -> Tensor:
        """B' (O, R)"""
        adapter = weight.adapter
        scaled_b = self.view("lora.wide", adapter.outputs, adapter.ranks)
        if adapter.parts[0].outputs != slice(0, adapter.outputs):  # else every number is written below
            scaled_b.zero_()
        for part, columns, rows in adapter.places():
            torch.mul(weight.b[rows], adapter.scale, out=scaled_b[part.outputs, columns])
        return scaled_b

    def view(self, name: str, rows: int, columns: int) -> Tensor:
        """The start of a buffer, viewed as (rows, columns)."""
        return self.memory[name][: rows * columns].view(rows, columns)

    # Forward.

    def linear_forward(self, out: Tensor, inp: Tensor, weight: Any, bias: Tensor | None, *, scratch: Tensor) -> None:
        self.ops.linear_forward(out, inp, without_adapter(weight), bias, scratch=scratch)
        self.add_forward(out, inp, weight, scratch)

    def linear_residual_forward(
        self, out: Tensor, residual: Tensor, inp: Tensor, weight: Any, bias: Tensor | None, *, scratch: Tensor
    ) -> None:
        self.module.linear_residual_forward(out, residual, inp, without_adapter(weight), bias, scratch=scratch)
        self.add_forward(out, inp, weight, scratch)

    def linear_gelu_forward(
        self, out: Tensor, hidden: Tensor, inp: Tensor, weight: Any, bias: Tensor, *, scratch: Tensor
    ) -> None:
        self.linear_forward(hidden, inp, weight, bias, scratch=scratch)
        self.ops.gelu_forward(out, hidden)

    def linear_swiglu_forward(self, out: Tensor, hidden: Tensor, inp: Tensor, weight: Any, *, scratch: Tensor) -> None:
        self.linear_forward(hidden, inp, weight, None, scratch=scratch)
        self.ops.swiglu_forward(out, hidden)

    # Backward.

    def linear_backward(
        self, dinp: Tensor, dweight_acc: None, dbias_acc: None, dout: Tensor, inp: Tensor, weight: Any, *, scratch: Tensor
    ) -> None:
        self.ops.linear_backward(dinp, None, None, dout, inp, without_adapter(weight), scratch=scratch)
        self.add_backward(dinp, dout, inp, weight, scratch)

    def gelu_linear_backward(self, dhidden: Tensor, dweight_acc: None, *inputs: Any, scratch: Tensor) -> None:
        dout, inp, hidden, weight = inputs
        self.linear_backward(dhidden, None, None, dout, inp, weight, scratch=scratch)
        self.ops.gelu_backward(dhidden, hidden)

    def swiglu_linear_backward(
        self, dhidden: Tensor, dinp: Tensor, dweight_acc: None, *inputs: Any, scratch: Tensor
    ) -> None:
        dout, inp, hidden, weight = inputs
        self.linear_backward(dinp, None, None, dout, inp, weight, scratch=scratch)
        self.ops.swiglu_backward(dhidden, dinp, hidden)

    def layernorm_backward(
        self, dresidual_inout: Tensor, dweight_acc: None, dbias_acc: None, *inputs: Any, scratch: Tensor
    ) -> None:
        *_, weight, _ = inputs
        self.ops.layernorm_backward(dresidual_inout, *self.discarded(weight), *inputs, scratch=scratch)

    def rmsnorm_backward(self, dresidual_inout: Tensor, dgain_acc: None, *inputs: Tensor, **options: Any) -> None:
        discarded, _ = self.discarded(inputs[-1])
        self.ops.rmsnorm_backward(dresidual_inout, discarded, *inputs, **options)

    def gained_qk_norm_rotary_backward(
        self, dqkv_inout: Tensor, dq_gain_acc: None, dk_gain_acc: None, *inputs: Tensor, **options: Any
    ) -> None:
        self.ops.gained_qk_norm_rotary_backward(dqkv_inout, *self.discarded(inputs[-1]), *inputs, **options)

    def embedding_backward(self, *tensors: Tensor | None, scratch: Tensor) -> None:
        """Nothing below the blocks is trained."""

    def token_embedding_backward(self, *tensors: Tensor | None, scratch: Tensor) -> None:
        """Nothing below the blocks is trained."""

    def discarded(self, vector: Tensor) -> Iterator[Tensor]:
        """Memory for two unused vector gradients."""
        return (row[: vector.numel()] for row in self.memory["lora.unread"])


def launches(program: Program, trained: Iterable[str]) -> Program:
    """Keeps the buckets of stages only for `trained` parameters: ranks send and await nothing for the others."""
    stages = [stage if stage.bucket in trained else Stage("", stage.run) for stage in program.micro_step]
    return replace(program, micro_step=stages)
