"""GPT-2's config.json in transformers, and its numbers in a GGUF file.

Source: transformers, models/gpt2/modeling_gpt2.py and configuration_gpt2.py.
"""

from pathlib import Path
from typing import Any

from handgrad.interop.huggingface import Config, Known
from handgrad.settings.config import ModelShape

KNOWN: tuple[Known, ...] = (
    ("activation_function", "gelu_new", ("gelu_new", "gelu_pytorch_tanh")),  # two names of one formula
    ("layer_norm_epsilon", 1e-5, (1e-5,)),
    ("scale_attn_weights", True, (True,)),
    ("scale_attn_by_inverse_layer_idx", False, (False,)),
    ("reorder_and_upcast_attn", False, (False,)),
    ("add_cross_attention", False, (False,)),
    ("tie_word_embeddings", True, (True,)),
    ("quantization_config", None, (None,)),
)
SIZES = ("vocab_size", "n_positions", "n_layer", "n_head", "n_embd")


def their_config(shape: ModelShape, dropout: float) -> dict[str, Any]:
    """The part of config.json that is GPT-2's."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": shape.vocab_size,
        "n_positions": shape.sequence_length,
        "n_ctx": shape.sequence_length,
        "n_layer": shape.num_layers,
        "n_head": shape.num_heads,
        "n_embd": shape.channels,
        "n_inner": None,
        **{key: default for key, default, _ in KNOWN[:5]},
        "tie_word_embeddings": True,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout),  # a fine-tuner may want other values
    }


def read_shape(content: dict[str, Any], path: Path) -> ModelShape:
    """The model of a config.json; `DataError` if it asks for anything that our network does not compute."""
    config = Config({"n_positions": content.get("n_ctx"), **content}, path)
    config.expect(KNOWN)
    V, T, L, H, C = (config.whole(key) for key in SIZES)
    if content.get("n_inner") not in (None, 4 * C):
        raise config.refused("n_inner", f"null or {4 * C} (4 n_embd)", content["n_inner"])
    return ModelShape(V, T, L, H, C)


def gguf_name(shape: ModelShape) -> str:
    return "gpt2"


def gguf_numbers(writer: Any, shape: ModelShape) -> None:
    """Adds the numbers, besides the sizes, that change the mathematics."""
    writer.add_layer_norm_eps(1e-5)
