"""The peer of the Llama family: the same in plain PyTorch with autograd, under handgrad's names, tuned for a GPU. And the
published sizes that the benchmarks measure.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.modern_twin import rotated
from benchmarks.twin import Named, liger_loss, padded_loss
from benchmarks.twin_switches import Switches
from handgrad.memory.rows import ParameterRow
from handgrad.settings.config import ModelShape

# (vocabulary, layers, heads, channels, the family's numbers), as published on the Hub.
SHAPES: dict[str, tuple[int, int, int, int, str]] = {
    "tiny-llama": (300, 2, 4, 32, "kv_heads=2,tied"),
    "SmolLM2-135M": (49152, 30, 9, 576, "kv_heads=3,feed_forward=1536,tied,rotary_base=100000.0"),
    "Qwen3-0.6B": (
        *(151936, 28, 16, 1024),
        "kv_heads=8,head_width=128,feed_forward=3072,norm_epsilon=1e-06,tied,qk_norm,rotary_base=1000000.0",
    ),
    "Llama-3.2-1B": (
        *(128256, 16, 32, 2048),
        "kv_heads=8,feed_forward=8192,tied,rotary_base=500000.0,rope=llama3,rope_factor=32.0",
    ),
    "Qwen2.5-0.5B": (
        *(151936, 24, 14, 896),
        "kv_heads=2,feed_forward=4864,norm_epsilon=1e-06,tied,qkv_bias,rotary_base=1000000.0",
    ),
    "Qwen2.5-1.5B": (
        *(151936, 28, 12, 1536),
        "kv_heads=2,feed_forward=8960,norm_epsilon=1e-06,tied,qkv_bias,rotary_base=1000000.0",
    ),
    "Qwen2.5-3B": (
        *(151936, 36, 16, 2048),
        "kv_heads=2,feed_forward=11008,norm_epsilon=1e-06,tied,qkv_bias,rotary_base=1000000.0",
    ),
    "SmolLM3-3B": (
        *(128256, 36, 16, 2048),
        "kv_heads=4,feed_forward=11008,norm_epsilon=1e-06,tied,rotary_base=5000000.0,nope_interval=4",
    ),
    "Qwen3-1.7B": (
        *(151936, 28, 16, 2048),
        "kv_heads=8,head_width=128,feed_forward=6144,norm_epsilon=1e-06,tied,qk_norm,rotary_base=1000000.0",
    ),
    "Qwen3-4B": (
        *(151936, 36, 32, 2560),
        "kv_heads=8,head_width=128,feed_forward=9728,norm_epsilon=1e-06,tied,qk_norm,rotary_base=1000000.0",
    ),
    "Qwen3-8B": (
        *(151936, 36, 32, 4096),
        "kv_heads=8,head_width=128,feed_forward=12288,norm_epsilon=1e-06,qk_norm,rotary_base=1000000.0",
    ),
    "Gemma-3-270M": (262144, 18, 4, 640, "kv_heads=1,feed_forward=2048"),
    "Gemma-3-1B": (262144, 26, 4, 1152, "kv_heads=1,feed_forward=6912"),
    "OLMo-2-1B": (100352, 16, 16, 2048, "feed_forward=8192"),
}
NETWORKS = {"Gemma-3-270M": "gemma3", "Gemma-3-1B": "gemma3", "OLMo-2-1B": "olmo"}  # of others: llama
LARGE = ["SmolLM2-135M", "Qwen3-0.6B", "Llama-3.2-1B", "Qwen2.5-1.5B"]  # measured without being named


def sizes(name: str) -> dict[str, Any]:
    """The fields of a run's configuration for a name in `SHAPES`."""
    _, layers, heads, channels, numbers = SHAPES[name]
    network = NETWORKS.get(name, "llama")
    return {"architecture": network, network: numbers, "num_layers": layers, "num_heads": heads, "channels": channels}


class LlamaBlock(nn.Module):
    """A block: attention with grouped heads, then SwiGLU."""

    def __init__(self, shape: ModelShape, layer: int):
        super().__init__()
        family, C = shape.family, shape.channels
        self.rotates = any(family.rotation_of(layer)[0])
        D, epsilon = family.head_width, family.norm_epsilon
        self.sizes = shape.num_heads, family.kv_heads, D
        self.norm1, self.norm2 = nn.RMSNorm(C, epsilon), nn.RMSNorm(C, epsilon)
        self.qkv = nn.Linear(C, (shape.num_heads + 2 * family.kv_heads) * D, bias=family.qkv_bias)
        self.proj = nn.Linear(shape.num_heads * D, C, bias=False)
        self.gate_up = nn.Linear(C, 2 * family.feed_forward, bias=False)
        self.down = nn.Linear(family.feed_forward, C, bias=False)
        self.q, self.k = (nn.RMSNorm(D, epsilon) if family.qk_norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (B, T, C); cos, sin (T, D / 2)."""
        B, T, _ = x.shape
        H, K, D = self.sizes
        heads = self.qkv(self.norm1(x)).view(B, T, H + 2 * K, D).transpose(1, 2)
        q, k, v = heads.split((H, K, K), 1)
        q, k = self.q(q), self.k(k)
        if self.rotates:
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        q, k = q.to(v.dtype), k.to(v.dtype)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=K < H)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, H * D))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class LlamaGpuTwin(Named):
    """The whole network: angles computed once, the residual stream in bf16 or float32, the head whole or by Liger's fused
    kernel. Embedding and head have handgrad's padded rows, which the loss masks."""

    def __init__(self, shape: ModelShape, switches: Switches):
        super().__init__()
        self.vocab_size, family = shape.vocab_size, shape.family
        self.tied = family.tied
        self.bf16_stream, self.liger = switches.bf16_stream, switches.head == "liger"
        self.wte = nn.Embedding(shape.padded_vocab_size, shape.channels)
        self.blocks = nn.ModuleList(LlamaBlock(shape, layer) for layer in range(shape.num_layers))
        self.lnf = nn.RMSNorm(shape.channels, family.norm_epsilon)
        if not family.tied:
            self.head = nn.Linear(shape.channels, shape.padded_vocab_size, bias=False)
        frequencies = torch.tensor(family.frequencies, dtype=torch.float64)
        angles = torch.arange(shape.sequence_length, dtype=torch.float64)[:, None] * frequencies
        self.register_buffer("cos", (family.rope_scale * angles.cos()).float(), persistent=False)
        self.register_buffer("sin", (family.rope_scale * angles.sin()).float(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean loss in nats of tokens, targets (B, T)."""
        x = self.embed(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.loss(x, targets)

    def embed(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        return x.to(torch.bfloat16) if self.bf16_stream else x

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        weight = self.wte.weight if self.tied else self.head.weight
        x = self.lnf(x)
        if self.liger:
            return liger_loss(x, weight, targets)
        return padded_loss(F.linear(x, weight), targets, self.vocab_size)

    def parameter_of(self, row: ParameterRow) -> nn.Parameter:
        if row.name in ("wte", "head"):
            return self.get_submodule(row.name).weight
        module, _, kind = row.name.rpartition("_")
        return getattr(self.get_submodule(module), "weight" if kind == "gain" else kind)
