"""Attention of several new tokens of a sequence over its cache, for prompts that begin with tokens that it holds already.

The forward of FlashAttention-2 (Dao 2023), with keys and values from the cache: a program takes a tile of one head's
queries and walks over all keys up to its last query's.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from handgrad.ops.cuda.attention_configs import capability, is_before_ampere
from handgrad.ops.cuda.launch import launch
from handgrad.ops.cuda.row_products import NOTHING

# Queries and keys of a tile, and warps; and the same before Ampere, where larger tiles spill (attention_configs).
TILE, TURING_TILE = (64, 32, 4), (16, 16, 8)


def attention_append(
    out: Tensor, keys: Tensor, values: Tensor, qkv: Tensor, slots: Tensor, positions: Tensor, *, scratch: Tensor
) -> None:
    (_, K, maxT, D), B = keys.shape, slots.shape[0]
    H, T = out.shape[1] // D, out.shape[0] // B
    tensors, scale = (out, keys, values, qkv, slots, positions), 1 / (math.sqrt(D) * math.log(2))
    queries, keys_at_once, warps = TURING_TILE if is_before_ampere(capability(qkv.device)) else TILE
    tile = queries, keys_at_once, max(16, triton.next_power_of_2(D)), H // K
    launch(_attention_append, (triton.cdiv(T, queries), H, B), *tensors, H, T, maxT, D, scale, *tile, num_warps=warps)


@triton.jit
def _attention_append(
    out, keys, values, qkv, slots, positions, H, T, maxT, D, SCALE, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    query, channel = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES), tl.arange(0, BLOCK)
    real, inside = query < T, channel < D
    kv_heads, kv_head = H // GROUP, h // GROUP
    row = b * T + query
    position = tl.load(positions + row, mask=real, other=0)
    mine = row[:, None] * ((H + 2 * kv_heads) * D) + h * D + channel[None, :]
    q = tl.load(qkv + mine, mask=real[:, None] & inside[None, :], other=0.0)
    cache = (tl.load(slots + b) * kv_heads + kv_head) * maxT * D
    largest = tl.full([QUERIES], NOTHING, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    y = tl.zeros([QUERIES, BLOCK], tl.float32)
    last = tl.max(position).to(tl.int32)
    for first in range(0, last + 1, KEYS):
        n = first + tl.arange(0, KEYS)
        place = cache + n.to(tl.int64)[:, None] * D + channel[None, :]
        mask = (n <= last)[:, None] & inside[None, :]
        key = tl.load(keys + place, mask=mask, other=0.0)
        value = tl.load(values + place, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee") * SCALE
        scores = tl.where(n[None, :] <= position[:, None], scores, NOTHING)
        above = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - above[:, None])
        before = tl.exp2(largest - above)
        total = total * before + tl.sum(weights, 1)
        y = y * before[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        largest = above
    found = y / total[:, None]
    mine = row[:, None] * (H * D) + h * D + channel[None, :]
    tl.store(out + mine, found.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])
