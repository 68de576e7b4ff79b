"""Generation, one token per sequence at a time. No operation here waits for the host, so a CUDA graph can replay a step.

Each sequence of the batch has its own position. The model's block runs on the operations of this module; the row-wise ones
have the names of training's. Nothing reads their `ln`, `mean`, `rstd` and `hidden` here.
"""

import math

import torch
from torch import Tensor

from handgrad.machine.devices import accumulation_dtype
from handgrad.ops import compose
from handgrad.ops.hashing import BITS32, WEYL, mixed
from handgrad.ops.reference import attention
from handgrad.ops.reference.activations import (
    geglu_forward,  # noqa: F401
    linear_gelu_forward,  # noqa: F401
    linear_relu2_forward,  # noqa: F401
    linear_residual_forward,
    linear_swiglu_forward,  # noqa: F401
    residual_forward,  # noqa: F401
)
from handgrad.ops.reference.attention import for_queries, split_heads
from handgrad.ops.reference.classifier import softcap_forward  # noqa: F401
from handgrad.ops.reference.layernorm import layernorm_forward  # noqa: F401
from handgrad.ops.reference.linear import linear_forward
from handgrad.ops.reference.mix import mix_forward
from handgrad.ops.reference.rmsnorm import rmsnorm_forward
from handgrad.ops.reference.rotary import Frequencies, gained_norm, qk_norm_forward, rotate
from handgrad.ops.reference.value_embedding import value_embedding_decode  # noqa: F401

SHARE_UNIT = 2.0**60  # scales probabilities to integers: exact above 2^-36, and their sum fits 63 bits
DRAW_BITS = 23  # random bits per draw: with the added half, the 24 that a float32 holds exactly
SMALLEST_TEMPERATURE = 1e-6  # except 0: far below the spacing of float32 logits, so a draw chooses among equals only

compose.bind_norms_and_gemms(__name__)
mix_rmsnorm_linear_forward = compose.after_mix(mix_forward, compose.after_rmsnorm(rmsnorm_forward, linear_forward, 1))


def embedding_decode(out: Tensor, tokens: Tensor, positions: Tensor, wte: Tensor, wpe: Tensor) -> None:
    """out (B, C) = wte (Vp, C) at tokens (B) + wpe (maxT, C) at positions (B)."""
    torch.index_select(wte, 0, tokens, out=out)
    out.add_(wpe.index_select(0, positions))


def token_embedding_decode(out: Tensor, tokens: Tensor, wte: Tensor) -> None:
    """out (B, C) = wte (Vp, C) at tokens (B)."""
    torch.index_select(wte, 0, tokens, out=out)


def rotary_forward(
    qkv_inout: Tensor, *, num_heads: int, positions: Tensor, frequencies: Frequencies = None, scale: float = 1.0
) -> None:
    """Rotates queries and keys (B, 3C) to positions (B) int64."""
    rotate(qkv_inout, positions, num_heads, 1, frequencies, scale)


def qk_norm_rotary_forward(qkv_inout: Tensor, rstd: Tensor, *, positions: Tensor) -> None:
    """qkv_inout (B, 3C), rstd (B, 2H): norm of each head's query and key, then rotation to positions (B) int64."""
    qk_norm_forward(qkv_inout, rstd)
    rotary_forward(qkv_inout, num_heads=rstd.shape[1] // 2, positions=positions)


def gained_qk_norm_rotary_forward(
    out: Tensor,
    rstd: Tensor,
    qkv: Tensor,
    q_gain: Tensor,
    k_gain: Tensor,
    *,
    positions: Tensor,
    frequencies: tuple[float, ...],
    scale: float,
    epsilon: float,
    plus: float = 0,
) -> None:
    """out, qkv (B, (H + 2K) D), rstd (B, H + K), gains (D): norm, gain, and rotation to positions (B) int64."""
    num_heads = gained_norm(out, rstd, qkv, q_gain, k_gain, epsilon, plus)
    rotary_forward(out, num_heads=num_heads, positions=positions, frequencies=frequencies, scale=scale)


def attention_decode(
    out: Tensor,
    keys_inout: Tensor,
    values_inout: Tensor,
    qkv: Tensor,
    positions: Tensor,
    *,
    window: int = 0,
    scratch: Tensor | None = None,
    arrivals: Tensor | None = None,
) -> None:
    """Attention of one new token per sequence: appends its key and value to the caches (B, K, maxT, D) at positions (B) and
    attends to 0..positions[b], or to the last `window` of these. out (B, H D), qkv (B, (H + 2K) D). It reads nothing after
    that position."""
    slots = torch.arange(len(positions), device=qkv.device)
    store_keys_values_at(keys_inout, values_inout, qkv, slots, positions)
    attention_append(out, keys_inout, values_inout, qkv, slots, positions, window=window)


def advance(tokens: Tensor, positions_inout: Tensor, places_inout: Tensor, chosen: Tensor, active: Tensor) -> None:
    """Moves the sequences to their next step, all (B) int64: tokens = max(chosen, 0), since -1 is no token and the host
    ends such a text; positions += active; places += 1."""
    torch.clamp(chosen, min=0, out=tokens)
    positions_inout.add_(active)
    places_inout.add_(1)


attention_linear_residual_forward = compose.after_attention(attention_decode, linear_residual_forward)


def store_keys_values(keys_inout: Tensor, values_inout: Tensor, qkv: Tensor, slots: Tensor) -> None:
    """Stores the keys and values of whole prompts in the caches (B, K, maxT, D): qkv (B' T, (H + 2K) D) of B' prompts, at
    positions 0..T-1 of the sequences slots (B'), which must be distinct."""
    _, K, _, D = keys_inout.shape
    _, k, v = split_heads(qkv, slots.shape[0], qkv.shape[1] // D - 2 * K, D)
    T = k.shape[2]
    keys_inout[slots, :, :T] = k
    values_inout[slots, :, :T] = v


def store_keys_values_at(keys_inout: Tensor, values_inout: Tensor, qkv: Tensor, slots: Tensor, positions: Tensor) -> None:
    """`store_keys_values` for tokens at positions (B' T) int64, sequence by sequence. Several padded tokens may
    share the cache's last position; any one of them stays there."""
    B, (_, K, _, D) = slots.shape[0], keys_inout.shape
    _, k, v = split_heads(qkv, B, qkv.shape[1] // D - 2 * K, D)
    index = slots.unsqueeze(1), slice(None), positions.view(B, -1)
    keys_inout[index] = k.transpose(1, 2)
    values_inout[index] = v.transpose(1, 2)


def attention_append(
    out: Tensor,
    keys: Tensor,
    values: Tensor,
    qkv: Tensor,
    slots: Tensor,
    positions: Tensor,
    *,
    window: int = 0,
    scratch: Tensor | None = None,
) -> None:
    """Attention of several new tokens for each of B' sequences. The caches (B, K, maxT, D) already hold their keys and
    values; each token attends to positions up to its own, or to the last `window` of these. out (B' T, H D),
    qkv (B' T, (H + 2K) D), slots (B'), positions (B' T) as in `store_keys_values_at`."""
    B, (_, K, maxT, D) = slots.shape[0], keys.shape
    q, _, _ = split_heads(qkv, B, qkv.shape[1] // D - 2 * K, D)
    H, T = q.shape[1:3]
    q = q.to(accumulation_dtype(qkv.dtype))
    columns, own = torch.arange(maxT, device=qkv.device), positions.view(B, 1, T, 1)
    later = columns > own
    hidden = later | (columns <= own - window) if window else later
    weights = torch.softmax(attention.masked_scores(q, for_queries(keys[slots], H, 1).to(q.dtype), hidden), -1)
    # Unwritten cache memory may hold NaN, and a weight of 0 does not remove it.
    unseen = later.all(2).view(B, 1, maxT, 1)
    y = torch.matmul(weights, for_queries(values[slots], H, 1).to(q.dtype).masked_fill(unseen, 0))
    out.view(B, T, H, D).copy_(y.transpose(1, 2))


# The next token. Let l be the logits. Repetition penalty r (Keskar et al. 2019, CTRL, with the sign rule that later became
# common: l / r if l > 0, else l r) for tokens already in the sequence; then l / temperature; then three filters, each on
# the tokens that the previous one kept:
#   top-k (Fan et al. 2018): the k likeliest;
#   top-p (Holtzman et al. 2020): the likeliest until their probabilities add up to p or more;
#   min-p (Nguyen et al. 2024): those at least min_p times as likely as the likeliest.
# A filter also keeps every token as likely as the last one that it keeps, so the order of equals does not matter.
# The draw is argmax(l + g) over the remaining tokens, g = -log(-log u) (Gumbel-max trick; Maddison et al. 2014): token i
# has probability softmax(l)_i. u is a hash of (seed, position, token id), with the hash of stochastic rounding: a draw has
# no state, and depends neither on the batch nor on the device.


def choosing_scratch_bytes(*, batch: int, vocab_size: int) -> int:
    """Bytes of `scratch` that `choose_tokens` needs: none here."""
    return 0


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
    scratch: Tensor | None = None,
) -> None:
    """tokens_out (B) int64 from logits (B, Vp); columns from vocab_size on are padding. -1 for a row with a logit that is
    not finite.

    seeds (B) int64; positions (B) int64: the chosen token's position in its text. temperature 0 takes the likeliest token,
    the lowest id among equals; any other must be at least `SMALLEST_TEMPERATURE`. top_k 0, top_p 1, min_p 0 and
    repetition_penalty 1 switch each off. seen_inout (B, V) bool marks the tokens of a sequence and receives the chosen one;
    None if repetition_penalty is 1. The arithmetic is float32, for float64 logits float64."""
    assert temperature == 0 or temperature >= SMALLEST_TEMPERATURE
    scores = logits[:, :vocab_size].to(accumulation_dtype(logits.dtype))
    finite = torch.isfinite(scores).all(1)
    scores = scores.masked_fill(~finite.unsqueeze(1), 0)
    if repetition_penalty != 1:
        assert seen_inout is not None
        penalised = torch.where(scores > 0, scores / repetition_penalty, scores * repetition_penalty)
        scores = torch.where(seen_inout, penalised, scores)
    if temperature:
        scores = (scores - scores.amax(1, keepdim=True)) / temperature  # at most 0: no exponential overflows
        scores = filtered(scores, top_k=top_k, top_p=top_p, min_p=min_p)
        scores = scores + gumbel(seeds, positions, vocab_size).to(scores.dtype)
    chosen = scores.argmax(1)
    if seen_inout is not None:
        seen_inout.scatter_(1, chosen.unsqueeze(1), True)
    tokens_out.copy_(chosen.masked_fill(~finite, -1))


def filtered(scores: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor:
    """scores (B, V), with minus infinity for tokens that a filter removes. The largest score of each row is 0."""
    if 0 < top_k < scores.shape[1]:
        least = scores.topk(top_k).values[:, -1:]
        scores = scores.masked_fill(scores < least, -math.inf)
    if top_p < 1:
        ordered = scores.sort(descending=True).values
        # Integers, because their sum does not depend on the order: a GPU adds a single row as its blocks finish.
        shares = (torch.softmax(ordered, 1) * SHARE_UNIT).to(torch.int64)
        likelier = shares.cumsum(1) - shares  # the total share of likelier tokens
        least = ordered.masked_fill(likelier >= max(1, int(top_p * SHARE_UNIT)), math.inf).amin(1, keepdim=True)
        scores = scores.masked_fill(scores < least, -math.inf)
    if min_p > 0:
        scores = scores.masked_fill(scores < math.log(min_p), -math.inf)
    return scores


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """(B, V) float32 Gumbel noise, a function of seed, position and token id. u = (r + 1/2) / 2^23 with r of 23 bits is
    exact in float32, and never 0 or 1."""
    key = mixed((positions & BITS32) ^ mixed((seeds & BITS32) ^ mixed((seeds >> 32) & BITS32)))
    ids = torch.arange(vocab_size, dtype=torch.int64, device=seeds.device)
    bits = mixed((ids * WEYL + key.unsqueeze(1)) & BITS32) >> (32 - DRAW_BITS)
    u = (bits.float() + 0.5) * 2.0**-DRAW_BITS
    return -torch.log(-torch.log(u))
