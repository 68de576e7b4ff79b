"""The Llama family: Llama, Qwen2, Qwen3, SmolLM3 and their relatives. models/llama.py computes them.

A configuration writes the sizes that only this family has as a text: `kv_heads=2,rotary_base=500000.0,tied`. A size left
out has its default; a switch is its bare name.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from handgrad.errors import UsageError
from handgrad.names import check_choice, named_text, named_values
from handgrad.networks.network import COMMON_FORMS, Fp8, Gemm, Network

if TYPE_CHECKING:
    from handgrad.networks import ModelShape

STRETCHED = ("rope_factor", "rope_length", "rope_slow", "rope_fast")
# The rules for rotary frequencies, and the settings that each reads.
ROPES = {"plain": (), "linear": ("rope_factor",), "llama3": STRETCHED, "yarn": (*STRETCHED, "rope_scale")}
FEED_FORWARD_MULTIPLE = 64
WIDEST_HEAD = 1024
FP8 = {
    **COMMON_FORMS,
    "norm1": Fp8("qkv"),
    "norm2": Fp8("mlp", rerun_from=1),
    "swiglu": Fp8("mlp", late_columns=True),
    "dqkv": Fp8("qkv", gradient=True, wide=True, workspace="dturned"),  # of attention's inputs, normalised and rotated
    "dhidden": Fp8("mlp", gradient=True),
}


@dataclass(frozen=True)
class LlamaShape:
    """A member of the family. 0: `resolved` derives the size from the model's."""

    kv_heads: int = 0  # heads of keys and values; num_heads / kv_heads query heads share one; 0: num_heads
    head_width: int = 0  # D; 0: channels / num_heads
    feed_forward: int = 0  # F; 0: 8/3 of the channels, for as many weights as GPT-2's two matrices of 4 C
    norm_epsilon: float = 1e-5
    tied: bool = False  # the head is the embedding
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # per head, with gains: Qwen3
    rotary_base: float = 10000.0
    window: int = 0  # keys that a query attends to, the last of them its own: Mistral; 0: all before it
    nope_interval: int = 0  # every layer whose number, from 1, is a multiple has no rotation: SmolLM3; 0: all rotate
    # Frequencies for contexts longer than in pretraining; see `frequencies`.
    rope: str = "plain"
    rope_factor: float = 1.0
    rope_length: int = 8192  # context length in pretraining
    rope_slow: float = 1.0  # a pair with at most this many turns within that length divides its frequency by the factor
    rope_fast: float = 4.0  # a pair with at least this many turns keeps its frequency
    rope_scale: float = 1.0  # multiplies rotated queries and keys

    def __str__(self) -> str:
        return named_text(self)

    def resolved(self, num_heads: int, channels: int) -> "LlamaShape":
        """Replaces zeros by the sizes they stand for."""
        widest = -(-8 * channels // 3)
        return replace(
            self,
            kv_heads=self.kv_heads or num_heads,
            head_width=self.head_width or channels // num_heads,
            feed_forward=self.feed_forward or -(-widest // FEED_FORWARD_MULTIPLE) * FEED_FORWARD_MULTIPLE,
        )

    @functools.cached_property
    def frequencies(self) -> tuple[float, ...]:
        """Angle per position of each channel pair of a head, in radians: base^(-2i/D), or less to extend the pretraining
        context (docs/operations/rotary.md)."""
        return tuple(self.stretched(pair, self.rotary_base ** (-2 * pair / self.head_width)) for pair in self.pairs)

    def rotation_of(self, layer: int) -> tuple[tuple[float, ...], float]:
        """(frequencies, scale) of a layer's queries and keys: zeros and 1 for a layer without a rotation."""
        if self.nope_interval and (layer + 1) % self.nope_interval == 0:
            return (0.0,) * len(self.pairs), 1.0
        return self.frequencies, self.rope_scale

    @property
    def pairs(self) -> range:
        return range(self.head_width // 2)

    def stretched(self, pair: int, frequency: float) -> float:
        """The frequency of a pair: kept (1), divided by the factor (0), or in between."""
        if self.rope == "plain":
            return frequency
        share = 0.0
        if self.rope == "llama3":
            turns = self.rope_length * frequency / (2 * math.pi)
            share = (turns - self.rope_slow) / (self.rope_fast - self.rope_slow)
        elif self.rope == "yarn":
            first = max(math.floor(self.pair_of(self.rope_fast)), 0)
            last = min(math.ceil(self.pair_of(self.rope_slow)), self.head_width - 1)
            share = 1 - (pair - first) / (last - first or 0.001)
        share = min(1.0, max(0.0, share))
        return frequency * (share + (1 - share) / self.rope_factor)

    def pair_of(self, turns: float) -> float:
        """The fractional pair index whose frequency makes this many turns within the pretraining context."""
        return self.head_width * math.log(self.rope_length / (2 * math.pi * turns)) / (2 * math.log(self.rotary_base))

    def check(self, num_heads: int, channels: int) -> None:
        """Raises `UsageError` for invalid sizes."""
        if not self.head_width and channels % num_heads:
            raise UsageError(
                f"channels must be a multiple of num_heads, found {channels} and {num_heads};"
                f" or give heads a width of their own, like --llama head_width=64"
            )
        check_choice("rope of llama", self.rope, ROPES)
        shape = self.resolved(num_heads, channels)
        rules: tuple[tuple[bool, str], ...] = (
            (shape.kv_heads > 0 and num_heads % shape.kv_heads == 0, f"kv_heads that divide num_heads {num_heads}"),
            (0 < shape.head_width <= WIDEST_HEAD and shape.head_width % 2 == 0, "an even head_width"),
            (0 < shape.feed_forward <= 1 << 20, "feed_forward of 1 or more"),
            (0 < shape.norm_epsilon < 1, "norm_epsilon between 0 and 1"),
            (shape.window >= 0, "window of 0 or more"),
            (shape.nope_interval >= 0, "nope_interval of 0 or more"),
            *rope_rules(self),
        )
        for holds, wanted in rules:
            if not holds:
                raise UsageError(f"llama must have {wanted}, found {str(self)!r}; docs/llama.md names the numbers")


def rope_rules(family: Any) -> tuple[tuple[bool, str], ...]:
    """(holds, what a family must have), of the numbers that `LlamaShape.frequencies` reads."""
    others = (name for name in ROPES["yarn"] if name not in ROPES[family.rope])
    unread = next((name for name in others if getattr(family, name) != getattr(type(family), name)), "")
    return (
        (1 < family.rotary_base < math.inf, "rotary_base above 1"),
        (1 <= family.rope_factor < math.inf, "rope_factor of 1 or more"),
        (family.rope_length > 0, "rope_length of 1 or more"),
        (0 < family.rope_slow < family.rope_fast < math.inf, "rope_slow between 0 and rope_fast"),
        (0 < family.rope_scale < math.inf, "rope_scale above 0"),
        (not unread, f"no {unread} beside rope={family.rope}, which does not read it"),
    )


@functools.lru_cache(maxsize=64)
def parse_llama(text: str) -> LlamaShape:
    """Parses the text of a configuration. Raises `UsageError` for an unknown name or an invalid value."""
    return named_values(LlamaShape, "llama", text, "kv_heads=2,rotary_base=500000.0,tied")


def settle(shape: "ModelShape") -> str:
    """The configuration text with every size spelled out."""
    return str(parse_llama(shape.llama).resolved(shape.num_heads, shape.channels))


def check(config: Any) -> None:
    """Raises `UsageError` for invalid sizes."""
    parse_llama(config.llama).check(config.num_heads, config.channels)


def gemms(shape: "ModelShape") -> tuple[Gemm, ...]:
    """gate_up and down share the SwiGLU and therefore an fp8 part."""
    C, F, D = shape.channels, shape.feed_forward, shape.head_width
    queries, keys = shape.num_heads * D, shape.kv_heads * D
    return (
        Gemm("qkv_weight", "qkv", C, {"q": queries, "k": keys, "v": keys}),
        Gemm("proj_weight", "proj", queries, {"o": C}),
        Gemm("gate_up_weight", "mlp", C, {"gate": F, "up": F}),
        Gemm("down_weight", "mlp", F, {"down": C}),
    )


def sides(shape: "ModelShape") -> dict[str, int]:
    H, K, D = shape.num_heads, shape.kv_heads, shape.head_width
    return {
        "num_heads * head_width": H * D,
        "(num_heads + 2 kv_heads) * head_width": (H + 2 * K) * D,
        "feed_forward": shape.feed_forward,
    }


LLAMA = Network(
    title="Llama",
    gemms=gemms,
    head_width=lambda shape: shape.family.head_width,
    kv_heads=lambda shape: shape.family.kv_heads,
    feed_forward=lambda shape: shape.family.feed_forward,
    windows=lambda shape: (shape.family.window,) * shape.num_layers,
    setting="llama",
    settle=settle,
    check=check,
    any_context=True,
    tied=lambda shape: shape.family.tied,
    sides=sides,
    fp8=lambda shape: FP8,
    fp8_gradients="e5m2",
    model_types=("llama", "qwen2", "qwen3", "smollm3", "mistral"),
    blocks="model.layers",
    modules={
        "wte": ("model.embed_tokens",),
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "proj": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
        "norm1": ("input_layernorm",),
        "norm2": ("post_attention_layernorm",),
        "q": ("self_attn.q_norm",),
        "k": ("self_attn.k_norm",),
        "lnf": ("model.norm",),
        "head": ("lm_head",),
    },
)
