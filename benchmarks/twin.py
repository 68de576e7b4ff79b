"""The peer: the same GPT-2 in plain PyTorch with autograd, to compare numbers and speed.

It loads handgrad's weights under handgrad's names, so both start from the same point.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from handgrad.memory.rows import ParameterRow
from handgrad.run.resolve import schedule_of
from handgrad.settings.config import ModelShape, RunConfig


class Named(nn.Module):
    """A network whose parameters have handgrad's names."""

    def parameter_of(self, row: ParameterRow) -> nn.Parameter:
        """The parameter that handgrad's table calls `row.name`."""
        raise NotImplementedError  # each network calls its parameters otherwise

    @torch.no_grad()
    def load(self, table: tuple[ParameterRow, ...], flat: Tensor) -> None:
        """Loads the weights in handgrad's flat buffer."""
        for row in table:
            parameter = self.parameter_of(row)
            parameter[: row.stored_rows].copy_(row.stored(flat))
            parameter[row.stored_rows :].zero_()


class Block(nn.Module):
    """A transformer block; `linear` is the class of its linear layers."""

    def __init__(self, channels: int, num_heads: int, linear: type[nn.Linear] = nn.Linear):
        super().__init__()
        self.num_heads = num_heads
        self.ln1 = nn.LayerNorm(channels)
        self.qkv = linear(channels, 3 * channels)
        self.proj = linear(channels, channels)
        self.ln2 = nn.LayerNorm(channels)
        self.fc = linear(channels, 4 * channels)
        self.fcproj = linear(4 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(B, T, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class Twin(Named):
    """GPT-2 with a shared embedding and head; `padded` gives it handgrad's padded vocabulary, for faster GEMMs."""

    def __init__(self, shape: ModelShape, *, padded: bool = False):
        super().__init__()
        self.vocab_size = shape.vocab_size
        self.wte = nn.Embedding(shape.padded_vocab_size if padded else shape.vocab_size, shape.channels)
        self.wpe = nn.Embedding(shape.sequence_length, shape.channels)
        self.blocks = nn.ModuleList(Block(shape.channels, shape.num_heads) for _ in range(shape.num_layers))
        self.lnf = nn.LayerNorm(shape.channels)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean loss in nats of tokens, targets (B, T)."""
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.lnf(x))[..., : self.vocab_size]
        exact = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.reshape(-1, self.vocab_size).to(exact), targets.reshape(-1))

    def head(self, x: Tensor) -> Tensor:
        """Logits of the last layer norm's output x (B, T, C)."""
        return F.linear(x, self.wte.weight)

    def parameter_of(self, row: ParameterRow) -> nn.Parameter:
        if row.name in ("wte", "wpe"):
            return self.get_submodule(row.name).weight
        module, _, kind = row.name.rpartition("_")
        return getattr(self.get_submodule(module), kind)


def padded_loss(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Mean loss in nats of logits (B, T, Vp), of which the padded columns get probability 0."""
    columns = logits.shape[-1]
    if columns > vocab_size:
        # Masked and not cut off: the compiler's loads stay aligned.
        real = torch.arange(columns, device=logits.device) < vocab_size
        logits = torch.where(real, logits, -math.inf)
    exact = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.view(-1, columns).to(exact), targets.reshape(-1))


def liger_loss(x: Tensor, weight: Tensor, targets: Tensor, softcap: float | None = None) -> Tensor:
    """The GEMMs of the head on x (B, T, C) and the cross-entropy, chunk by chunk, without the whole logits."""
    from benchmarks.fused_head import fused_head

    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    return fused_head(x.view(-1, x.shape[-1]).to(dtype), weight.to(dtype), targets.reshape(-1), softcap)


def optimizer_of(twin: Twin, config: RunConfig, *, fused: bool) -> torch.optim.AdamW:
    """AdamW with handgrad's decay groups: matrices and embeddings decay."""
    matrices = [p for p in twin.parameters() if p.dim() == 2]
    vectors = [p for p in twin.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.adam_epsilon, fused=fused
    )


def twin_step(
    twin: Twin,
    optimizer: torch.optim.AdamW,
    config: RunConfig,
    micro_batches: list[tuple[Tensor, Tensor]],
    step: int,
    autocast: bool = False,
) -> tuple[float, float]:
    """One optimizer step over the micro-batches; returns (mean loss, gradient norm before clipping)."""
    for group in optimizer.param_groups:
        group["lr"] = schedule_of(config).rate(step)
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for tokens, targets in micro_batches:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
            loss = twin(tokens, targets) / len(micro_batches)
        loss.backward()
        total += loss.item()
    norm = nn.utils.clip_grad_norm_(twin.parameters(), config.clip_norm)
    optimizer.step()
    return total, norm.item()
