"""The peer of Gemma 3: the same in plain PyTorch with autograd, under handgrad's names, tuned for a GPU. Layers with a
window attend by torch's compiled flex attention, whose block mask skips what the window hides; the others by fused
attention.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.modern_twin import rotated
from benchmarks.twin import Named, liger_loss, padded_loss
from benchmarks.twin_switches import Switches
from handgrad.memory.rows import ParameterRow
from handgrad.networks.gemma3 import family_of, rotation
from handgrad.settings.config import ModelShape


@functools.cache
def windowed(window: int, length: int, device: torch.device) -> BlockMask:
    """The pairs that a window shows, made once."""

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < window)

    return create_block_mask(seen, None, None, length, length, device=device)


def mask_of(mask: BlockMask, length: int) -> Tensor:
    """(T, T) bool, queries by keys: True where the query sees the key."""
    places = torch.arange(length)
    return mask.mask_mod(places, places, places[:, None], places)


class GemmaNorm(nn.Module):
    """RMS norm with a gain of 1 + w, in float32."""

    def __init__(self, width: int, epsilon: float):
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.zeros(width)), epsilon

    def forward(self, x: Tensor) -> Tensor:
        normal = F.rms_norm(x.float(), self.weight.shape, None, self.epsilon)
        return (normal * (1 + self.weight)).to(x.dtype)


class GemmaBlock(nn.Module):
    """A block: attention with grouped heads, then GEGLU, with a norm before and after each."""

    def __init__(self, shape: ModelShape, layer: int):
        super().__init__()
        family, C, H, K, D = family_of(shape), shape.channels, shape.num_heads, shape.kv_heads, shape.head_width
        self.sizes, self.window, self.scale = (H, K, D), family.window_of(layer), 1 / math.sqrt(family.score_width)
        norm = functools.partial(GemmaNorm, epsilon=family.norm_epsilon)
        self.norm1, self.after1, self.norm2, self.after2 = (norm(C) for _ in range(4))
        self.q, self.k = norm(D), norm(D)
        self.qkv, self.proj = nn.Linear(C, (H + 2 * K) * D, bias=False), nn.Linear(H * D, C, bias=False)
        self.gate_up, self.down = (
            nn.Linear(C, 2 * family.feed_forward, bias=False),
            nn.Linear(family.feed_forward, C, bias=False),
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask | None) -> Tensor:
        """x (B, T, C); cos, sin (T, D / 2); `mask`: of a layer with a window."""
        B, T, _ = x.shape
        H, K, D = self.sizes
        heads = self.qkv(self.norm1(x)).view(B, T, H + 2 * K, D).transpose(1, 2)
        q, k, v = heads.split((H, K, K), 1)
        q, k = (rotated(norm(t), cos, sin).to(v.dtype) for norm, t in ((self.q, q), (self.k, k)))
        if mask is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=K < H, scale=self.scale)
        elif x.device.type == "cpu":  # flex attention has no backward there
            y = F.scaled_dot_product_attention(q, k, v, mask_of(mask, T), enable_gqa=K < H, scale=self.scale)
        else:
            y = flex_attention(q, k, v, block_mask=mask, enable_gqa=K < H, scale=self.scale)
        x = x + self.after1(self.proj(y.transpose(1, 2).reshape(B, T, H * D)))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.after2(self.down(F.gelu(gate, approximate="tanh") * up))


class GemmaGpuTwin(Named):
    """The whole network. Embedding and head have handgrad's padded rows, which the loss masks."""

    def __init__(self, shape: ModelShape, switches: Switches):
        super().__init__()
        self.vocab_size, family, length = shape.vocab_size, family_of(shape), shape.sequence_length
        self.bf16_stream, self.liger = switches.bf16_stream, switches.head == "liger"
        self.wte = nn.Embedding(shape.padded_vocab_size, shape.channels)
        self.scale = shape.channels**0.5
        self.blocks = nn.ModuleList(GemmaBlock(shape, layer) for layer in range(shape.num_layers))
        self.lnf = GemmaNorm(shape.channels, family.norm_epsilon)
        for name, layer in (("window", 0), ("full", family.full_every - 1)):
            frequencies = torch.tensor(rotation(family, layer)["frequencies"], dtype=torch.float64)
            angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
            self.register_buffer(f"{name}_cos", angles.cos().float(), persistent=False)
            self.register_buffer(f"{name}_sin", angles.sin().float(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean loss in nats of tokens, targets (B, T)."""
        x, T = self.embed(tokens), tokens.shape[1]
        for block in self.blocks:
            name = "window" if block.window else "full"
            cos, sin = (getattr(self, f"{name}_{part}")[:T] for part in ("cos", "sin"))
            x = block(x, cos, sin, windowed(block.window, T, x.device) if block.window else None)
        return self.loss(x, targets)

    def embed(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        x = x.to(torch.bfloat16) if self.bf16_stream else x
        return x * torch.tensor(self.scale, dtype=torch.float32).to(x.dtype)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        x = self.lnf(x)
        if self.liger:
            return liger_loss(x, self.wte.weight, targets)
        return padded_loss(F.linear(x, self.wte.weight), targets, self.vocab_size)

    def parameter_of(self, row: ParameterRow) -> nn.Parameter:
        if row.name == "wte":
            return self.wte.weight
        module, _, _kind = row.name.rpartition("_")
        return self.get_submodule(module).weight
