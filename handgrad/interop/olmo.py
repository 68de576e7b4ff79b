"""OLMo's config.json in transformers, and its numbers in a GGUF file: the model types olmo2 and olmo3, whose layers have
windows.

Source: transformers, models/{olmo2,olmo3}; llama.cpp, conversion/olmo.py and src/models/olmo2.cpp.
"""

from pathlib import Path
from typing import Any

from handgrad.errors import UsageError
from handgrad.interop.gemma3 import FULL, WINDOWED, check_keys, check_rope_type, layer_types, read_pattern
from handgrad.interop.huggingface import Config, Known
from handgrad.interop.llama import LENGTH, ROPE_NUMBERS, add_rope, check_betas, rope_fields, their_scaling
from handgrad.networks.olmo import OlmoShape, family_of
from handgrad.settings.config import ModelShape

KNOWN: tuple[Known, ...] = (
    ("hidden_act", "silu", ("silu", "swish")),  # two names of one formula
    ("attention_bias", False, (False, None)),
    ("attention_dropout", 0.0, (0.0, None)),
    ("clip_qkv", None, (None,)),
    ("tie_word_embeddings", False, (False, None)),
    ("quantization_config", None, (None,)),
)
# Our size: its name in config.json, and the default there.
SIZES = {
    "vocab_size": ("vocab_size", 50304),
    "sequence_length": ("max_position_embeddings", 2048),
    "num_layers": ("num_hidden_layers", 32),
    "num_heads": ("num_attention_heads", 32),
    "channels": ("hidden_size", 4096),
}
READ = {"num_key_value_heads", "intermediate_size", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters"}
READ |= {"sliding_window", "sliding_window_pattern", "layer_types", "head_dim", LENGTH}
READ |= {key for key, *_ in (*KNOWN, *SIZES.values())}
WITHOUT_EFFECT = """architectures model_type dtype torch_dtype transformers_version initializer_range use_cache
    bos_token_id eos_token_id pad_token_id _name_or_path unsloth_fixed unsloth_version"""
ROPE_KEYS = {"rope_type", "type", "rope_theta", "attention_factor", "truncate", "partial_rotary_factor", LENGTH}
ROPE_KEYS |= {"mscale", "mscale_all_dim", *(key for _, key, _ in ROPE_NUMBERS["yarn"])}
BASE, FULL_EVERY = 500000.0, 4  # defaults there; of llama.cpp, the only number of layers


def their_config(shape: ModelShape, dropout: float) -> dict[str, Any]:
    """The part of config.json that is OLMo's, in a form that old and new versions read."""
    family, scaling = family_of(shape), their_scaling(family_of(shape).rotary(shape.head_width))
    content = {
        "architectures": ["Olmo3ForCausalLM" if family.window else "Olmo2ForCausalLM"],
        "model_type": "olmo3" if family.window else "olmo2",
        **{theirs: getattr(shape, ours) for ours, (theirs, _) in SIZES.items()},
        "num_key_value_heads": family.kv_heads,
        "intermediate_size": family.feed_forward,
        "rms_norm_eps": family.norm_epsilon,
        "rope_theta": family.rotary_base,
        "rope_scaling": scaling,
        "sliding_window_pattern": family.full_every,
        "pad_token_id": None,  # its default is a token of its published vocabulary
        **{key: default for key, default, _ in KNOWN[:-1] if key != "clip_qkv"},
    }
    if family.window:
        base = {"rope_theta": family.rotary_base}
        content["rope_parameters"] = {
            FULL: (scaling or {"rope_type": "default"}) | base,
            WINDOWED: {"rope_type": "default"} | base,
        }
        content |= {"sliding_window": family.window, "layer_types": layer_types(family.full_every, shape.num_layers)}
    return content


def read_shape(content: dict[str, Any], path: Path) -> ModelShape:
    """The model of a config.json; `DataError` if it asks for anything that our network does not compute."""
    check_keys(content, {*READ, *WITHOUT_EFFECT.split()}, "an OLMo", path)
    config, windowed = Config(content, path), content["model_type"] == "olmo3"
    config.expect(KNOWN)
    every = config.whole("sliding_window_pattern", FULL_EVERY)
    sizes: dict[str, Any] = {ours: config.whole(*theirs) for ours, theirs in SIZES.items()}
    width = sizes["channels"] // sizes["num_heads"]
    if config.whole("head_dim", width) != width:
        raise config.refused("head_dim", f"of hidden_size / num_attention_heads, {width},", content["head_dim"])
    family = OlmoShape(
        kv_heads=config.whole("num_key_value_heads", sizes["num_heads"]),
        feed_forward=config.whole("intermediate_size", 11008),
        norm_epsilon=config.number("rms_norm_eps", 1e-5, content),
        window=config.whole("sliding_window", 4096) if windowed else 0,
        full_every=read_pattern(config, sizes["num_layers"], every) if windowed else every,
        **read_rope(config, sizes["sequence_length"], windowed=windowed),
    )
    return ModelShape(**sizes, architecture="olmo", olmo=str(family))


def read_rope(config: Config, context: int, *, windowed: bool) -> dict[str, Any]:
    """The numbers of the rotation, from `rope_parameters` or the keys of older versions. `windowed`: the file has a table
    for each of the two kinds of layers."""
    tables = config.table("rope_parameters")
    full = (config.table(FULL, tables) if windowed else tables) | config.table("rope_scaling")
    check_rope_type(config, full, ("default", "yarn"))
    check_keys(full, ROPE_KEYS, "an OLMo's rope_parameters", config.path)
    base = config.number("rope_theta", BASE, config.content | full)
    if windowed:
        window = config.table(WINDOWED, tables)
        check_rope_type(config, window, ("default",))
        check_keys(window, ("rope_type", "type", "rope_theta"), f"an OLMo's {WINDOWED}", config.path)
        if (other := config.number("rope_theta", BASE, window)) != base:
            raise config.refused(f"rope_theta of {WINDOWED}", f"of {base}, as of {FULL},", other)
    return {"rotary_base": base, **rope_fields(config, full, context)}


def gguf_name(shape: ModelShape) -> str:
    """llama.cpp's name of the architecture; `UsageError` if it does not compute the same."""
    family = family_of(shape)
    check_betas(family)
    if family.window and family.full_every != FULL_EVERY:
        raise UsageError(f"llama.cpp has an OLMo with full_every 4 alone, found {family.full_every}; use --to hf")
    return "olmo2"


def gguf_numbers(writer: Any, shape: ModelShape) -> None:
    """Adds the numbers, besides the sizes, that change the mathematics."""
    family = family_of(shape)
    writer.add_head_count_kv(family.kv_heads)
    writer.add_layer_norm_rms_eps(family.norm_epsilon)
    add_rope(writer, family.rotary(shape.head_width))
    if family.window:
        writer.add_sliding_window(family.window)
