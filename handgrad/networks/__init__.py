"""The sizes of a model, from which its tables follow."""

from dataclasses import dataclass

from handgrad.networks.llama import LlamaShape, parse_llama, settled_llama
from handgrad.networks.modern import difference, names_of, resolve_techniques

VOCABULARY_MULTIPLE = 128  # the padded vocabulary is a multiple of this: GEMMs run on full tiles
NETWORKS = {"gpt2": "GPT-2", "modern": "modern network", "llama": "Llama"}  # the name of each architecture in a sentence
SOFTCAP = 15.0  # bound of the modern network's logits


@dataclass(frozen=True)
class ModelShape:
    """The architecture and its sizes; the parameter table follows from them."""

    vocab_size: int  # V
    sequence_length: int  # the longest T
    num_layers: int  # L
    num_heads: int  # H
    channels: int  # C
    architecture: str = "gpt2"  # a file of `models`
    techniques: str = ""  # of a modern network, all that it has, with commas; empty: the defaults
    llama: str = ""  # what a Llama has beside, as the text of a `LlamaShape`

    def __post_init__(self) -> None:
        object.__setattr__(self, "techniques", resolve_techniques(self.architecture, self.techniques))
        if self.architecture == "llama":
            object.__setattr__(self, "llama", settled_llama(self.llama, self.num_heads, self.channels))

    @property
    def family(self) -> LlamaShape:
        """The numbers of a Llama."""
        return parse_llama(self.llama)

    def has(self, technique: str) -> bool:
        """True if a modern network has this one of `TECHNIQUES`."""
        return technique in names_of(self.techniques)

    @property
    def variant(self) -> str:
        """The beginning of a line about the model: any network but GPT-2, and its difference from the defaults."""
        if self.architecture != "modern":
            return "" if self.architecture == "gpt2" else f"{self.architecture}, "
        without, beside = difference(self.techniques)
        return self.architecture + (f" without {without}" if without else "") + (f" with {beside}" if beside else "") + ", "

    @property
    def softcap(self) -> float:
        """The bound c of logits c tanh(x / c), or 0 for none."""
        return SOFTCAP if self.architecture == "modern" and self.has("softcap") else 0.0

    @property
    def padded_vocab_size(self) -> int:
        """Vp: V rounded up; the extra rows stay zero and are never trained."""
        return -(-self.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    @property
    def feed_forward(self) -> int:
        """F: the width of the hidden layer of the feed-forward half, 4 C in every GPT-2."""
        return self.family.feed_forward if self.architecture == "llama" else 4 * self.channels

    @property
    def head_width(self) -> int:
        """D"""
        return self.family.head_width if self.architecture == "llama" else self.channels // self.num_heads
