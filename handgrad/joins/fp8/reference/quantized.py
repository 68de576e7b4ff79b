"""Further operations that quantise their result: norms, rotation, attention, the loss gradient. Each runs the plain
operation in 16 bits, then `quantize`."""

from collections.abc import Callable
from inspect import Signature, signature
from typing import Any

import torch
from torch import Tensor

from handgrad.joins.fp8.formats import Form, Quantized, plain, plain_or_workspace
from handgrad.joins.fp8.reference.quantizing import quantize, write_forms
from handgrad.ops import reference
from handgrad.ops.reference.attention import CAUSAL, Mask


def quantizing(operation: Callable[..., None], result: str) -> Callable[..., None]:
    """Wraps an operation whose `result` may be quantised. It writes the 16-bit form, or a temporary if there is none."""

    plain_one = signature(operation)

    def call(*tensors: Any, **named: Any) -> None:
        arguments = plain_one.bind(*tensors, **named).arguments
        out = arguments[result]
        if isinstance(out, Quantized):
            alike = (t for t in arguments.values() if isinstance(t, Tensor) and t.shape == out.shape)
            arguments[result] = torch.empty_like(next(alike)) if out.plain is None else out.plain
        operation(**arguments)
        if isinstance(out, Quantized):
            quantize(out, arguments[result])

    call.__signature__ = taking_forms(operation, result)  # type: ignore[attr-defined]
    return call


def taking_forms(operation: Callable[..., None], name: str) -> Signature:
    """The operation's signature, with parameter `name` annotated as possibly quantised."""
    plain_one = signature(operation)
    parameters = [p.replace(annotation=Form) if p.name == name else p for p in plain_one.parameters.values()]
    return plain_one.replace(parameters=parameters)


layernorm_forward = quantizing(reference.layernorm_forward, "out")
rmsnorm_forward = quantizing(reference.rmsnorm_forward, "out")
mix_rmsnorm_forward = quantizing(reference.mix_rmsnorm_forward, "out")
attention_forward = quantizing(reference.attention_forward, "out")

# Also quantises the stream's gradient, for the GEMM below that reads it in fp8.
layernorm_backward = quantizing(reference.layernorm_backward, "dresidual_inout")
rmsnorm_backward = quantizing(reference.rmsnorm_backward, "dresidual_inout")
mix_rmsnorm_backward = quantizing(reference.mix_rmsnorm_backward, "dstream_inout")


attention_backward_into = quantizing(reference.attention_backward, "dqkv")


def attention_backward(
    dqkv: Form, dout: Tensor, out: Form, lse: Tensor, qkv: Tensor, *, scratch: Tensor | None = None, mask: Mask = CAUSAL
) -> None:
    """Leaves dqkv in its `workspace`, if it has one; an operation between attention and the GEMM quantises it."""
    into = dqkv.workspace if isinstance(dqkv, Quantized) and dqkv.workspace is not None else dqkv
    attention_backward_into(into, dout, plain(out), lse, qkv, mask=mask)


def quantizing_workspace(operation: Callable[..., None]) -> Callable[..., None]:
    """Wraps an operation that changes attention's input gradient in place. For a quantised gradient, it works in the
    `workspace` where attention's backward left the gradient, then quantises from there."""

    def call(dqkv_inout: Form, *tensors: Any, **named: Any) -> None:
        gradient = plain_or_workspace(dqkv_inout)
        operation(gradient, *tensors, **named)
        if isinstance(dqkv_inout, Quantized):
            quantize(dqkv_inout, gradient)
            if dqkv_inout.plain is not None:
                dqkv_inout.plain.copy_(gradient)

    call.__signature__ = taking_forms(operation, "dqkv_inout")  # type: ignore[attr-defined]
    return call


rotary_backward = quantizing_workspace(reference.rotary_backward)
qk_norm_backward = quantizing_workspace(reference.qk_norm_backward)
qk_norm_rotary_backward = quantizing_workspace(reference.qk_norm_rotary_backward)
gained_qk_norm_rotary_backward = quantizing_workspace(reference.gained_qk_norm_rotary_backward)


def classifier_forward_backward(
    losses: Tensor,
    logits_to_dlogits_inout: Form,
    targets: Tensor,
    scale: Tensor,
    *,
    vocab_size: int,
    softcap: float = 0.0,
    untrained: bool = False,
) -> None:
    """Quantises at the existing scale, which fits the largest possible gradient."""
    logits = plain(logits_to_dlogits_inout)
    options = {"vocab_size": vocab_size, "softcap": softcap, "untrained": untrained}
    reference.classifier_forward_backward(losses, logits, targets, scale, **options)
    if isinstance(logits_to_dlogits_inout, Quantized):
        write_forms(logits_to_dlogits_inout, logits)
