"""Dropout where GEMMs run in fp8: its kernels write 16 bits, and a pass of its own quantises them.

Dropout changes four tensors of a GPT-2 block before a GEMM reads them: attention's output and its gradient, and the
gradients of both branches. The kernels that quantise these in passing know no masks.
"""

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from handgrad.joins.dropout.bind import WithDropout
from handgrad.joins.fp8.formats import Form, Quantized, plain, plain_or_workspace
from handgrad.memory.activations import ActivationRow

# Passes over (N, C) in 16 bits that dropout costs more in a layer with this part of the GEMMs in fp8. qkv: dqkv is written
# in 16 bits, and `quantize` reads it (2 * 3). proj: `quantize` reads attention's output (1). proj and mlp: it reads the
# branch's gradient and writes both forms (2), where without dropout a layer norm writes rows, a transpose reads them and
# writes columns (1.5).
MORE_PASSES = {"qkv": 6.0, "proj": 1.5, "mlp": 0.5}


def more_passes(gemms: Iterable[tuple[int, str]]) -> float:
    """Passes over (N, C) in 16 bits that dropout costs more where these (layer, part) run in fp8."""
    return sum(MORE_PASSES[part] for _, part in gemms)


def with_workspace(rows: Iterable[ActivationRow]) -> tuple[ActivationRow, ...]:
    """The rows with memory in 16 bits for the gradient that attention's backward leaves."""
    return tuple(
        replace(row, fp8=replace(row.fp8, workspace="dqkv_16_bits")) if row.name == "dqkv" and row.fp8 else row
        for row in rows
    )


class WithFp8Dropout(WithDropout):
    """`WithDropout` for operations whose tensors may be quantised."""

    def attention_forward(self, out: Form, lse: Tensor, qkv: Tensor, *, scratch: Tensor) -> None:
        super().attention_forward(plain(out), lse, qkv, scratch=scratch)
        if isinstance(out, Quantized):
            self.ops.quantize(out, plain(out))

    def attention_backward(self, dqkv: Form, dout: Tensor, out: Form, lse: Tensor, qkv: Tensor, *, scratch: Tensor) -> None:
        gradient = plain_or_workspace(dqkv)
        super().attention_backward(gradient, dout, plain(out), lse, qkv, scratch=scratch)
        if isinstance(dqkv, Quantized):
            self.ops.quantize(dqkv, gradient)

    def layernorm_backward(self, dresidual_inout: Form, *tensors: Tensor | None, scratch: Tensor) -> None:
        """Writes the stream's gradient in 16 bits: no GEMM reads it before dropout."""
        super().layernorm_backward(plain(dresidual_inout), *tensors, scratch=scratch)

    def drop_branch(self, dweight_acc: Tensor, dout: Form) -> Form:
        """Quantises `dbranch` into the fp8 forms of a quantised dout."""
        dbranch = super().drop_branch(dweight_acc, plain(dout))
        if isinstance(dout, Tensor):
            return dbranch
        self.ops.quantize(dout, dbranch)
        return replace(dout, plain=dbranch)
