"""Binds adapters into the operations of a model.

The model calls the operations by their plain names. GEMMs by a weight with an adapter are bound here, composed of plain
operations, so that the adapter's GEMMs (`lora.products`) come before an activation function.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

from torch import Tensor

from handgrad.joins.lora.products import AdapterProducts, AdapterTensors
from handgrad.joins.lora.tables import Adapter
from handgrad.models.passes import Stage
from handgrad.ops.compose import Overlay, after_attention, after_gained_rmsnorm, after_layernorm
from handgrad.training.state import TrainingState
from handgrad.training.step import Program


class WithAdapters(Overlay):
    """The operations `ops` of a model whose weights have adapters.

    Frozen matrices have no gradients. Some kernels compute frozen vectors' gradients all the same, into memory that nothing
    reads.
    """

    def __init__(
        self,
        ops: ModuleType,
        tensors: Mapping[Any, AdapterTensors],
        memory: Mapping[str, Tensor],
        module: ModuleType | None = None,
    ):
        """`tensors`: of the adapters, by their weights; `memory`: views of `adapter_buffers`; `module`: of the operations
        that the model calls, `ops` (by default) or `ops.decode`."""
        super().__init__(ops)
        self.tensors, self.memory, self.module = tensors, memory, module or ops
        self.products = AdapterProducts(ops, tensors, memory)
        norm, gained = ops.layernorm_forward, ops.gained_rmsnorm_forward
        # Operations that end with a product, as two in a row, the second one from below.
        self.composed: dict[str, Callable[..., None]] = {
            "attention_linear_residual_forward": after_attention(ops.decode.attention_decode, self.linear_residual_forward),
            "layernorm_linear_forward": after_layernorm(norm, self.linear_forward),
            "layernorm_linear_gelu_forward": after_layernorm(norm, self.linear_gelu_forward),
            "gained_rmsnorm_linear_forward": after_gained_rmsnorm(gained, self.linear_forward, 1),
            "gained_rmsnorm_linear_swiglu_forward": after_gained_rmsnorm(gained, self.linear_swiglu_forward, 2),
        }

    def __getattr__(self, name: str) -> Any:
        if name == "decode":
            return WithAdapters(self.ops, self.tensors, self.memory, self.ops.decode)
        if name in self.composed:
            return partial(self.composed_or_fused, name)
        return getattr(self.module, name)

    def composed_or_fused(self, name: str, *tensors: Tensor | None, **options: Any) -> None:
        """Composed for a weight with an adapter, whose product has to come in between; else as the backend has it."""
        has_adapter = any(tensor in self.tensors for tensor in tensors)
        operation = self.composed[name] if has_adapter else getattr(self.module, name)
        operation(*tensors, **options)

    def add_forward(self, out: Tensor, inp: Tensor, weight: Tensor, scratch: Tensor) -> None:
        self.products.forward(out, inp, weight, scratch)

    def add_backward(self, dinp: Tensor, dout: Tensor, inp: Tensor, weight: Tensor, scratch: Tensor) -> None:
        self.products.backward(dinp, dout, inp, weight, scratch)

    # Forward.

    def linear_forward(self, out: Tensor, inp: Tensor, weight: Tensor, bias: Tensor | None, *, scratch: Tensor) -> None:
        self.ops.linear_forward(out, inp, weight, bias, scratch=scratch)
        self.add_forward(out, inp, weight, scratch)

    def linear_residual_forward(
        self, out: Tensor, residual: Tensor, inp: Tensor, weight: Tensor, bias: Tensor | None, *, scratch: Tensor
    ) -> None:
        self.module.linear_residual_forward(out, residual, inp, weight, bias, scratch=scratch)
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
        self.ops.layernorm_backward(dresidual_inout, *self.discarded(weight), *inputs, scratch=scratch)

    def gained_rmsnorm_backward(self, dresidual_inout: Tensor, dgain_acc: None, *inputs: Tensor, scratch: Tensor) -> None:
        discarded, _ = self.discarded(inputs[-1])
        self.ops.gained_rmsnorm_backward(dresidual_inout, discarded, *inputs, scratch=scratch)

    def gained_qk_norm_rotary_backward(
        self, dqkv_inout: Tensor, dq_gain_acc: None, dk_gain_acc: None, *inputs: Tensor, **options: Any
    ) -> None:
        self.ops.gained_qk_norm_rotary_backward(dqkv_inout, *self.discarded(inputs[-1]), *inputs, **options)

    def embedding_backward(self, *tensors: Tensor | None, scratch: Tensor) -> None:
        """Nothing below the blocks is trained."""

    def token_embedding_backward(self, *tensors: Tensor | None, scratch: Tensor) -> None:
        """Nothing below the blocks is trained."""

    def discarded(self, vector: Tensor) -> Iterator[Tensor]:
        """Memory for two gradients of vectors that nothing reads."""
        return (row[: vector.numel()] for row in self.memory["lora.unread"])


def adapters_by_weight(state: TrainingState, weights: Any) -> dict[Any, AdapterTensors]:
    """The adapters of a state, by the `weights` of their matrices."""
    views = {row.name: row.view(state.parameters) for row in state.design.parameters}
    return bind(state.design.lora.adapters, weights, views, state.named_gradients)


def bind(
    adapters: Iterable[Adapter], weights: Any, views: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> dict[Any, AdapterTensors]:
    """The adapters of a model with these weights, from their tensors and gradients by name."""
    by_weight = {}
    for adapter in adapters:
        _, layer, name = adapter.weight.split(".")
        weight, a, b = getattr(weights.blocks[int(layer)], name), adapter.a, adapter.b
        by_weight[weight] = AdapterTensors(adapter, views[a], views[b], gradients[a], gradients[b])
    return by_weight


def with_adapters(program: Program, trained: set[str]) -> Program:
    """The program whose stages name the buckets of parameters that are `trained`: no other gradient leaves, and no other
    weight is waited for."""
    stages = [stage if stage.bucket in trained else Stage("", stage.run) for stage in program.micro_step]
    return replace(program, micro_step=stages)
