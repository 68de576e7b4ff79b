"""The loss, which also writes its gradient in fp8."""

import triton
import triton.language as tl
from torch import Tensor

from handgrad.joins.fp8.cuda.elementwise import rounded_and_scaled
from handgrad.joins.fp8.cuda.quantizing import SCALE, UNALIGNED, rounded, transpose_rows, write_forms
from handgrad.joins.fp8.formats import Form, on_plain, plain
from handgrad.ops import cuda
from handgrad.ops.cuda import classifier
from handgrad.ops.cuda.classifier import TILE, WARPS, loss_and_gradient
from handgrad.ops.cuda.launch import launch

classifier_forward = on_plain(classifier.classifier_forward)


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
    """Skips the 16-bit gradient if it writes both fp8 forms, because nothing would read it."""
    logits, out = plain(logits_to_dlogits_inout), logits_to_dlogits_inout
    if isinstance(out, Tensor) or out.rows is None:
        options = {"vocab_size": vocab_size, "softcap": softcap, "untrained": untrained}
        cuda.classifier_forward_backward(losses, logits, targets, scale, **options)
        if not isinstance(out, Tensor):
            write_forms(out, logits)
        return
    N, Vp = logits.shape
    # Triton 3.6 (H200) miscomputed a tail that is all padding. No model has one: Vp is V rounded up to 128.
    assert Vp == vocab_size or vocab_size % TILE.value, f"{Vp - vocab_size} columns behind {vocab_size}"
    tensors, in_place = (losses, logits, out.rows, out.scaling, targets, scale), out.columns is None
    launch(_forward_backward, (N,), *tensors, vocab_size, Vp, softcap, in_place, untrained, num_warps=WARPS)
    transpose_rows(out)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _forward_backward(
    losses, logits, rows, scaling, targets, scale, V: tl.constexpr, Vp: tl.constexpr, CAP: tl.constexpr,
    IN_PLACE: tl.constexpr, UNTRAINED: tl.constexpr = False,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * Vp
    into = logits, rows + row * Vp, tl.load(scaling + SCALE), IN_PLACE
    loss_and_gradient(losses + row, logits, tl.load(targets + row), scale, V, Vp, CAP, UNTRAINED, store_gradient, into)


@triton.jit
def store_gradient(into, column, d, mask, EVICTION: tl.constexpr):
    """Stores d in place, and in fp8 from the value rounded there."""
    logits, rows, scale, IN_PLACE = into
    TYPE: tl.constexpr = logits.dtype.element_ty
    if IN_PLACE:
        tl.store(logits + column, d.to(TYPE), mask=mask, eviction_policy=EVICTION)
    pointers = rows + column
    if len(column.shape) == 2:  # stores of 8 bytes: 16 would shuffle a tile of 16-bit numbers between lanes
        pointers, scaled = tl.max_contiguous(pointers, (1, 8)), rounded_and_scaled(d, scale, TYPE)
    else:
        scaled = d.to(TYPE).to(tl.float32) * scale
    tl.store(pointers, rounded(scaled, 1.0, rows.dtype.element_ty), mask=mask)
