"""The other operations that quantise their result: norms, attention and the rotation before it, the loss's gradient. Each
is the plain one in 16 bits, then `quantize`."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from handgrad.fp8.formats import Form, Quantized, plain, plain_or_workspace
from handgrad.fp8.reference.quantizing import quantize, write_forms
from handgrad.ops import reference


def quantizing(operation: Callable[..., None]) -> Callable[..., None]:
    """The operation, whose result alone may be quantised: it makes the 16-bit form, or a temporary where there is none."""

    @wraps(operation)
    def call(*tensors: Any, **options: Any) -> None:
        out = next((t for t in tensors if isinstance(t, Quantized)), None)
        if out is None:
            operation(*tensors, **options)
            return
        result = out.plain
        if result is None:
            result = torch.empty_like(next(t for t in tensors if isinstance(t, Tensor) and t.shape == out.shape))
        operation(*(result if t is out else t for t in tensors), **options)
        quantize(out, result)

    return call


layernorm_forward = quantizing(reference.layernorm_forward)
rmsnorm_forward = quantizing(reference.rmsnorm_forward)
gained_rmsnorm_forward = quantizing(reference.gained_rmsnorm_forward)
mix_rmsnorm_forward = quantizing(reference.mix_rmsnorm_forward)
attention_forward = quantizing(reference.attention_forward)

# The stream's gradient is quantised as it passes by, for the product below that reads it in fp8.
layernorm_backward = quantizing(reference.layernorm_backward)
rmsnorm_backward = quantizing(reference.rmsnorm_backward)
gained_rmsnorm_backward = quantizing(reference.gained_rmsnorm_backward)
mix_rmsnorm_backward = quantizing(reference.mix_rmsnorm_backward)


def attention_backward(
    dqkv: Form,
    dout: Tensor,
    out: Form,
    lse: Tensor,
    qkv: Tensor,
    *,
    scratch: Tensor | None = None,
    document_starts: Tensor | None = None,
) -> None:
    """A dqkv with a `workspace` is left there: an operation between attention and the product quantises it."""
    into = dqkv.workspace if isinstance(dqkv, Quantized) and dqkv.workspace is not None else dqkv
    quantizing(reference.attention_backward)(into, dout, plain(out), lse, qkv, document_starts=document_starts)


def quantizing_workspace(operation: Callable[..., None]) -> Callable[..., None]:
    """The operation, which turns the gradient behind attention's inputs into the one before them. Of a quantised dqkv it
    does so in the `workspace` where attention's backward left it, then quantises it from there."""

    @wraps(operation)
    def call(dqkv_inout: Form, *tensors: Tensor, **options: Any) -> None:
        gradient = plain_or_workspace(dqkv_inout)
        operation(gradient, *tensors, **options)
        if isinstance(dqkv_inout, Quantized):
            quantize(dqkv_inout, gradient)
            if dqkv_inout.plain is not None:
                dqkv_inout.plain.copy_(gradient)

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
    """Quantises at the scale as it stands, which follows from the largest number that the gradient can have."""
    logits = plain(logits_to_dlogits_inout)
    options = {"vocab_size": vocab_size, "softcap": softcap, "untrained": untrained}
    reference.classifier_forward_backward(losses, logits, targets, scale, **options)
    if isinstance(logits_to_dlogits_inout, Quantized):
        write_forms(logits_to_dlogits_inout, logits)
