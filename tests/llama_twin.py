"""A Llama in plain PyTorch with autograd, from a table of tensors under handgrad's names; `OTHERS` have a file each."""

import torch
import torch.nn.functional as F
from torch import Tensor

from handgrad.settings.config import ModelShape
from tests import gemma3_twin, olmo_twin

# A member of each family, of odd sizes: (layers, heads, channels), the family's numbers.
FAMILIES = {
    "llama": "kv_heads=2,tied,rotary_base=500000.0,rope=llama3,rope_factor=8.0,rope_length=16",
    "qwen2": "kv_heads=1,qkv_bias,feed_forward=50,norm_epsilon=1e-06,rope=yarn,rope_factor=4.0,rope_length=16,"
    "rope_fast=32.0,rope_scale=1.2",
    "qwen3": "kv_heads=2,head_width=10,qk_norm,feed_forward=33,norm_epsilon=1e-06",
    "smollm3": "kv_heads=2,tied,nope_interval=2,rotary_base=2e6,rope=yarn,rope_factor=4.0,rope_length=16,rope_scale=1.2",
    "mistral": "kv_heads=2,window=5",
    "wide": "head_width=4",
}
OTHERS = {"gemma3": gemma3_twin, "olmo": olmo_twin}
EVERY = FAMILIES | gemma3_twin.FAMILIES | olmo_twin.FAMILIES


def shape_of(family: str, vocab_size: int = 57, length: int = 19, layers: int = 3) -> ModelShape:
    network = next((name for name, twin in OTHERS.items() if family in twin.FAMILIES), "llama")
    return ModelShape(vocab_size, length, layers, 4, 24, network, **{network: EVERY[family]})


def normed(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), gain, epsilon)


def rotated(x: Tensor, shape: ModelShape, layer: int) -> Tensor:
    """x (B, heads, T, D)."""
    if shape.family.nope_interval and (layer + 1) % shape.family.nope_interval == 0:
        return x
    frequencies = torch.tensor(shape.family.frequencies, dtype=torch.float64)
    angles = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * frequencies
    cos, sin = (shape.family.rope_scale * t.to(x.dtype) for t in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def block(x: Tensor, w: dict[str, Tensor], shape: ModelShape, layer: int) -> Tensor:
    """x (B, T, C), the weights of one block by name."""
    (B, T, _), family = x.shape, shape.family
    H, K, D = shape.num_heads, family.kv_heads, family.head_width
    packed = F.linear(normed(x, w["norm1_gain"], family.norm_epsilon), w["qkv_weight"], w.get("qkv_bias"))
    q, k, v = packed.view(B, T, -1, D).transpose(1, 2).split((H, K, K), 1)
    if family.qk_norm:
        q, k = (normed(t, w[f"{name}_gain"], family.norm_epsilon) for name, t in (("q", q), ("k", k)))
    q, k = rotated(q, shape, layer), rotated(k, shape, layer)
    k, v = (t.repeat_interleave(H // K, 1) for t in (k, v))
    places = torch.arange(T)
    seen = (places <= places[:, None]) & (places > places[:, None] - (family.window or T))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    x = x + F.linear(y.transpose(1, 2).reshape(B, T, H * D), w["proj_weight"])
    gate, up = F.linear(normed(x, w["norm2_gain"], family.norm_epsilon), w["gate_up_weight"]).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, w["down_weight"])


def logits(weights: dict[str, Tensor], tokens: Tensor, shape: ModelShape) -> Tensor:
    """(B, T, V); `weights` without padding rows."""
    if shape.architecture in OTHERS:
        return OTHERS[shape.architecture].logits(weights, tokens, shape)
    x = weights["wte"][tokens]
    for layer in range(shape.num_layers):
        start = f"blocks.{layer}."
        own = {name.removeprefix(start): values for name, values in weights.items() if name.startswith(start)}
        x = block(x, own, shape, layer)
    return F.linear(normed(x, weights["lnf_gain"], shape.family.norm_epsilon), weights.get("head", weights["wte"]))


def autograd(
    weights: dict[str, Tensor], tokens: Tensor, targets: Tensor, shape: ModelShape
) -> tuple[Tensor, dict[str, Tensor]]:
    """(mean loss, gradients by name)."""
    leaves = {name: values.clone().requires_grad_() for name, values in weights.items()}
    loss = F.cross_entropy(logits(leaves, tokens, shape).flatten(0, 1), targets.flatten())
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return loss.detach(), dict(zip(leaves, gradients, strict=True))
