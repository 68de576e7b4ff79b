"""Gemma 3's config.json in transformers, and its numbers in a GGUF file: the model type gemma3_text, and the text part of
gemma3, whose vision tower `huggingface.find_tensors` leaves aside.

Source: transformers, models/gemma3; llama.cpp, conversion/gemma.py and src/models/gemma3.cpp.
"""

from collections.abc import Container
from pathlib import Path
from typing import Any

from handgrad.errors import DataError, UsageError
from handgrad.interop.huggingface import Config, Known
from handgrad.networks.gemma3 import Gemma3Shape, family_of
from handgrad.settings.config import ModelShape

KNOWN: tuple[Known, ...] = (
    ("hidden_activation", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",)),
    ("attention_bias", False, (False, None)),
    ("attention_dropout", 0.0, (0.0, None)),
    ("use_bidirectional_attention", False, (False, None)),
    ("attn_logit_softcapping", None, (None,)),
    ("final_logit_softcapping", None, (None,)),
    ("tie_word_embeddings", True, (True, None)),
    ("quantization_config", None, (None,)),
)
# Our size: its name in config.json, and the default there.
SIZES = {
    "vocab_size": ("vocab_size", 262208),
    "sequence_length": ("max_position_embeddings", 131072),
    "num_layers": ("num_hidden_layers", 26),
    "num_heads": ("num_attention_heads", 8),
    "channels": ("hidden_size", 2304),
}
FAMILY = {
    "kv_heads": ("num_key_value_heads", 4),
    "head_width": ("head_dim", 256),
    "feed_forward": ("intermediate_size", 9216),
    "window": ("sliding_window", 4096),
    "score_width": ("query_pre_attn_scalar", 256),
}
READ = {"rms_norm_eps", "rope_theta", "rope_local_base_freq", "rope_scaling", "rope_parameters", "layer_types"}
READ |= {"sliding_window_pattern", *(key for key, *_ in (*KNOWN, *SIZES.values(), *FAMILY.values()))}
# Keys that change no logits. The last line's are of a model with images.
WITHOUT_EFFECT = """architectures model_type dtype torch_dtype transformers_version initializer_range use_cache
    cache_implementation bos_token_id eos_token_id pad_token_id _name_or_path _sliding_window_pattern unsloth_fixed
    unsloth_version text_config vision_config boi_token_index eoi_token_index image_token_index mm_tokens_per_image"""
FULL, WINDOWED = "full_attention", "sliding_attention"
LLAMACPP = {"full_every": 6, "window_rotary_base": 10000.0}  # its own constants


def layer_types(full_every: int, layers: int) -> list[str]:
    return [WINDOWED if (layer + 1) % full_every else FULL for layer in range(layers)]


def their_config(shape: ModelShape, dropout: float) -> dict[str, Any]:
    """The part of config.json that is Gemma 3's, in a form that old and new versions read."""
    family = family_of(shape)
    if shape.channels % shape.num_heads:  # Gemma3TextConfig.validate_architecture
        sizes = f"found {shape.channels} and {shape.num_heads}"
        raise UsageError(f"transformers has no Gemma 3 whose channels are no multiple of num_heads, {sizes}; train another")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **{theirs: getattr(shape, ours) for ours, (theirs, _) in SIZES.items()},
        **{theirs: getattr(family, ours) for ours, (theirs, _) in FAMILY.items()},
        "rms_norm_eps": family.norm_epsilon,
        "rope_theta": family.rotary_base,
        "rope_local_base_freq": family.window_rotary_base,
        "rope_scaling": None if family.rope_factor == 1 else {"rope_type": "linear", "factor": family.rope_factor},
        "sliding_window_pattern": family.full_every,
        "layer_types": layer_types(family.full_every, shape.num_layers),
        **{key: default for key, default, _ in KNOWN[:-1]},
    }


def read_shape(content: dict[str, Any], path: Path) -> ModelShape:
    """The model of a config.json; `DataError` if it asks for anything that our network does not compute."""
    text = Config(content, path).table("text_config") or content
    check_keys(content | text, {*READ, *WITHOUT_EFFECT.split()}, "Gemma 3", path)
    config = Config(text, path)
    config.expect(KNOWN)
    sizes: dict[str, Any] = {ours: config.whole(*theirs) for ours, theirs in SIZES.items()}
    family = Gemma3Shape(
        **{ours: config.whole(*theirs) for ours, theirs in FAMILY.items()},
        norm_epsilon=config.number("rms_norm_eps", 1e-6, text),
        full_every=read_pattern(config, sizes["num_layers"], config.whole("sliding_window_pattern", 6)),
        **read_rope(config),
    )
    return ModelShape(**sizes, architecture="gemma3", gemma3=str(family))


def check_keys(table: dict[str, Any], known: Container[str], title: str, path: Path) -> None:
    """Raises `DataError` for a key of another meaning than null."""
    if other := next((key for key, value in table.items() if key not in known and value is not None), ""):
        actual = f"found also {other!r:.60}: {table[other]!r:.60}"
        raise DataError(f"expected the keys of {title} in {path}, {actual}; take it out if it changes no logits")


def read_pattern(config: Config, layers: int, default: int) -> int:
    """`full_every` of the list of layers, or `default` in files without one."""
    if (kinds := config.content.get("layer_types")) is None:
        return default
    kinds = kinds if isinstance(kinds, list) else [kinds]
    every = kinds.index(FULL) + 1 if FULL in kinds else max(default, layers + 1)
    if len(kinds) != layers or kinds != layer_types(every, layers):
        raise config.refused("layer_types", f"of {layers} layers with one of {FULL} in every {every}", kinds)
    return every


def read_rope(config: Config) -> dict[str, Any]:
    """The bases and the factor of the rotary positions, from `rope_parameters` or the keys of older versions."""
    content, rope = config.content, config.table("rope_parameters")
    full = config.table(FULL, rope) | config.table("rope_scaling")
    windowed = {"rope_theta": content.get("rope_local_base_freq", 1e4)} | config.table(WINDOWED, rope)
    for table, kinds in ((full, ("default", "linear")), (windowed, ("default",))):
        check_rope_type(config, table, kinds)
        check_keys(table, ("rope_type", "type", "rope_theta", "factor"), "Gemma 3", config.path)
    return {
        "rotary_base": config.number("rope_theta", 1e6, {**content, **full}),
        "window_rotary_base": config.number("rope_theta", None, windowed),
        "rope_factor": config.number("factor", 1.0, full),
    }


def check_rope_type(config: Config, table: dict[str, Any], kinds: tuple[str, ...]) -> None:
    """Raises `DataError` unless the table's rule, `default` without one, is among these."""
    if (kind := table.get("rope_type", table.get("type", "default"))) not in kinds:
        raise config.refused("rope_type", " or ".join(kinds), kind)


def gguf_name(shape: ModelShape) -> str:
    """llama.cpp's name of the architecture; `UsageError` if it does not compute the same."""
    family = family_of(shape)
    width = shape.channels // shape.num_heads if shape.num_layers == 62 else family.head_width  # of 27B
    for name, theirs in {**LLAMACPP, "score_width": width}.items():
        if (ours := getattr(family, name)) != theirs:
            raise UsageError(f"llama.cpp computes a Gemma 3 with {name} {theirs} alone, found {ours}; use --to hf")
    return "gemma3"


def gguf_numbers(writer: Any, shape: ModelShape) -> None:
    """Adds the numbers, besides the sizes, that change the mathematics."""
    import gguf

    family = family_of(shape)
    writer.add_head_count_kv(family.kv_heads)
    writer.add_key_length(family.head_width)
    writer.add_value_length(family.head_width)
    writer.add_layer_norm_rms_eps(family.norm_epsilon)
    writer.add_rope_freq_base(family.rotary_base)
    writer.add_sliding_window(family.window)
    if family.rope_factor != 1:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(family.rope_factor)
