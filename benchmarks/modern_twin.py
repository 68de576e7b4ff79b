"""The peer of the modern network: the same in plain PyTorch with autograd, under handgrad's names."""

from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.twin import Named, liger_loss, padded_loss
from benchmarks.twin_switches import Switches
from handgrad.memory.rows import ParameterRow
from handgrad.models import parameter_table
from handgrad.networks.modern import GATE_CHANNELS
from handgrad.ops.reference.rmsnorm import RMSNORM_EPSILON
from handgrad.ops.reference.rotary import ROTARY_BASE
from handgrad.settings.config import ModelShape, RunConfig


def normed(x: Tensor) -> Tensor:
    """RMS norm over the last axis, without a gain."""
    return F.rms_norm(x, (x.shape[-1],), eps=RMSNORM_EPSILON)


def angles(length: int, head_width: int, dtype: torch.dtype, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """(cos, sin) of the rotations, (T, D/2)."""
    half = head_width // 2
    frequencies = ROTARY_BASE ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
    turns = torch.arange(length, dtype=torch.float64, device=device)[:, None] * frequencies
    return turns.cos().to(dtype), turns.sin().to(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, H, T, D), its halves turned."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Scalar(nn.Module):
    """A number that is learnt."""

    def __init__(self, start: float):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([start]))


class ModernBlock(nn.Module):
    """A block of the modern network, with the techniques of its shape."""

    def __init__(self, shape: ModelShape, layer: int):
        super().__init__()
        C, self.shape = shape.channels, shape
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.proj = nn.Linear(C, C, bias=False)
        self.fc = nn.Linear(C, 4 * C, bias=False)
        self.fcproj = nn.Linear(4 * C, C, bias=False)
        self.residual_scalar = Scalar(1.0) if shape.has("residual_scalars") else None
        self.input_scalar = Scalar(0.1) if shape.has("input_scalars") else None
        self.value_embedding = self.value_gate = None
        if shape.has("value_embeddings") and (shape.num_layers - layer) % 2 == 1:
            self.value_embedding = nn.Embedding(shape.padded_vocab_size, C)
            self.value_gate = nn.Linear(min(GATE_CHANNELS, C), shape.num_heads, bias=False)

    def forward(self, x: Tensor, first: Tensor, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, C = x.shape
        H = self.shape.num_heads
        if self.residual_scalar is not None:
            x = self.residual_scalar.weight.to(x.dtype) * x
        if self.input_scalar is not None:
            x = x + self.input_scalar.weight.to(x.dtype) * first
        norm = normed(x)
        q, k, v = self.qkv(norm).view(B, T, 3, H, C // H).permute(2, 0, 3, 1, 4)
        if self.value_embedding is not None and self.value_gate is not None:
            gate = 2 * torch.sigmoid(self.value_gate(norm[..., : self.value_gate.in_features]))
            values = gate.unsqueeze(-1) * self.value_embedding(tokens).view(B, T, H, C // H)
            v = v + values.transpose(1, 2).to(v.dtype)
        if self.shape.has("qk_norm"):
            q, k = normed(q), normed(k)
        if self.shape.has("rotary"):
            q, k = rotated(q, cos, sin).to(v.dtype), rotated(k, cos, sin).to(v.dtype)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.fcproj(F.relu(self.fc(normed(x))).square())


class ModernTwin(Named):
    """The whole network; its embedding and head have handgrad's padded rows, which the loss masks."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.shape = shape
        self.wte = nn.Embedding(shape.padded_vocab_size, shape.channels)
        self.blocks = nn.ModuleList(ModernBlock(shape, layer) for layer in range(shape.num_layers))
        if shape.has("untied_head"):
            self.head = nn.Linear(shape.channels, shape.padded_vocab_size, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean loss in nats of tokens, targets (B, T)."""
        return self.loss(self.stream(tokens), targets)

    def embed(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        return normed(x) if self.shape.has("embedding_norm") else x

    def stream(self, tokens: Tensor) -> Tensor:
        x = first = self.embed(tokens)
        cos, sin = self.angles(tokens.shape[1], x)
        for block in self.blocks:
            x = block(x, first, tokens, cos, sin)
        return x

    def angles(self, length: int, x: Tensor) -> tuple[Tensor, Tensor]:
        return angles(length, self.shape.channels // self.shape.num_heads, x.dtype, x.device)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        weight = self.head.weight if self.shape.has("untied_head") else self.wte.weight
        logits = F.linear(normed(x), weight)
        exact = torch.promote_types(logits.dtype, torch.float32)
        logits, cap = logits.to(exact), self.shape.softcap
        if cap:
            logits = cap * torch.tanh(logits / cap)
        return padded_loss(logits, targets, self.shape.vocab_size)

    def parameter_of(self, row: ParameterRow) -> nn.Parameter:
        return self.get_submodule(row.name.removesuffix("_weight")).weight


class ModernGpuTwin(ModernTwin):
    """The network as a tuned peer: angles computed once, the residual stream in bf16 or float32, the head whole or by
    Liger's fused kernel, which caps its logits."""

    def __init__(self, shape: ModelShape, switches: Switches):
        super().__init__(shape)
        self.bf16_stream, self.liger = switches.bf16_stream, switches.head == "liger"
        cos, sin = angles(shape.sequence_length, shape.channels // shape.num_heads, torch.float32)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def embed(self, tokens: Tensor) -> Tensor:
        x = super().embed(tokens)
        return x.to(torch.bfloat16) if self.bf16_stream else x

    def angles(self, length: int, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[:length], self.sin[:length]

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        if not self.liger:
            return super().loss(x, targets)
        weight = self.head.weight if self.shape.has("untied_head") else self.wte.weight
        return liger_loss(normed(x), weight, targets, self.shape.softcap or None)


class Optimizers:
    """Several optimizers as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer):
        self.optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def modern_optimizer(twin: ModernTwin, config: RunConfig, *, fused: bool) -> Optimizers:
    """torch's Muon for the blocks' matrices, AdamW for the rest, with the rates and decays of handgrad's rows."""
    matrices = list[nn.Parameter]()
    groups = defaultdict[tuple[float, float], list[nn.Parameter]](list)  # by rate and decay
    for row in parameter_table(twin.shape):
        decay = 0.0 if row.group == "vector" else config.weight_decay / row.rate
        found = matrices if row.group == "matrix" else groups[config.learning_rate * row.rate, decay]
        found.append(twin.parameter_of(row))
    settings = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    muon = torch.optim.Muon(matrices, momentum=0.95, adjust_lr_fn="match_rms_adamw", **settings)
    rest = [{"params": found, "lr": rate, "weight_decay": decay} for (rate, decay), found in groups.items()]
    adamw = torch.optim.AdamW(rest, betas=(config.beta1, config.beta2), eps=config.adam_epsilon, fused=fused, **settings)
    return Optimizers(muon, adamw)
