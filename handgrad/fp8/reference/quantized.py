"""The other operations that quantise their result: norms, attention and the turn before it, the gradient of the loss."""

import torch
from torch import Tensor

from handgrad.fp8.formats import Form, Quantized, plain
from handgrad.fp8.reference.quantizing import quantize, write_forms
from handgrad.ops import reference
from handgrad.ops.reference.rotary import Frequencies


def layernorm_forward(out: Form, mean: Tensor, rstd: Tensor, inp: Tensor, weight: Tensor, bias: Tensor) -> None:
    result = plain(out) if isinstance(out, Tensor) or out.plain is not None else torch.empty_like(inp)
    reference.layernorm_forward(result, mean, rstd, inp, weight, bias)
    if isinstance(out, Quantized):
        quantize(out, result)


def layernorm_backward(
    dresidual_inout: Form,
    dweight_acc: Tensor,
    dbias_acc: Tensor,
    dout: Tensor,
    inp: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    dbias_below_acc: Tensor | None,
    *,
    scratch: Tensor | None = None,
) -> None:
    """The stream's gradient is quantised on the way, for the product below that reads it in fp8."""
    dresidual, tensors = plain(dresidual_inout), (dout, inp, mean, rstd, weight)
    reference.layernorm_backward(dresidual, dweight_acc, dbias_acc, *tensors, dbias_below_acc)
    if isinstance(dresidual_inout, Quantized):
        quantize(dresidual_inout, dresidual)


def rmsnorm_forward(out: Form, rstd: Tensor, inp: Tensor) -> None:
    result = plain(out) if isinstance(out, Tensor) or out.plain is not None else torch.empty_like(inp)
    reference.rmsnorm_forward(result, rstd, inp)
    if isinstance(out, Quantized):
        quantize(out, result)


def rmsnorm_backward(dresidual_inout: Form, dout: Tensor, inp: Tensor, rstd: Tensor) -> None:
    """As `layernorm_backward`."""
    reference.rmsnorm_backward(plain(dresidual_inout), dout, inp, rstd)
    if isinstance(dresidual_inout, Quantized):
        quantize(dresidual_inout, plain(dresidual_inout))


def gained_rmsnorm_forward(out: Form, rstd: Tensor, inp: Tensor, gain: Tensor, *, epsilon: float) -> None:
    result = plain(out) if isinstance(out, Tensor) or out.plain is not None else torch.empty_like(inp)
    reference.gained_rmsnorm_forward(result, rstd, inp, gain, epsilon=epsilon)
    if isinstance(out, Quantized):
        quantize(out, result)


def gained_rmsnorm_backward(
    dresidual_inout: Form,
    dgain_acc: Tensor,
    dout: Tensor,
    inp: Tensor,
    rstd: Tensor,
    gain: Tensor,
    *,
    scratch: Tensor | None = None,
) -> None:
    """As `layernorm_backward`."""
    reference.gained_rmsnorm_backward(plain(dresidual_inout), dgain_acc, dout, inp, rstd, gain)
    if isinstance(dresidual_inout, Quantized):
        quantize(dresidual_inout, plain(dresidual_inout))


def mix_rmsnorm_forward(
    mixed: Tensor | None,
    out: Form,
    rstd: Tensor,
    inp: Tensor,
    first: Tensor | None,
    residual_scalar: Tensor | None,
    input_scalar: Tensor | None,
) -> None:
    """The mixture stays in 16 bits."""
    result = plain(out) if isinstance(out, Tensor) or out.plain is not None else torch.empty_like(inp)
    reference.mix_rmsnorm_forward(mixed, result, rstd, inp, first, residual_scalar, input_scalar)
    if isinstance(out, Quantized):
        quantize(out, result)


def mix_rmsnorm_backward(
    dstream_inout: Form,
    dfirst_inout: Tensor | None,
    dresidual_scalar_acc: Tensor | None,
    dinput_scalar_acc: Tensor | None,
    dout: Tensor,
    inp: Tensor,
    first: Tensor | None,
    rstd: Tensor,
    residual_scalar: Tensor | None,
    input_scalar: Tensor | None,
    *,
    scratch: Tensor | None = None,
) -> None:
    """As `layernorm_backward`."""
    sums, scalars = (dresidual_scalar_acc, dinput_scalar_acc), (residual_scalar, input_scalar)
    reference.mix_rmsnorm_backward(plain(dstream_inout), dfirst_inout, *sums, dout, inp, first, rstd, *scalars)
    if isinstance(dstream_inout, Quantized):
        quantize(dstream_inout, plain(dstream_inout))


def attention_forward(
    out: Form, lse: Tensor, qkv: Tensor, *, scratch: Tensor | None = None, document_starts: Tensor | None = None
) -> None:
    """A quantised out also has a plain form, for the backward."""
    reference.attention_forward(plain(out), lse, qkv, document_starts=document_starts)
    if isinstance(out, Quantized):
        quantize(out, plain(out))


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
    inputs = dout, plain(out), lse, qkv
    if isinstance(dqkv, Quantized) and dqkv.workspace is not None:
        reference.attention_backward(dqkv.workspace, *inputs, document_starts=document_starts)
        return
    result = plain(dqkv) if isinstance(dqkv, Tensor) or dqkv.plain is not None else torch.empty_like(qkv)
    reference.attention_backward(result, *inputs, document_starts=document_starts)
    if isinstance(dqkv, Quantized):
        quantize(dqkv, result)


def rotary_backward(
    dqkv_inout: Form, *, num_heads: int, length: int, frequencies: Frequencies = None, scale: float = 1.0
) -> None:
    """Of a quantised dqkv, the gradient after the rotation lies in its `workspace`; so with the next three."""
    turn = {"num_heads": num_heads, "length": length, "frequencies": frequencies, "scale": scale}
    reference.rotary_backward(after_the_turn(dqkv_inout), **turn)
    quantize_turned(dqkv_inout)


def qk_norm_backward(dqkv_inout: Form, qkv: Tensor, rstd: Tensor) -> None:
    reference.qk_norm_backward(after_the_turn(dqkv_inout), qkv, rstd)
    quantize_turned(dqkv_inout)


def qk_norm_rotary_backward(dqkv_inout: Form, qkv: Tensor, rstd: Tensor, *, length: int) -> None:
    reference.qk_norm_rotary_backward(after_the_turn(dqkv_inout), qkv, rstd, length=length)
    quantize_turned(dqkv_inout)


def gained_qk_norm_rotary_backward(
    dqkv_inout: Form,
    dq_gain_acc: Tensor,
    dk_gain_acc: Tensor,
    qkv: Tensor,
    rstd: Tensor,
    q_gain: Tensor,
    k_gain: Tensor,
    *,
    length: int,
    frequencies: tuple[float, ...],
    scale: float,
    scratch: Tensor | None = None,
) -> None:
    turn, sums = {"length": length, "frequencies": frequencies, "scale": scale}, (dq_gain_acc, dk_gain_acc)
    reference.gained_qk_norm_rotary_backward(after_the_turn(dqkv_inout), *sums, qkv, rstd, q_gain, k_gain, **turn)
    quantize_turned(dqkv_inout)


def after_the_turn(dqkv: Form) -> Tensor:
    """The gradient that attention's backward left, in 16 bits; it may be changed."""
    if isinstance(dqkv, Tensor):
        return dqkv
    assert dqkv.workspace is not None
    return dqkv.workspace


def quantize_turned(dqkv: Form) -> None:
    if isinstance(dqkv, Quantized):
        quantize(dqkv, after_the_turn(dqkv))
        if dqkv.plain is not None:
            dqkv.plain.copy_(after_the_turn(dqkv))


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
