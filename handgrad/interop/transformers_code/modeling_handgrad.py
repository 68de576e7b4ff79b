"""handgrad's modern network as a causal language model of transformers. `handgrad export --to hf` writes this file beside
the weights; it needs torch and transformers, and nothing of handgrad.

The stream begins with x = RMS(wte[token]). A block is two halves, without biases or gains:

    a = x + Attention(q, k, v) Wproj^T,    [q k v] = RMS(x) Wqkv^T,  q and k of each head normalised, then rotated
    y = a + max(RMS(a) Wfc^T, 0)^2 Wfcproj^T

and the logits are z = c tanh(RMS(y) Whead^T / c). `config.techniques` names those that a model has. With scalars a block
begins with x <- r x + s x_0, x_0 the stream before the first block; with value embeddings, in every second layer up to the
last, v <- v + 2 sigmoid(RMS(x)[:G] Wgate^T) ve[token] for each head.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_handgrad import HandgradModernConfig

Angles = tuple[Tensor, Tensor]  # cos and sin, (B or 1, 1, T, D/2) each
Recall = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def wide(x: Tensor) -> Tensor:
    """x at least in float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms(x: Tensor, epsilon: float) -> Tensor:
    """x with a root mean square of 1 along its last axis."""
    exact = wide(x)
    return (exact * (exact.square().mean(-1, keepdim=True) + epsilon).rsqrt()).to(x.dtype)


def angles(positions: Tensor, width: int, base: float, dtype: torch.dtype) -> Angles:
    """cos and sin of t base^(-2i/D) at `positions` t (B or 1, T), for the D/2 pairs of channels of a head."""
    device = positions.device
    exact = torch.device("cpu") if device.type == "mps" else device  # Apple's GPUs have no float64
    half = width // 2
    frequencies = base ** (-torch.arange(half, dtype=torch.float64, device=exact) / half)
    turns = positions.to(exact, torch.float64)[:, None, :, None] * frequencies
    return turns.cos().to(dtype).to(device), turns.sin().to(dtype).to(device)


def rotated(x: Tensor, turn: Angles) -> Tensor:
    """x (B, H, T, D): the channels i and i + D/2 of each head, turned by their angle."""
    cos, sin = turn
    first, second = wide(x).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def visible(past: int, length: int, attention_mask: Tensor | None, device: torch.device) -> Tensor | None:
    """True where a query may look, (B or 1, 1, length, past + length); None where causality says it all. The queries stand
    at past, past + 1, ...; `attention_mask` (B, past + length) is 0 at padding. Each query sees itself, so that padding has
    something to look at."""
    if attention_mask is None and (past == 0 or length == 1):
        return None
    rows = torch.arange(past, past + length, device=device).unsqueeze(1)
    columns = torch.arange(past + length, device=device)
    causal = (columns <= rows)[None, None]
    if attention_mask is None:
        return causal
    return causal & attention_mask.to(torch.bool)[:, None, None, :] | (columns == rows)


GATE_CHANNELS = 32  # of the stream, that the gates of the value embeddings read


class Scalar(nn.Module):
    """A number that is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))


class Block(nn.Module):
    def __init__(self, config: HandgradModernConfig, layer: int):
        super().__init__()
        channels = config.hidden_size
        self.config, self.layer = config, layer
        self.qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.proj = nn.Linear(channels, channels, bias=False)
        self.fc = nn.Linear(channels, 4 * channels, bias=False)
        self.fcproj = nn.Linear(4 * channels, channels, bias=False)
        self.residual_scalar = Scalar() if config.has("residual_scalars") else None
        self.input_scalar = Scalar() if config.has("input_scalars") else None
        self.has_values = config.has("value_embeddings") and (config.num_hidden_layers - layer) % 2 == 1
        if self.has_values:
            self.value_gate = nn.Linear(min(GATE_CHANNELS, channels), config.num_attention_heads, bias=False)
            self.value_embedding = nn.Embedding(config.vocab_size, channels)

    def forward(
        self, x: Tensor, first: Tensor, tokens: Tensor | None, turn: Angles | None, mask: Tensor | None, recall: Recall
    ) -> Tensor:
        """x (B, T, C) -> (B, T, C); `first`: that of the first block. `mask` (B or 1, 1, T, keys), or None: causality
        alone; `recall` adds a layer's earlier keys and values to new ones."""
        epsilon = self.config.norm_epsilon
        x = self.mixed(x, first)
        norm = rms(x, epsilon)
        x = x + self.proj(self.attention(self.qkv(norm), self.values(norm, tokens), turn, mask, recall))
        return x + self.fcproj(F.relu(self.fc(rms(x, epsilon))).square())

    def mixed(self, x: Tensor, first: Tensor) -> Tensor:
        """r x + s x_0, rounded once."""
        exact = wide(x)
        if self.residual_scalar is not None:
            exact = exact * wide(self.residual_scalar.weight)
        if self.input_scalar is not None:
            exact = exact + wide(self.input_scalar.weight) * wide(first)
        return exact.to(x.dtype)

    def values(self, norm: Tensor, tokens: Tensor | None) -> Tensor | None:
        """The tokens' share of the values, (B, H, T, D), from the block's normalised stream (B, T, C)."""
        if not self.has_values:
            return None
        if tokens is None:
            raise ValueError("expected input_ids, found inputs_embeds: the value embeddings of this model need the tokens")
        gate = 2 * torch.sigmoid(wide(norm[..., : self.value_gate.in_features]) @ wide(self.value_gate.weight).T)
        embedded = wide(self.value_embedding(tokens)).unflatten(-1, (gate.shape[-1], -1))
        return (gate.unsqueeze(-1) * embedded).transpose(1, 2)

    def attention(
        self, qkv: Tensor, values: Tensor | None, turn: Angles | None, mask: Tensor | None, recall: Recall
    ) -> Tensor:
        """qkv (B, T, 3C) -> (B, T, C)."""
        batch, length, channels = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
        heads = self.config.num_attention_heads
        q, k, v = qkv.view(batch, length, 3, heads, channels // heads).permute(2, 0, 3, 1, 4)
        if self.config.has("qk_norm"):
            q, k = rms(q, self.config.norm_epsilon), rms(k, self.config.norm_epsilon)
        if turn is not None:
            q, k = rotated(q, turn), rotated(k, turn)
        if values is not None:
            v = (wide(v) + values).to(v.dtype)
        k, v = recall(k, v, self.layer)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and length > 1)
        return y.transpose(1, 2).reshape(batch, length, channels)


class HandgradModernForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = HandgradModernConfig
    _tied_weights_keys = {"head.weight": "wte.weight"}  # noqa: RUF012  (in effect for a model without untied_head)
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True

    def __init__(self, config: HandgradModernConfig):
        super().__init__(config)
        self.wte: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.head: nn.Module = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.wte

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.wte = value

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.head = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """input_ids (B, T) -> logits (B, T, V), and with `labels` (B, T) the mean loss of each next token, where the label
        is not -100. `attention_mask`: (B, earlier tokens + T), 0 at padding, or transformers' own (B, 1, T, keys).
        `logits_to_keep`: the number of last positions, or the positions, that get logits; 0: all."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("expected input_ids or inputs_embeds, one of the two")
        config = self.config
        x = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        if past_key_values is None and (config.use_cache if use_cache is None else use_cache):
            past_key_values = DynamicCache()
        length, past = x.shape[1], 0 if past_key_values is None else int(past_key_values.get_seq_length())
        mask, keys = attention_mask, past + length
        if mask is None or mask.dim() == 2:
            mask = visible(past, length, mask, x.device)
        else:
            keys = mask.shape[-1]
        indices = torch.arange(past, past + length, device=x.device)

        def recall(k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
            if past_key_values is None:
                return k, v
            # The first versions of transformers 5 have a static cache write where they are told.
            k, v = past_key_values.update(k, v, layer, {"cache_position": indices})
            return k[:, :, :keys], v[:, :, :keys]  # a static cache has room for more

        turn = None
        if config.has("rotary"):
            position_ids = indices.unsqueeze(0) if position_ids is None else position_ids
            width = config.hidden_size // config.num_attention_heads
            turn = angles(position_ids, width, config.rotary_base, torch.promote_types(x.dtype, torch.float32))
        if config.has("embedding_norm"):
            x = rms(x, config.norm_epsilon)
        first = x
        for block in self.blocks:
            x = block(x, first, input_ids, turn, mask, recall)
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.head(rms(x[:, positions], config.norm_epsilon))
        if config.has("softcap"):
            logits = (config.softcap * torch.tanh(wide(logits) / config.softcap)).to(logits.dtype)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=config.vocab_size, **kwargs)
        out = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
        return out if (config.return_dict if return_dict is None else return_dict) else out.to_tuple()
