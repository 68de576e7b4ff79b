"""Attention for generation: one query per head, over the keys and values of a cache.

Few heads would leave most of a GPU idle. So up to S programs share the keys of a head, one part each (flash-decoding, Dao
et al. 2023). Part s takes the tiles s, s + S, s + 2 S, ... of the keys: parts are equally long at every position. The
program that arrives last adds all parts, in their order: no further launch, and no race decides the sum. A text with few
keys has one part, and nothing to add.

A prompt whose beginning is in the cache has several new queries (`attention_append`): the forward of FlashAttention-2
(Dao 2023), with keys and values from the cache. A program takes a tile of one head's queries and walks over all keys up
to the tile's last query.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from handgrad.ops.cuda.attention_loops import forward_step
from handgrad.ops.cuda.attention_tiles import capability, choose_config, is_before_ampere
from handgrad.ops.cuda.launch import launch, overlapping

NOTHING = tl.constexpr(-1e30)  # below every real score

# (numbers, warps) of an attention tile: 256 keys of 64 channels at once for few programs, each with a multiprocessor to
# itself; 64 of 128, so that more programs share a head (benchmarks/results/h200-decode-programs.json); fewer if many share
# a multiprocessor.
FEW_PROGRAMS = 264
FEW_ATTENTIONS, FEW_OF_128, MANY_ATTENTIONS = (16384, 8), (8192, 4), (4096, 2)

MOST_PARTS = 16  # parts of a head's keys

# For several new tokens: queries and keys per tile, and warps; then the same before Ampere, where larger tiles spill.
APPEND_TILE, TURING_APPEND_TILE = (64, 32, 4), (16, 16, 8)


def parts_of(programs: int, maxT: int, keys_at_once: int) -> int:
    """Parts of each head's keys, a power of two: as many as a full cache has tiles, while all programs are few."""
    parts = min(MOST_PARTS, triton.next_power_of_2(triton.cdiv(maxT, keys_at_once)))
    while parts > 1 and parts * programs > FEW_PROGRAMS:
        parts //= 2
    return parts


def attention_decode(
    out: Tensor,
    keys_inout: Tensor,
    values_inout: Tensor,
    qkv: Tensor,
    positions: Tensor,
    *,
    window: int = 0,
    scratch: Tensor,
    arrivals: Tensor | None = None,
) -> None:
    """`arrivals`: zeros, which stay zeros; None: a program for each head."""
    B, K, maxT, D = keys_inout.shape
    H = out.shape[1] // D
    if K < H and B * K >= FEW_PROGRAMS and not window and qkv.element_size() == 2:
        attention_in_tiles(out, keys_inout, values_inout, qkv, positions)  # which reads the keys of a group once
        return
    scale, block = 1 / (math.sqrt(D) * math.log(2)), triton.next_power_of_2(D)
    few = FEW_OF_128 if block == 128 else FEW_ATTENTIONS
    elements, warps = few if B * H < FEW_PROGRAMS else MANY_ATTENTIONS
    tile, warps = (max(16, elements // block), block), max(warps, block // 64)  # two warps spill heads of 256
    parts, numbers = 1 if arrivals is None else parts_of(B * H, maxT, tile[0]), (None, None, None)
    if parts > 1:
        rows, needed = B * H * parts, 4 * B * H * parts * (block + 2)
        assert scratch.numel() >= needed, f"scratch of {scratch.numel()} bytes, {needed} needed"
        numbers = scratch[:needed].view(torch.float32).split([rows * block, rows, rows])
    tensors = out, *numbers, arrivals, keys_inout, values_inout, qkv, positions
    sizes = H, maxT, D, scale, *tile, H // K, parts
    launch(_attention, (H, parts, B), *tensors, *sizes, WINDOW=window, **overlapping(out, warps))


def attention_append(
    out: Tensor,
    keys: Tensor,
    values: Tensor,
    qkv: Tensor,
    slots: Tensor,
    positions: Tensor,
    *,
    window: int = 0,
    scratch: Tensor,
) -> None:
    (_, K, maxT, D), B = keys.shape, slots.shape[0]
    H, T = out.shape[1] // D, out.shape[0] // B
    tensors, scale = (out, keys, values, qkv, slots, positions), 1 / (math.sqrt(D) * math.log(2))
    queries, keys_at_once, warps = TURING_APPEND_TILE if is_before_ampere(capability(qkv.device)) else APPEND_TILE
    tile = queries, keys_at_once, max(16, triton.next_power_of_2(D)), H // K
    grid, options = (triton.cdiv(T, queries), H, B), {"WINDOW": window, "num_warps": warps}
    launch(_attention_append, grid, *tensors, H, T, maxT, D, scale, *tile, **options)


def attention_in_tiles(out: Tensor, keys_inout: Tensor, values_inout: Tensor, qkv: Tensor, positions: Tensor) -> None:
    """`attention_decode` in the tiles and the steps of the training kernel, so with its bits. The query heads that share
    keys are the rows of a tile on the tensor cores."""
    B, K, maxT, D = keys_inout.shape
    H = out.shape[1] // D
    config = choose_config("forward", qkv, D, K < H)
    distance = (values_inout.data_ptr() - keys_inout.data_ptr()) // keys_inout.element_size()
    tile = config.queries, config.keys, max(16, triton.next_power_of_2(D)), H // K
    options = {"num_stages": config.stages, **overlapping(out, config.warps)}
    options |= {"maxnreg": config.registers} if config.registers else {}
    tensors = out, keys_inout, qkv, positions
    launch(_attention_in_tiles, (K, B), *tensors, distance, H, maxT, D, *tile, **options)


@triton.jit
def tile_of(keys, values, offset, here, inside):
    mask = here[:, None] & inside[None, :]
    return tl.load(keys + offset, mask=mask, other=0.0), tl.load(values + offset, mask=mask, other=0.0)


@triton.jit
def _attention(
    out, sums, tops, totals, arrivals, keys, values, qkv, positions, H, maxT, D, SCALE, KEYS: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, WINDOW: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A part of one query head's keys. Part 0 includes the new token and stores its key and value; heads that share them
    store the same numbers."""
    h, part, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    channel, n = tl.arange(0, BLOCK), part * KEYS + tl.arange(0, KEYS)
    inside = channel < D
    # Numbers written before this step need no wait.
    position = tl.load(positions + b).to(tl.int32)
    kv_heads, kv_head = H // GROUP, h // GROUP
    cache = (b * kv_heads + kv_head) * maxT * D
    offset = cache + n.to(tl.int64)[:, None] * D + channel[None, :]
    count = position  # of the keys before the new one that it sees
    if WINDOW:
        count = tl.minimum(position, WINDOW - 1)
        offset += (position - count).to(tl.int64) * D
    used = tl.minimum(tl.maximum(tl.cdiv(count, KEYS), 1), PARTS)  # parts with keys
    if part >= used:
        return
    key, value = tile_of(keys, values, offset, n < count, inside)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    at = qkv + b * (H + 2 * kv_heads) * D + h * D + channel
    q = tl.load(at, mask=inside, other=0.0).to(tl.float32) * SCALE
    at += (H + kv_head - h) * D
    k = tl.load(at, mask=inside, other=0.0)
    v = tl.load(at + kv_heads * D, mask=inside, other=0.0)
    is_first = part == 0
    tl.store(keys + cache + position.to(tl.int64) * D + channel, k, mask=inside & is_first)
    tl.store(values + cache + position.to(tl.int64) * D + channel, v, mask=inside & is_first)
    # Every row of the tile keeps its own softmax over the keys it sees: no warp in the loop waits for another.
    # A row that sees none keeps a maximum far below all scores and a sum of 0.
    largest = tl.where(n < count, tl.sum(key.to(tl.float32) * q[None, :], 1), NOTHING)
    total = tl.where(n < count, 1.0, 0.0)
    y = total[:, None] * value.to(tl.float32)
    for start in range(used * KEYS, count - part * KEYS, used * KEYS):
        earlier = start + n < count
        mask = earlier[:, None] & inside[None, :]
        key = tl.load(keys + offset + start * D, mask=mask, other=0.0)
        value = tl.load(values + offset + start * D, mask=mask, other=0.0)
        scores = tl.where(earlier, tl.sum(key.to(tl.float32) * q[None, :], 1), NOTHING)
        above = tl.maximum(largest, scores)
        weights = tl.where(earlier, tl.exp2(scores - above), 0.0)
        before = tl.exp2(largest - above)
        total = total * before + weights
        y = y * before[:, None] + weights[:, None] * value.to(tl.float32)
        largest = above
    # The new token's key and value are in registers; the cache reads stop before its position.
    own = tl.where(is_first, tl.sum(q * k.to(tl.float32)), NOTHING)
    top = tl.maximum(own, tl.max(largest))
    share = tl.exp2(largest - top)
    own_weight = tl.exp2(own - top)
    weight = tl.sum(total * share) + own_weight
    result = tl.sum(y * share[:, None], 0) + own_weight * v.to(tl.float32)
    pointers = out + b * H * D + h * D + channel
    if PARTS == 1 or used == 1:
        tl.store(pointers, (result / weight).to(out.dtype.element_ty), mask=inside)
    else:
        head = b * H + h
        tl.store(sums + (head * PARTS + part) * BLOCK + channel, result)
        tl.store(tops + head * PARTS + part, top)
        tl.store(totals + head * PARTS + part, weight)
        tl.debug_barrier()  # the whole program has written before it says so
        if tl.atomic_add(arrivals + head, 1) == used - 1:
            every = head * PARTS + tl.arange(0, PARTS)
            present = tl.arange(0, PARTS) < used
            each_top = tl.load(tops + every, mask=present, other=NOTHING, cache_modifier=".cg")
            each_share = tl.exp2(each_top - tl.max(each_top))
            all_weights = tl.sum(each_share * tl.load(totals + every, mask=present, other=0.0, cache_modifier=".cg"))
            numbers = sums + every[:, None] * BLOCK + channel[None, :]
            each = tl.load(numbers, mask=present[:, None], other=0.0, cache_modifier=".cg")
            whole = tl.sum(each_share[:, None] * each, 0) / all_weights
            tl.store(pointers, whole.to(out.dtype.element_ty), mask=inside)
            tl.store(arrivals + head, 0)


@triton.jit
def _attention_in_tiles(
    out, keys, qkv, positions, distance, H, maxT, D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The query heads of one head of keys, as the first GROUP rows of a tile. The values are `distance` numbers behind the
    keys."""
    kv_head, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kv_heads, first = H // GROUP, kv_head * GROUP
    query, channel = tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    position = tl.load(positions + b).to(tl.int32)
    row, inside = qkv + b * ((H + 2 * kv_heads) * D), channel < D
    k_head = keys + (b * kv_heads + kv_head) * maxT * D
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    shown = (query < GROUP)[:, None] & inside[None, :]
    q = tl.load(row + (first + query)[:, None] * D + channel[None, :], mask=shown, other=0.0)
    new = row + (H + kv_head) * D + channel
    slot = k_head + position.to(tl.int64) * D + channel
    tl.store(slot, tl.load(new, mask=inside, other=0.0), mask=inside)
    tl.store(slot + distance, tl.load(new + kv_heads * D, mask=inside, other=0.0), mask=inside)
    tl.debug_barrier()  # the last step reads both
    y = tl.zeros((QUERIES, WIDTH), tl.float32)
    m = tl.full((QUERIES,), -float("inf"), tl.float32)
    l = tl.zeros((QUERIES,), tl.float32)
    head = k_head, distance, D, position + 1
    diagonal = position // KEYS * KEYS
    for key in range(0, diagonal, KEYS):
        y, m, l = forward_step(y, m, l, q, head, position, key, D, KEYS, False, False, None, None, None)
    y, m, l = forward_step(y, m, l, q, head, position, diagonal, D, KEYS, True, True, None, None, None, False)
    to = out + (b * H + first) * D + query[:, None] * D + channel[None, :]
    tl.store(to, (y / l[:, None]).to(out.dtype.element_ty), mask=shown)


@triton.jit
def _attention_append(
    out, keys, values, qkv, slots, positions, H, T, maxT, D, SCALE, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    query, channel = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES), tl.arange(0, BLOCK)
    real, inside = query < T, channel < D
    kv_heads, kv_head = H // GROUP, h // GROUP
    row = b * T + query
    position = tl.load(positions + row, mask=real, other=0)
    own = row[:, None] * ((H + 2 * kv_heads) * D) + h * D + channel[None, :]
    q = tl.load(qkv + own, mask=real[:, None] & inside[None, :], other=0.0)
    cache = (tl.load(slots + b) * kv_heads + kv_head) * maxT * D
    largest = tl.full([QUERIES], NOTHING, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    y = tl.zeros([QUERIES, BLOCK], tl.float32)
    last = tl.max(position).to(tl.int32)
    begin = 0
    if WINDOW:
        begin = tl.maximum(tl.min(tl.where(real, position, maxT)).to(tl.int32) - WINDOW + 1, 0) // KEYS * KEYS
    for first in range(begin, last + 1, KEYS):
        n = first + tl.arange(0, KEYS)
        offset = cache + n.to(tl.int64)[:, None] * D + channel[None, :]
        key, value = tile_of(keys, values, offset, n <= last, inside)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee") * SCALE
        seen = n[None, :] <= position[:, None]
        if WINDOW:
            seen &= n[None, :] > position[:, None] - WINDOW
        # A query that sees no key of the first tiles weighs these by 1, and by 0 once it sees one.
        scores = tl.where(seen, scores, NOTHING)
        above = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - above[:, None])
        before = tl.exp2(largest - above)
        total = total * before + tl.sum(weights, 1)
        y = y * before[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        largest = above
    mean = y / total[:, None]
    own = row[:, None] * (H * D) + h * D + channel[None, :]
    tl.store(out + own, mean.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])
