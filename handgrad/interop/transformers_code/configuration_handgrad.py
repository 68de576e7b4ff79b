"""The sizes of handgrad's modern network, for transformers; `handgrad export --to hf` writes it with the weights."""

from typing import Any

from transformers import PreTrainedConfig


class HandgradModernConfig(PreTrainedConfig):
    """Sizes, and `techniques`: those that this model has, with commas, of rotary, qk_norm, softcap, embedding_norm,
    untied_head, residual_scalars, input_scalars, value_embeddings (and zero_init, which matters at the start of training
    alone)."""

    model_type = "handgrad_modern"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(
        self,
        vocab_size: int = 50257,
        max_position_embeddings: int = 1024,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 6,
        hidden_size: int = 768,
        techniques: str = "rotary,qk_norm,softcap,embedding_norm,zero_init,untied_head",
        norm_epsilon: float = 1e-6,
        rotary_base: float = 10000.0,
        softcap: float = 15.0,
        use_cache: bool = True,
        **kwargs: Any,
    ):
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.hidden_size = hidden_size
        self.techniques = techniques
        self.norm_epsilon = norm_epsilon
        self.rotary_base = rotary_base
        self.softcap = softcap
        self.use_cache = use_cache
        kwargs["tie_word_embeddings"] = not self.has("untied_head")
        super().__init__(**kwargs)

    def has(self, technique: str) -> bool:
        return technique in [name.strip() for name in self.techniques.split(",")]
