"""The modern network in transformers' format. transformers has no such model, so the folder includes its code.

The code, `transformers_code/*.py`, runs inside transformers; nothing in handgrad imports it.
"""

from pathlib import Path
from typing import Any

from handgrad.errors import DataError, UsageError
from handgrad.interop.huggingface import Config, Known
from handgrad.networks.modern import of_stored
from handgrad.ops.reference.rmsnorm import RMSNORM_EPSILON
from handgrad.ops.reference.rotary import ROTARY_BASE
from handgrad.settings.config import SOFTCAP, ModelShape

CODE = Path(__file__).with_name("transformers_code")
KNOWN: tuple[Known, ...] = (
    ("norm_epsilon", RMSNORM_EPSILON, (RMSNORM_EPSILON,)),
    ("rotary_base", ROTARY_BASE, (ROTARY_BASE,)),
    ("softcap", SOFTCAP, (SOFTCAP,)),
    ("quantization_config", None, (None,)),
)
SIZES = ("vocab_size", "max_position_embeddings", "num_hidden_layers", "num_attention_heads", "hidden_size")


def their_config(shape: ModelShape, dropout: float) -> dict[str, Any]:
    """The part of config.json that is this network's."""
    sizes = shape.vocab_size, shape.sequence_length, shape.num_layers, shape.num_heads, shape.channels
    return {
        "architectures": ["HandgradModernForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_handgrad.HandgradModernConfig",
            "AutoModelForCausalLM": "modeling_handgrad.HandgradModernForCausalLM",
        },
        "model_type": shape.network.model_types[0],
        **dict(zip(SIZES, sizes, strict=True)),
        "techniques": shape.techniques,
        **{key: default for key, default, _ in KNOWN[:3]},
        "tie_word_embeddings": not shape.has("untied_head"),
    }


def read_shape(content: dict[str, Any], path: Path) -> ModelShape:
    """The model of a config.json; `DataError`: one we do not compute. Old files have `without` instead of `techniques`."""
    config = Config(content, path)
    config.expect(KNOWN)
    V, T, L, H, C = (config.whole(key) for key in SIZES)
    for key in ("techniques", "without"):
        if not isinstance(value := content.get(key, ""), str):
            raise config.refused(key, "as text", value)
    try:
        techniques = of_stored({"architecture": "modern", "without": "", **content})["techniques"]
    except UsageError as error:
        raise DataError(f"{path}: {error}") from None
    return ModelShape(V, T, L, H, C, "modern", techniques)


def gguf_name(shape: ModelShape) -> str:
    raise UsageError("llama.cpp has no network like the modern one, only GPT-2's and the Llama family's; use --to hf")
