"""An OLMo in plain PyTorch with autograd, from a table of tensors under handgrad's names."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from handgrad.networks.olmo import OlmoShape, family_of
from handgrad.settings.config import ModelShape

# Members of odd sizes; of OLMo 3 with windows shorter than a row and more than one layer that sees all of it.
FAMILIES = {
    "olmo2": "kv_heads=2,feed_forward=33,norm_epsilon=1e-05",
    "olmo3": "feed_forward=50,window=5,full_every=2,rotary_base=1000.0,rope=yarn,rope_factor=4.0,rope_length=16,"
    "rope_scale=1.2",
}


def normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, epsilon)


def frequencies(family: OlmoShape, D: int, windowed: bool) -> Tensor:
    """By yarn's rule (https://arxiv.org/abs/2309.00071, section 3.2) without a window."""
    plain = family.rotary_base ** (-2 * torch.arange(D // 2, dtype=torch.float64) / D)
    if windowed or family.rope == "plain":
        return plain
    pair = [
        D * math.log(family.rope_length / (2 * math.pi * turns)) / (2 * math.log(family.rotary_base)) for turns in (32, 1)
    ]
    first, last = max(math.floor(pair[0]), 0), min(math.ceil(pair[1]), D - 1)
    stretched = ((torch.arange(D // 2) - first) / (last - first)).clamp(0, 1)
    return plain * (1 - stretched) + plain / family.rope_factor * stretched


def rotated(x: Tensor, family: OlmoShape, windowed: bool) -> Tensor:
    """x (B, heads, T, D)."""
    angles = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * frequencies(family, x.shape[-1], windowed)
    scale = 1.0 if windowed else family.rope_scale
    cos, sin = (scale * t.to(x.dtype) for t in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def block(x: Tensor, w: dict[str, Tensor], shape: ModelShape, layer: int) -> Tensor:
    """x (B, T, C), the weights of one block by name."""
    (B, T, C), family = x.shape, family_of(shape)
    H, K, D, epsilon = shape.num_heads, family.kv_heads, C // shape.num_heads, family.norm_epsilon
    windowed = family.window > 0 and (layer + 1) % family.full_every != 0
    q, k, v = F.linear(x, w["qkv_weight"]).split((C, K * D, K * D), -1)
    q, k = normed(q, w["q_gain"], epsilon), normed(k, w["k_gain"], epsilon)
    q, k, v = (t.view(B, T, -1, D).transpose(1, 2) for t in (q, k, v))
    q, k = (rotated(t, family, windowed) for t in (q, k))
    k, v = (t.repeat_interleave(H // K, 1) for t in (k, v))
    places = torch.arange(T)
    distance = places[:, None] - places
    seen = (distance >= 0) & (distance < (family.window if windowed else T))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    y = F.linear(y.transpose(1, 2).reshape(B, T, C), w["proj_weight"])
    x = x + normed(y, w["after1_gain"], epsilon)
    gate, up = F.linear(x, w["gate_up_weight"]).chunk(2, -1)
    return x + normed(F.linear(F.silu(gate) * up, w["down_weight"]), w["after2_gain"], epsilon)


def logits(weights: dict[str, Tensor], tokens: Tensor, shape: ModelShape) -> Tensor:
    """(B, T, V); `weights` without padding rows."""
    x = weights["wte"][tokens]
    for layer in range(shape.num_layers):
        start = f"blocks.{layer}."
        own = {name.removeprefix(start): values for name, values in weights.items() if name.startswith(start)}
        x = block(x, own, shape, layer)
    return F.linear(normed(x, weights["lnf_gain"], family_of(shape).norm_epsilon), weights["head"])
