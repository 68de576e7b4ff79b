"""Networks, a file each: everything about one but its computation, as a `Network`. Does not import torch.

network  the record
gpt2     GPT-2
modern   the network of docs/modern.md, and the list of its techniques
llama    Llama, Qwen2, Qwen3 and their relatives, and the sizes in which they differ
gemma3   Gemma 3
olmo     OLMo 2 and OLMo 3
vqvae    an autoencoder of pictures with discrete codes
lora     the adapters of a run
fp8      the shapes and settings that fp8 GEMMs support
"""

import functools
from dataclasses import dataclass
from typing import Any

from handgrad.errors import UsageError
from handgrad.networks.gemma3 import GEMMA3
from handgrad.networks.gpt2 import GPT2
from handgrad.networks.llama import LLAMA, LlamaShape, parse_llama
from handgrad.networks.modern import MODERN, names_of
from handgrad.networks.network import Fp8, Gemm, Network
from handgrad.networks.olmo import OLMO
from handgrad.networks.vqvae import VQVAE

VOCABULARY_MULTIPLE = 128  # padding of the vocabulary, so that GEMMs run on full tiles
NETWORKS: dict[str, Network] = {"gpt2": GPT2, "modern": MODERN, "llama": LLAMA, "gemma3": GEMMA3, "olmo": OLMO}
NETWORKS |= {"vqvae": VQVAE}


@dataclass(frozen=True)
class ModelShape:
    """A network and its sizes. They determine the parameter table."""

    vocab_size: int  # V
    sequence_length: int  # the longest T
    num_layers: int  # L
    num_heads: int  # H
    channels: int  # C
    architecture: str = "gpt2"  # of `NETWORKS`, and a file of `models`
    techniques: str = ""  # a modern network's techniques, separated by commas; empty: the defaults
    llama: str = ""  # a Llama's further sizes, as the text of a `LlamaShape`
    gemma3: str = ""  # a Gemma 3's, of a `Gemma3Shape`
    olmo: str = ""  # an OLMo's, of an `OlmoShape`
    vqvae: str = ""  # a vqvae's, of a `VqvaeShape`

    def __post_init__(self) -> None:
        if setting := self.network.setting:
            object.__setattr__(self, setting, self.network.settle(self))

    @property
    def network(self) -> Network:
        return NETWORKS[self.architecture]

    @property
    def family(self) -> LlamaShape:
        """A Llama's further sizes."""
        return parse_llama(self.llama)

    def has(self, technique: str) -> bool:
        """True for a modern network with this one of `TECHNIQUES`."""
        return technique in names_of(self.techniques)

    @property
    def variant(self) -> str:
        """The start of a line about the model: its network unless GPT-2, and how it differs from the defaults."""
        return self.network.variant(self)

    @functools.cached_property
    def softcap(self) -> float:
        """The bound c of logits c tanh(x / c), or 0 for none."""
        return self.network.softcap(self)

    @property
    def padded_vocab_size(self) -> int:
        """Vp: V rounded up; the extra rows stay zero and are never trained."""
        return -(-self.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    @property
    def feed_forward(self) -> int:
        """F: the hidden width of the feed-forward half."""
        return self.network.feed_forward(self)

    @property
    def head_width(self) -> int:
        """D"""
        own = self.network.head_width
        return self.channels // self.num_heads if own is None else own(self)

    @property
    def kv_heads(self) -> int:
        """K: heads of keys and values."""
        return self.network.kv_heads(self)

    @functools.cached_property
    def windows(self) -> tuple[int, ...]:
        """By layer: the keys that a query attends to, the last of them its own; 0: all before it too."""
        return self.network.windows(self)

    @property
    def window(self) -> int:
        """The window of the layers that have one, or 0."""
        return max(self.windows)

    @property
    def kernel_sizes(self) -> dict[str, int]:
        """The arguments of a backend's `check_sizes`."""
        heads = {"num_heads": self.num_heads, "head_width": self.head_width}
        return {"length": self.sequence_length, "channels": self.channels, **heads}

    @property
    def letters(self) -> dict[str, int]:
        """The sizes of the letters in tensor shapes. HD and its like are the columns of all heads together."""
        C, F, H, K, D = self.channels, self.feed_forward, self.num_heads, self.kv_heads, self.head_width
        heads = {"H": H, "2H": 2 * H, "K": K, "H+K": H + K, "D": D, "HD": H * D, "QKV": (H + 2 * K) * D}
        ends = {"V": self.vocab_size, "Vp": self.padded_vocab_size, "L": self.num_layers, "maxT": self.sequence_length}
        return {"1": 1, "C": C, "3C": 3 * C, "F": F, "2F": 2 * F, **heads, **ends, **self.network.letters(self)}

    @property
    def widest(self) -> int:
        """Columns of the widest GEMM in a block."""
        return max(sum(gemm.outputs.values()) for gemm in self.gemms)

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        """The GEMMs of a block."""
        return self.network.gemms(self)

    @property
    def fp8_parts(self) -> tuple[str, ...]:
        """The groups of a block's GEMMs that switch to fp8 together; none if only the loss head has forms in fp8."""
        parts = {form.part for form in self.network.fp8(self).values()}
        return tuple(dict.fromkeys(gemm.part for gemm in self.gemms if gemm.part in parts))

    @property
    def forms(self) -> dict[str, Fp8]:
        """The fp8 forms of tensors, by name, inside and outside the blocks."""
        weights = {gemm.weight: Fp8(gemm.part) for gemm in self.gemms if gemm.part in self.fp8_parts}
        head = "wte" if self.network.tied(self) else "head"  # GEMMs read no other embedding
        return {**weights, head: Fp8("head"), **self.network.fp8(self)}

    @property
    def flops_per_token(self) -> float:
        """FLOPs of forward and backward: 6 per GEMM parameter, and 6 H D T for a layer's two causal products, fewer within
        a window. Embedding lookups cost none. Scalars, gates and norms are negligible and count only if their network's
        `counted` says so."""
        if (own := self.network.flops) is not None:
            return own(self)
        in_blocks = self.num_layers * sum(gemm.inputs * sum(gemm.outputs.values()) for gemm in self.gemms)
        parameters = in_blocks + self.vocab_size * self.channels + self.network.counted(self)
        T = self.sequence_length
        spans = (min(w or T, T) for w in self.windows)
        seen = sum(w * (2 * T - w) / T for w in spans)  # twice the keys of a mean query, over all layers
        return 6.0 * parameters + 6.0 * self.num_heads * self.head_width * seen


def check_network(config: Any) -> None:
    """Raises `UsageError` for a configuration that is invalid for its network, or has settings of another network."""
    name, network = config.architecture, NETWORKS[config.architecture]
    if network.head_width is None and config.channels % config.num_heads:
        raise UsageError(
            f"channels must be a multiple of num_heads, found {config.channels} and {config.num_heads};"
            f" heads of 64 would need num_heads {max(1, config.channels // 64)}"
        )
    for owner, other in NETWORKS.items():
        if other is not network and other.setting and (text := getattr(config, other.setting)):
            raise UsageError(f"{other.setting} is for --architecture {owner}, found {text!r} with {name}")
    network.check(config)
    if config.dropout and not network.dropout:
        raise UsageError(f"architecture {name} has no dropout, found dropout {config.dropout:g}; leave it at 0")
