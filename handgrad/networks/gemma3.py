"""Gemma 3's text models. models/gemma3.py computes them.

A configuration writes the sizes that only they have as a text: `kv_heads=1,window=512`. One left out has its default.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from handgrad.errors import UsageError
from handgrad.names import named_text, named_values
from handgrad.networks.llama import LLAMA, WIDEST_HEAD, gemms, sides
from handgrad.networks.network import HEAD_FORMS, Network

if TYPE_CHECKING:
    from handgrad.networks import ModelShape


@dataclass(frozen=True)
class Gemma3Shape:
    """The sizes of a member. 0: `resolved` derives the size from the model's."""

    kv_heads: int = 0  # heads of keys and values; num_heads / kv_heads query heads share one; 0: num_heads
    head_width: int = 256  # D
    feed_forward: int = 0  # F; 0: 4 channels
    norm_epsilon: float = 1e-6
    window: int = 512  # tokens that a query of a windowed layer sees, its own included
    full_every: int = 6  # of this many layers the last sees all tokens before it; 1: every layer does
    rotary_base: float = 1000000.0  # of layers that see all tokens
    window_rotary_base: float = 10000.0  # of windowed layers
    rope_factor: float = 1.0  # divides the frequencies of layers that see all tokens, for contexts beyond the pretraining's
    score_width: int = 0  # attention divides its scores by the root of this; 0: head_width

    def __str__(self) -> str:
        return named_text(self)

    def resolved(self, num_heads: int, channels: int) -> "Gemma3Shape":
        """Replaces zeros by the sizes they stand for."""
        return replace(
            self,
            kv_heads=self.kv_heads or num_heads,
            feed_forward=self.feed_forward or 4 * channels,
            score_width=self.score_width or self.head_width,
        )

    def window_of(self, layer: int) -> int:
        """The tokens that a query of this layer sees; 0: all before it, and its own."""
        return self.window if (layer + 1) % self.full_every else 0

    def check(self, num_heads: int) -> None:
        """Raises `UsageError` for invalid sizes."""
        shape = self.resolved(num_heads, 1)
        rules: tuple[tuple[bool, str], ...] = (
            (shape.kv_heads > 0 and num_heads % shape.kv_heads == 0, f"kv_heads that divide num_heads {num_heads}"),
            (0 < shape.head_width <= WIDEST_HEAD and shape.head_width % 2 == 0, "an even head_width"),
            (0 < shape.feed_forward <= 1 << 20, "feed_forward of 1 or more"),
            (min(shape.window, shape.full_every, shape.score_width) > 0, "window, full_every and score_width of 1 or more"),
            (0 < shape.norm_epsilon < 1, "norm_epsilon between 0 and 1"),
            (1 < shape.rotary_base < math.inf, "rotary_base above 1"),
            (1 < shape.window_rotary_base < math.inf, "window_rotary_base above 1"),
            (1 <= shape.rope_factor < math.inf, "rope_factor of 1 or more"),
        )
        for holds, wanted in rules:
            if not holds:
                raise UsageError(f"gemma3 must have {wanted}, found {str(self)!r}; docs/gemma.md names the numbers")


@functools.lru_cache(maxsize=1024)
def rotation(family: Gemma3Shape, layer: int) -> dict[str, Any]:
    """The arguments of a layer's rotation that do not depend on the position. Attention divides its scores by the root of
    D, so queries and keys are each multiplied by (D / score_width)^(1/4)."""
    D, windowed = family.head_width, family.window_of(layer) > 0
    base, factor = (family.window_rotary_base, 1.0) if windowed else (family.rotary_base, family.rope_factor)
    frequencies = tuple(base ** (-2 * pair / D) / factor for pair in range(D // 2))
    return {"frequencies": frequencies, "scale": (D / family.score_width) ** 0.25}


@functools.lru_cache(maxsize=64)
def parse_gemma3(text: str) -> Gemma3Shape:
    """Parses the text of a configuration. Raises `UsageError` for an unknown name or an invalid value."""
    return named_values(Gemma3Shape, "gemma3", text, "kv_heads=1,feed_forward=2048,window=512")


def family_of(shape: "ModelShape") -> Gemma3Shape:
    return parse_gemma3(shape.gemma3)


GEMMA3 = Network(
    title="Gemma 3",
    gemms=gemms,  # a Llama's; gate_up and down share the GEGLU
    head_width=lambda shape: family_of(shape).head_width,
    kv_heads=lambda shape: family_of(shape).kv_heads,
    feed_forward=lambda shape: family_of(shape).feed_forward,
    windows=lambda shape: tuple(map(family_of(shape).window_of, range(shape.num_layers))),
    setting="gemma3",
    settle=lambda shape: str(family_of(shape).resolved(shape.num_heads, shape.channels)),
    check=lambda config: parse_gemma3(config.gemma3).check(config.num_heads),
    any_context=True,
    sides=sides,
    fp8=lambda shape: HEAD_FORMS,  # heads of 256 are too wide for attention's kernels in fp8
    model_types=("gemma3_text", "gemma3"),
    blocks=LLAMA.blocks,
    modules={
        **LLAMA.modules,
        "after1": ("post_attention_layernorm",),
        "norm2": ("pre_feedforward_layernorm",),
        "after2": ("post_feedforward_layernorm",),
    },
)
