"""The modern network (docs/modern.md) in a folder of transformers, which has no such model: the folder brings its code.

    ours                                       there
    wte, head                                  wte.weight, head.weight    (V, C): V without padding
    blocks.l.qkv_weight, proj, fc, fcproj      blocks.l.qkv.weight, ...   (out, in), as ours

The code, `transformers_code/*.py`, runs where transformers is; nothing in handgrad imports it.
"""

from pathlib import Path
from typing import Any

from handgrad.config import SOFTCAP, ModelShape
from handgrad.ops.reference.rmsnorm import RMSNORM_EPSILON
from handgrad.ops.reference.rotary import ROTARY_BASE

CODE = Path(__file__).with_name("transformers_code")
MODEL_TYPE = "handgrad_modern"
# The keys of config.json that decide the mathematics beside sizes and `techniques`: the default, and the values of ours.
KNOWN: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
    ("model_type", None, (MODEL_TYPE,)),
    ("norm_epsilon", RMSNORM_EPSILON, (RMSNORM_EPSILON,)),
    ("rotary_base", ROTARY_BASE, (ROTARY_BASE,)),
    ("softcap", SOFTCAP, (SOFTCAP,)),
    ("quantization_config", None, (None,)),
)
SIZES = ("vocab_size", "max_position_embeddings", "num_hidden_layers", "num_attention_heads", "hidden_size")


def their_name(name: str) -> str:
    """A row of the parameter table -> its name in the file."""
    return f"{name.removesuffix('_weight')}.weight"


def their_config(shape: ModelShape) -> dict[str, Any]:
    """The part of config.json that is this network's."""
    sizes = shape.vocab_size, shape.sequence_length, shape.num_layers, shape.num_heads, shape.channels
    return {
        "architectures": ["HandgradModernForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_handgrad.HandgradModernConfig",
            "AutoModelForCausalLM": "modeling_handgrad.HandgradModernForCausalLM",
        },
        "model_type": MODEL_TYPE,
        **dict(zip(SIZES, sizes, strict=True)),
        "techniques": shape.techniques,
        **{key: default for key, default, _ in KNOWN[1:4]},
        "tie_word_embeddings": not shape.has("untied_head"),
    }


def code_files() -> dict[str, bytes]:
    """The network in transformers' terms, by file name."""
    return {path.name: path.read_bytes() for path in sorted(CODE.glob("*.py"))}
