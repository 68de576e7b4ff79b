"""A Gemma 3 in plain PyTorch with autograd, from a table of tensors under handgrad's names."""

import torch
import torch.nn.functional as F
from torch import Tensor

from handgrad.networks.gemma3 import family_of
from handgrad.settings.config import ModelShape

# Members of odd sizes, with windows shorter than a row and more than one layer that sees all of it.
FAMILIES = {
    "gemma3": "kv_heads=1,head_width=10,feed_forward=33,window=5,full_every=2,rotary_base=1000.0,window_rotary_base=50.0",
    "gemma3 of 4B": "kv_heads=2,head_width=6,feed_forward=50,window=7,full_every=3,rope_factor=8.0,score_width=9",
}


def normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), None, epsilon) * (1 + weight)


def rotated(x: Tensor, base: float, factor: float) -> Tensor:
    """x (B, heads, T, D)."""
    D = x.shape[-1]
    frequencies = base ** (-2 * torch.arange(D // 2, dtype=torch.float64) / D) / factor
    angles = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * frequencies
    cos, sin = (t.to(x.dtype) for t in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def block(x: Tensor, w: dict[str, Tensor], shape: ModelShape, layer: int) -> Tensor:
    """x (B, T, C), the weights of one block by name."""
    (B, T, _), family = x.shape, family_of(shape)
    H, K, D, epsilon = shape.num_heads, family.kv_heads, family.head_width, family.norm_epsilon
    windowed = (layer + 1) % family.full_every != 0
    base, factor = (family.window_rotary_base, 1.0) if windowed else (family.rotary_base, family.rope_factor)
    packed = F.linear(normed(x, w["norm1_gain"], epsilon), w["qkv_weight"])
    q, k, v = packed.view(B, T, -1, D).transpose(1, 2).split((H, K, K), 1)
    q, k = (rotated(normed(t, w[f"{name}_gain"], epsilon), base, factor) for name, t in (("q", q), ("k", k)))
    k, v = (t.repeat_interleave(H // K, 1) for t in (k, v))
    places = torch.arange(T)
    distance = places[:, None] - places
    seen = (distance >= 0) & (distance < (family.window if windowed else T))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=family.score_width**-0.5)
    y = F.linear(y.transpose(1, 2).reshape(B, T, H * D), w["proj_weight"])
    x = x + normed(y, w["after1_gain"], epsilon)
    gate, up = F.linear(normed(x, w["norm2_gain"], epsilon), w["gate_up_weight"]).chunk(2, -1)
    hidden = F.linear(F.gelu(gate, approximate="tanh") * up, w["down_weight"])
    return x + normed(hidden, w["after2_gain"], epsilon)


def logits(weights: dict[str, Tensor], tokens: Tensor, shape: ModelShape) -> Tensor:
    """(B, T, V); `weights` without padding rows."""
    wte = weights["wte"]
    x = wte[tokens] * torch.tensor(shape.channels**0.5, dtype=torch.float32).to(wte.dtype)
    for layer in range(shape.num_layers):
        start = f"blocks.{layer}."
        own = {name.removeprefix(start): values for name, values in weights.items() if name.startswith(start)}
        x = block(x, own, shape, layer)
    return F.linear(normed(x, weights["lnf_gain"], family_of(shape).norm_epsilon), wte)
