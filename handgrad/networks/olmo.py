"""OLMo 2 and OLMo 3. models/olmo.py computes them.

A configuration writes the sizes that only they have as a text: `window=4096,rope=yarn,rope_factor=8.0`. One left out has
its default: of OLMo 2, whose layers have no window.
"""

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from handgrad.errors import UsageError
from handgrad.names import check_choice, named_text, named_values
from handgrad.networks.llama import LLAMA, WIDEST_HEAD, LlamaShape, gemms, rope_rules, sides
from handgrad.networks.network import HEAD_FORMS, Network

if TYPE_CHECKING:
    from handgrad.networks import ModelShape

ROPES = ("plain", "yarn")


@dataclass(frozen=True)
class OlmoShape:
    """The sizes of a member. 0: `resolved` derives the size from the model's."""

    kv_heads: int = 0  # heads of keys and values; num_heads / kv_heads query heads share one; 0: num_heads
    feed_forward: int = 0  # F; 0: 8/3 of the channels, as a Llama's
    norm_epsilon: float = 1e-6
    window: int = 0  # tokens that a query of a windowed layer sees, its own included; 0: no layer has a window
    full_every: int = 4  # beside a window: of this many layers the last sees all tokens before it
    rotary_base: float = 500000.0
    # Of layers that see all tokens, for contexts longer than in pretraining; as a `LlamaShape`'s.
    rope: str = "plain"
    rope_factor: float = 1.0
    rope_length: int = 8192
    rope_slow: float = 1.0
    rope_fast: float = 32.0
    rope_scale: float = 1.0

    def __str__(self) -> str:
        return named_text(self)

    def resolved(self, num_heads: int, channels: int) -> "OlmoShape":
        """Replaces zeros by the sizes they stand for."""
        shape = LlamaShape(kv_heads=self.kv_heads, feed_forward=self.feed_forward).resolved(num_heads, channels)
        return replace(self, kv_heads=shape.kv_heads, feed_forward=shape.feed_forward)

    def window_of(self, layer: int) -> int:
        """The tokens that a query of this layer sees; 0: all before it, and its own."""
        return self.window if (layer + 1) % self.full_every else 0

    def rotary(self, head_width: int) -> LlamaShape:
        """The Llama whose queries and keys rotate as in layers that see all tokens."""
        numbers = {
            name: getattr(self, name) for name in ("rope_factor", "rope_length", "rope_slow", "rope_fast", "rope_scale")
        }
        return LlamaShape(head_width=head_width, rotary_base=self.rotary_base, rope=self.rope, **numbers)

    def check(self, num_heads: int, channels: int) -> None:
        """Raises `UsageError` for invalid sizes; `channels` is a multiple of `num_heads`."""
        check_choice("rope of olmo", self.rope, ROPES)
        kv_heads, head_width = self.kv_heads or num_heads, channels // num_heads
        if head_width % 2 or head_width > WIDEST_HEAD:
            actual = f"found {channels} channels in {num_heads} heads; choose another --num-heads"
            raise UsageError(f"olmo must have heads of an even width up to {WIDEST_HEAD}, {actual}")
        rules: tuple[tuple[bool, str], ...] = (
            (kv_heads > 0 and num_heads % kv_heads == 0, f"kv_heads that divide num_heads {num_heads}"),
            (0 <= self.feed_forward <= 1 << 20, "feed_forward of 1 or more"),
            (0 < self.norm_epsilon < 1, "norm_epsilon between 0 and 1"),
            (self.window >= 0 and self.full_every > 0, "window of 0 or more and full_every of 1 or more"),
            *rope_rules(self),
        )
        for holds, wanted in rules:
            if not holds:
                raise UsageError(f"olmo must have {wanted}, found {str(self)!r}; docs/olmo.md names the numbers")


@functools.lru_cache(maxsize=1024)
def rotation(family: OlmoShape, head_width: int, layer: int) -> dict[str, Any]:
    """The arguments of a layer's rotation that do not depend on the position."""
    windowed = LlamaShape(head_width=head_width, rotary_base=family.rotary_base)
    rotary = windowed if family.window_of(layer) else family.rotary(head_width)
    return {"frequencies": rotary.frequencies, "scale": rotary.rope_scale}


@functools.lru_cache(maxsize=64)
def parse_olmo(text: str) -> OlmoShape:
    """Parses the text of a configuration. Raises `UsageError` for an unknown name or an invalid value."""
    return named_values(OlmoShape, "olmo", text, "feed_forward=11008,window=4096")


def family_of(shape: "ModelShape") -> OlmoShape:
    return parse_olmo(shape.olmo)


OLMO = Network(
    title="OLMo",
    gemms=gemms,  # a Llama's; gate_up and down share the SwiGLU
    kv_heads=lambda shape: family_of(shape).kv_heads,
    feed_forward=lambda shape: family_of(shape).feed_forward,
    windows=lambda shape: tuple(map(family_of(shape).window_of, range(shape.num_layers))),
    letters=lambda shape: {"KD": shape.kv_heads * shape.head_width},
    setting="olmo",
    settle=lambda shape: str(family_of(shape).resolved(shape.num_heads, shape.channels)),
    check=lambda config: parse_olmo(config.olmo).check(config.num_heads, config.channels),
    any_context=True,
    tied=lambda shape: False,
    sides=sides,
    fp8=lambda shape: HEAD_FORMS,  # its other GEMMs read the stream, which no norm writes
    model_types=("olmo2", "olmo3"),
    blocks=LLAMA.blocks,
    modules={**LLAMA.modules, "after1": ("post_attention_layernorm",), "after2": ("post_feedforward_layernorm",)},
)
