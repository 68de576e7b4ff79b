"""Mixes the input of a block: the residual stream and the first block's input, each times a learned scalar."""

from torch import Tensor

from handgrad.machine.devices import accumulation_dtype
from handgrad.ops.reference.rmsnorm import rmsnorm_backward, rmsnorm_forward

# Residual and input scalars (Jordan et al. 2024, https://github.com/KellerJordan/modded-nanogpt): m = r x + s x0, from the
# stream x and the first block's input x0.  Backward: dx = r dm,  dx0 += s dm,  dr = sum(dm x),  ds = sum(dm x0).
# A scalar may be absent, its tensor None: then r is 1, s is 0.


def mix_forward(
    out: Tensor, inp: Tensor, first: Tensor | None, residual_scalar: Tensor | None, input_scalar: Tensor | None
) -> None:
    """out, inp, first (N, C); the scalars (1)."""
    wide = accumulation_dtype(inp.dtype)
    mixed = inp.to(wide)
    if residual_scalar is not None:
        mixed = mixed * residual_scalar.to(wide)
    if input_scalar is not None:
        assert first is not None
        mixed = mixed + input_scalar.to(wide) * first.to(wide)
    out.copy_(mixed)


def mix_backward(
    dstream_inout: Tensor,
    dfirst_inout: Tensor | None,
    dresidual_scalar_acc: Tensor | None,
    dinput_scalar_acc: Tensor | None,
    inp: Tensor,
    first: Tensor | None,
    residual_scalar: Tensor | None,
    input_scalar: Tensor | None,
) -> None:
    """Turns the gradient of the mixture (N, C) into the gradient of inp, and adds `first`'s share to dfirst_inout."""
    wide = accumulation_dtype(inp.dtype)
    dmixed = dstream_inout.to(wide)
    if input_scalar is not None:
        assert dfirst_inout is not None and dinput_scalar_acc is not None and first is not None
        dinput_scalar_acc.add_((dmixed * first.to(wide)).sum(1).sum())
        dfirst_inout.add_(dmixed * input_scalar.to(wide))
    if residual_scalar is not None:
        assert dresidual_scalar_acc is not None
        dresidual_scalar_acc.add_((dmixed * inp.to(wide)).sum(1).sum())  # by rows: torch splits a full sum by threads
        dstream_inout.copy_(dmixed * residual_scalar.to(wide))


# The mixture and the RMS norm after it: y = m rstd. The backward recomputes m from x and x0, which it reads for dr and ds
# anyway, so the forward need not keep m.


def mix_rmsnorm_forward(
    mixed: Tensor | None,
    out: Tensor,
    rstd: Tensor,
    inp: Tensor,
    first: Tensor | None,
    residual_scalar: Tensor | None,
    input_scalar: Tensor | None,
) -> None:
    """mixed, out, inp, first (N, C), rstd (N). Without `mixed` it stores only the norm."""
    mixed = out if mixed is None else mixed
    mix_forward(mixed, inp, first, residual_scalar, input_scalar)
    rmsnorm_forward(out, rstd, mixed)


def mix_rmsnorm_backward(
    dstream_inout: Tensor,
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
    """Turns dstream_inout (N, C), the gradient of the mixture without the norm's share, into the gradient of inp."""
    mixed = inp.new_empty(inp.shape)
    mix_forward(mixed, inp, first, residual_scalar, input_scalar)
    rmsnorm_backward(dstream_inout, None, dout, mixed, rstd, None)
    sums = dresidual_scalar_acc, dinput_scalar_acc
    mix_backward(dstream_inout, dfirst_inout, *sums, inp, first, residual_scalar, input_scalar)
