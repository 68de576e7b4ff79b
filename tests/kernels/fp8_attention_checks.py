"""Checks of attention with quantised outputs, for the interpreter on a CPU and for a GPU alike.

What the kernels write in fp8 must be, bit for bit, what the reference's `quantize` makes of the plain output of the same
kernels. Outputs, and the parts of the statistics that must be written, hold NaN before.
"""

import math
from dataclasses import replace

import torch
import triton
from torch import Tensor

from handgrad.joins.fp8 import formats, reference
from handgrad.joins.fp8.cuda import attention
from handgrad.joins.fp8.formats import CLIPPED, VANISHED, Quantized
from handgrad.ops.cuda import attention as ops_attention, attention_triton
from handgrad.ops.reference.attention import Mask
from handgrad.ops.sizes import attention_scratch_bytes, rows_of
from tests.kernels.fp8_checks import copy, forms_of, make, same, totals
from tests.kernels.fp8_frames import parts_of
from tests.kernels.memory_checks import Draw

# Scales at which some of the numbers below are too large for a format; in e4m3 some vanish at the same scale.
SCALES = {formats.E4M3: 2.0**10, formats.E5M2: 2.0**18}


def spread(draw: Draw, N: int, C: int) -> Tensor:
    """Channels of magnitudes from 1 to 2^-22: so are those of their averages."""
    x = draw.normal(N, C, dtype=torch.float32)
    return (x * torch.exp2(-2.0 * (torch.arange(C, device=x.device) % 12))).to(draw.dtype)


def prepared(tensor: Quantized, used: int) -> Quantized:
    """A copy whose parts that must be written hold NaN."""
    tensor = copy(tensor)
    tensor.statistics[:, :used] = math.nan
    return tensor


def expected(found: Quantized, inp: Tensor) -> Quantized:
    result = copy(found)
    result.statistics.zero_()
    reference.quantize(result, inp)
    return result


def run(
    draw: Draw,
    B: int,
    T: int,
    H: int,
    D: int,
    kind: torch.dtype,
    *,
    counting: bool,
    columns: torch.dtype | None = None,
    starts: Tensor | None = None,
) -> None:
    """`columns`: the format of the transposed forms, if it is another than `kind`. `starts`: of documents."""
    N, C = B * T, H * D
    qkv, dout = spread(draw, N, 3 * C), spread(draw, N, C)
    out, dqkv = (torch.full((N, width), math.nan, dtype=draw.dtype, device=draw.device) for width in (C, 3 * C))
    lse = torch.full((B, H, T), math.nan, device=draw.device)
    size = attention_scratch_bytes(batch=B, length=T, num_heads=H)
    scratch = torch.full((size,), 255, dtype=torch.uint8, device=draw.device)
    mask = Mask(None if starts is None else starts.to(draw.device))
    ops_attention.attention_forward(out, lse, qkv, scratch=scratch, mask=mask)
    attention_triton.attention_backward(dqkv, dout, out, lse, qkv, scratch=scratch, mask=mask)

    def programs(kernel: str) -> int:
        return B * H * triton.cdiv(T, rows_of(kernel, attention_triton.choose_config(kernel, qkv, D)))

    options = {"scale": SCALES[kind], "counting": counting, "columns_kind": columns}
    used = programs("forward")
    tensor = make(N, C, max(used, parts_of(N, C)), kind, draw.device, **options)
    for name, form in forms_of(tensor).items():
        found = replace(prepared(form, used), plain=torch.full_like(out, math.nan))
        wanted = expected(found, out)
        found_lse = torch.full_like(lse, math.nan)
        attention.attention_forward(found, found_lse, qkv, scratch=scratch, mask=mask)
        assert found.plain is not None and torch.equal(found.plain, out) and torch.equal(found_lse, lse), name
        same(found, wanted)
        counts(found, counting)

    used = programs("dq") + programs("dkdv")
    tensor = make(N, 3 * C, used, kind, draw.device, **options)
    for form in forms_of(tensor).values():
        with_plain = replace(prepared(form, used), plain=torch.full_like(dqkv, math.nan))
        before = copy(with_plain)
        inputs = dout, replace(copy(tensor), plain=out), lse, qkv
        attention.attention_backward(with_plain, *inputs, scratch=scratch, mask=mask)
        assert with_plain.plain is not None
        same(with_plain, expected(before, with_plain.plain))
        counts(with_plain, counting)
        # A kernel of other outputs may add in another order (delta, a sum over a row): a rounding in a thousand flips.
        eps = torch.finfo(draw.dtype).eps
        assert (with_plain.plain - dqkv).norm() <= eps * dqkv.norm()
        found = prepared(form, used)
        attention.attention_backward(found, *inputs, scratch=scratch, mask=mask)
        for name in ("rows", "columns"):
            ours, theirs = getattr(found, name), getattr(with_plain, name)
            if ours is not None:
                assert (ours.view(torch.uint8) != theirs.view(torch.uint8)).float().mean() <= 0.01, name


def counts(found: Quantized, counting: bool) -> None:
    """The inputs are such that there is something to count, at the scale for the format."""
    if counting and not found.current and found.scaling[formats.SCALE] == SCALES[found.format]:
        assert totals(found)[CLIPPED] > 0 and (totals(found)[VANISHED] > 0 or found.format == formats.E5M2)
