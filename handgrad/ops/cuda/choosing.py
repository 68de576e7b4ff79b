"""The choice of the next token: each program takes a part of the logits, then one picks the best of all parts.

With one program per sequence, a single multiprocessor would compute 50,257 hashes and logarithms: 32 us. In parts it
takes 6.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from handgrad.ops.cuda.hashing import WEYL, mixed
from handgrad.ops.cuda.launch import launch, overlapping
from handgrad.ops.reference import decode as reference
from handgrad.ops.reference.decode import DRAW_BITS
from handgrad.ops.sizes import CHOICES, choosing_scratch_bytes

SHIFT, UNIT = tl.constexpr(32 - DRAW_BITS), tl.constexpr(2.0**-DRAW_BITS)


def choose_tokens(
    tokens_out: Tensor,
    logits: Tensor,
    seen_inout: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    *,
    vocab_size: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    scratch: Tensor,
) -> None:
    """Calls the reference for top-k and top-p, which need the tokens sorted."""
    if temperature and (0 < top_k < vocab_size or top_p < 1):
        filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        settings = {"vocab_size": vocab_size, "temperature": temperature, "repetition_penalty": repetition_penalty}
        reference.choose_tokens(tokens_out, logits, seen_inout, seeds, positions, **filters, **settings)
        return
    B, parts = logits.shape[0], triton.cdiv(vocab_size, CHOICES)
    needed = choosing_scratch_bytes(batch=B, vocab_size=vocab_size)
    assert scratch.numel() >= needed, f"scratch of {scratch.numel()} bytes, {needed} needed"
    # For every part: its largest logit and its largest draw, the id (of either), and a flag for a logit that is not finite.
    values, numbers = scratch[:needed].view(2, -1)
    largest, drawn = values.view(torch.float32).view(2, B, parts)
    ids, broken = numbers.view(torch.int32).view(2, B, parts)
    seen = None if seen_inout is None else seen_inout.view(torch.uint8)
    sizes, padded, grid = (vocab_size, logits.shape[1]), triton.next_power_of_2(parts), (parts, B)
    outputs = largest, ids, broken, logits, seen
    launch(_greatest, grid, *outputs, *sizes, repetition_penalty, CHOICES, **overlapping(logits, 4))
    if temperature:
        least = math.log(min_p) if min_p else -math.inf
        drawing = seeds, positions, *sizes, temperature, repetition_penalty, least
        launch(_draw, grid, drawn, ids, largest, logits, seen, *drawing, CHOICES, padded, **overlapping(logits, 4))
    chosen = drawn if temperature else largest
    launch(_join, (B,), tokens_out, seen, chosen, ids, broken, vocab_size, parts, padded, **overlapping(logits, 1))


@triton.jit
def _greatest(
    values_out, ids_out, broken_out, logits, seen, V, stride, penalty, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):
    """The largest logit of a part, its id, and a flag for a logit that is not finite."""
    part, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    index = part * BLOCK + tl.arange(0, BLOCK)
    scores = _scores(logits, seen, b, index, V, stride, penalty)
    broken = (index < V) & ~(tl.abs(scores) < float("inf"))
    largest = tl.max(scores)
    out = b * tl.num_programs(0) + part
    tl.store(values_out + out, largest)
    tl.store(ids_out + out, tl.min(tl.where(scores == largest, index, V)))
    tl.store(broken_out + out, tl.max(broken.to(tl.int32)))


@triton.jit
def _draw(
    values_out, ids_out, largest, logits, seen, seeds, positions, V, stride, temperature, penalty, least,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The largest perturbed score of a part, and its id."""
    part, b, parts = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    of = tl.arange(0, PARTS)
    top = tl.max(tl.load(largest + b * parts + of, mask=of < parts, other=float("-inf")))
    index = part * BLOCK + tl.arange(0, BLOCK)
    scores = tl.div_rn(_scores(logits, seen, b, index, V, stride, penalty) - top, temperature)
    seed, position = tl.load(seeds + b), tl.load(positions + b)
    key = mixed(position.to(tl.uint32) ^ mixed(seed.to(tl.uint32) ^ mixed((seed >> 32).to(tl.uint32))))
    bits = mixed(index.to(tl.uint32) * WEYL + key) >> SHIFT
    drawn = tl.where((scores >= least) & (index < V), scores + _gumbel(bits), float("-inf"))
    best = tl.max(drawn)
    tl.store(values_out + b * parts + part, best)
    tl.store(ids_out + b * parts + part, tl.min(tl.where(drawn == best, index, V)))


@triton.jit
def _join(tokens_out, seen, values, ids, broken, V, parts, PARTS: tl.constexpr, OVERLAPS: tl.constexpr):
    """The token of the largest value over all parts, the lowest id among equals."""
    b = tl.program_id(0).to(tl.int64)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    of = tl.arange(0, PARTS)
    here = of < parts
    value = tl.load(values + b * parts + of, mask=here, other=float("-inf"))
    candidates = tl.load(ids + b * parts + of, mask=here, other=V)
    chosen = tl.min(tl.where(value == tl.max(value), candidates, V))
    finite = tl.max(tl.load(broken + b * parts + of, mask=here, other=0)) == 0
    tl.store(tokens_out + b, tl.where(finite, chosen, -1).to(tl.int64))
    if seen is not None:
        tl.store(seen + b * V + tl.where(finite, chosen, 0), 1, mask=finite)


@triton.jit
def _scores(logits, seen, b, index, V, stride, penalty):
    """float32 logits, with the repetition penalty if there is one; minus infinity beyond the vocabulary."""
    scores = tl.load(logits + b * stride + index, mask=index < V, other=float("-inf")).to(tl.float32)
    if seen is not None:
        penalised = tl.where(scores > 0, tl.div_rn(scores, penalty), scores * penalty)
        scores = tl.where(tl.load(seen + b * V + index, mask=index < V, other=0) != 0, penalised, scores)
    return scores


@triton.jit
def _gumbel(bits):
    """-log(-log u), u = (bits + 1/2) / 2^23. The large draws come from u near 1, where the hardware's logarithm has no
    digits left; there -log u is a series in 1 - u, which is exact."""
    u = (bits.to(tl.float32) + 0.5) * UNIT
    v = 1.0 - u
    series = v * (1.0 + v * (1.0 / 2 + v * (1.0 / 3 + v * (1.0 / 4 + v * (1.0 / 5)))))
    return -tl.log(tl.where(v < 1.0 / 32, series, -tl.log(u)))
