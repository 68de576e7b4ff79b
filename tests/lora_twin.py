"""GPT-2 in plain PyTorch, and weights with adapters, product by product: what the tests of adapters differentiate."""

import torch
import torch.nn.functional as F
from torch import Tensor

from handgrad.settings.config import ModelShape

# The products of a matrix, written out once more.
PRODUCTS = {
    "gpt2": {"qkv_weight": ["qkv"], "proj_weight": ["o"], "fc_weight": ["up"], "fcproj_weight": ["down"]},
    "llama": {
        "qkv_weight": ["q", "k", "v"],
        "proj_weight": ["o"],
        "gate_up_weight": ["gate", "up"],
        "down_weight": ["down"],
    },
}
PRODUCTS["gemma3"] = PRODUCTS["olmo"] = PRODUCTS["llama"]


def outputs(shape: ModelShape, name: str) -> list[int]:
    """Those of each product of a matrix, if it has several."""
    if shape.architecture == "gpt2":
        return []
    D, H, K = shape.head_width, shape.num_heads, shape.kv_heads
    return {"qkv_weight": [H * D, K * D, K * D], "gate_up_weight": [shape.feed_forward] * 2}.get(name, [])


def added(
    weights: dict[str, Tensor], adapters: dict[str, Tensor], shape: ModelShape, on: set[str], rank: int, scale: float
) -> dict[str, Tensor]:
    """The weights W + scale B A."""
    found = dict(weights)
    for name, weight in weights.items():
        matrix = name.rpartition(".")[2]
        products = PRODUCTS[shape.architecture].get(matrix, [])
        if not on & set(products):
            continue
        start = name.removesuffix("_weight")
        a, b = adapters[f"{start}_A"].split(rank), adapters[f"{start}_B"]
        parts, row, chosen = list(weight.split(outputs(shape, matrix) or len(weight))), 0, 0
        for place, product in enumerate(products):
            if product in on:
                size = len(parts[place])
                parts[place] = parts[place] + scale * b[row : row + size] @ a[chosen]
                row, chosen = row + size, chosen + 1
        found[name] = torch.cat(parts)
    return found


def gpt2_logits(weights: dict[str, Tensor], tokens: Tensor, shape: ModelShape) -> Tensor:
    """(B, T, V)"""

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}_weight"], weights[f"{name}_bias"])

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}_weight"], weights[f"{name}_bias"])

    B, T = tokens.shape
    x = weights["wte"][tokens] + weights["wpe"][:T]
    for layer in range(shape.num_layers):
        start = f"blocks.{layer}."
        heads = linear(norm(x, start + "ln1"), start + "qkv").view(B, T, 3, shape.num_heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + linear(y.transpose(1, 2).reshape(B, T, -1), start + "proj")
        hidden = F.gelu(linear(norm(x, start + "ln2"), start + "fc"), approximate="tanh")
        x = x + linear(hidden, start + "fcproj")
    return F.linear(norm(x, "lnf"), weights["wte"])
