"""The Llama family's config.json in transformers, and its numbers in a GGUF file: the model types llama, qwen2, qwen3,
smollm3 and mistral.

A model's type follows from its parts: qwen3 has the norms of queries and keys, qwen2 the bias, smollm3 layers that do not
rotate, mistral a window.

Source: transformers, models/{llama,qwen2,qwen3,smollm3,mistral} and modeling_rope_utils.py.
"""

import json
import math
from pathlib import Path
from typing import Any

from handgrad.errors import UsageError
from handgrad.interop.huggingface import Config, Known
from handgrad.networks.llama import LlamaShape
from handgrad.settings.config import ModelShape

YARN_BETAS = (32.0, 1.0)  # fast and slow, in llama.cpp
NOPE_INTERVAL = 4  # in llama.cpp
MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "mistral": "MistralForCausalLM",
}
KNOWN: tuple[Known, ...] = (
    ("hidden_act", "silu", ("silu", "swish")),  # two names of one formula
    ("attention_bias", False, (False, None)),  # of all four GEMMs of attention
    ("mlp_bias", False, (False, None)),
    ("use_sliding_window", False, (False, None)),
    ("partial_rotary_factor", 1.0, (1.0, None)),
    ("rope_interleaved", False, (False, None)),  # of neighbouring channels
    ("attention_dropout", 0.0, (0.0, None)),
    ("is_causal", True, (True, None)),
    ("quantization_config", None, (None,)),
)
SIZES = ("vocab_size", "max_position_embeddings", "num_hidden_layers", "num_attention_heads", "hidden_size")
ROPES = {"default": "plain", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
# Rope type -> our number, its name in config.json, and the default there (None: it must be there).
ROPE_NUMBERS: dict[str, tuple[tuple[str, str, float | None], ...]] = {
    "plain": (),
    "linear": (("rope_factor", "factor", None),),
    "llama3": (
        ("rope_factor", "factor", None),
        ("rope_slow", "low_freq_factor", None),
        ("rope_fast", "high_freq_factor", None),
    ),
    "yarn": (("rope_factor", "factor", None), ("rope_slow", "beta_slow", 1.0), ("rope_fast", "beta_fast", 32.0)),
}
LENGTH = "original_max_position_embeddings"


def model_type(shape: ModelShape) -> str:
    """The type that computes this model; `UsageError` if none does."""
    family = shape.family
    kinds = {"qwen3": ("qk_norm", family.qk_norm), "qwen2": ("qkv_bias", family.qkv_bias)}
    kinds |= {"smollm3": ("nope_interval", family.nope_interval), "mistral": ("window", family.window)}
    if len(kinds_held := {kind: name for kind, (name, has) in kinds.items() if has}) > 1:
        both = " and ".join(kinds_held.values())
        raise UsageError(f"transformers has no model with {both}, found both; train one without either")
    return next(iter(kinds_held), "llama")


def their_config(shape: ModelShape, dropout: float) -> dict[str, Any]:
    """The part of config.json that is this family's, in a form that old and new versions read."""
    family, kind = shape.family, model_type(shape)
    if kind == "llama" and shape.channels % shape.num_heads:  # for any head width: LlamaConfig.validate_architecture
        raise UsageError(
            f"transformers has no llama whose channels are no multiple of num_heads, found {shape.channels} and"
            f" {shape.num_heads}; train one with qk_norm or qkv_bias, or with other heads"
        )
    sizes = shape.vocab_size, shape.sequence_length, shape.num_layers, shape.num_heads, shape.channels
    biases = {"qwen2": (), "qwen3": ("attention_bias",), "mistral": ()}.get(kind, ("attention_bias", "mlp_bias"))
    # Its default for padding is a token of its published vocabulary.
    own = {"no_rope_layers": rotating(shape), "no_rope_layer_interval": family.nope_interval, "pad_token_id": None}
    return {
        "architectures": [MODEL_TYPES[kind]],
        "model_type": kind,
        **dict(zip(SIZES, sizes, strict=True)),
        "num_key_value_heads": family.kv_heads,
        "head_dim": family.head_width,
        "intermediate_size": family.feed_forward,
        "hidden_act": "silu",
        "rms_norm_eps": family.norm_epsilon,
        "rope_theta": family.rotary_base,
        "rope_scaling": their_scaling(family),
        **dict.fromkeys(biases, False),
        **({} if kind in ("llama", "mistral") else {"use_sliding_window": False}),
        **(own if kind == "smollm3" else {}),
        **({"sliding_window": family.window} if kind == "mistral" else {}),
        "attention_dropout": 0.0,
        "tie_word_embeddings": family.tied,
    }


def window_of(content: dict[str, Any]) -> bool:
    """True for a mistral with a window; null, as in its later versions, is none, and absence the published 4096."""
    return content["model_type"] == "mistral" and content.setdefault("sliding_window", 4096) is not None


def rotating(shape: ModelShape) -> list[int]:
    """For each layer 1, or 0 if it does not rotate: the list `no_rope_layers`."""
    return [int(any(shape.family.rotation_of(layer)[0])) for layer in range(shape.num_layers)]


def nope_interval(config: Config, layers: int) -> int:
    """The interval of layers without a rotation. Raises `DataError` unless they are at the multiples of a number."""
    interval = config.whole("no_rope_layer_interval", 4)
    if (listed := config.content.get("no_rope_layers")) is None:
        return interval
    listed = listed if isinstance(listed, list) else [listed]
    first = listed.index(0) + 1 if 0 in listed else max(interval, layers + 1)
    if len(listed) != layers or listed != [int((layer + 1) % first != 0) for layer in range(layers)]:
        raise config.refused("no_rope_layers", "with a 0 at every so manyth layer and 1 elsewhere", listed)
    return first


def their_scaling(family: LlamaShape) -> dict[str, Any] | None:
    if family.rope == "plain":
        return None
    kind = next(theirs for theirs, ours in ROPES.items() if ours == family.rope)
    numbers = {theirs: getattr(family, ours) for ours, theirs, _ in ROPE_NUMBERS[family.rope]}
    length = {} if family.rope == "linear" else {LENGTH: family.rope_length}
    scale = {"attention_factor": family.rope_scale} if family.rope == "yarn" else {}
    return {"rope_type": kind, **numbers, **length, **scale}


def read_shape(content: dict[str, Any], path: Path) -> ModelShape:
    """The model of a config.json; `DataError` if it asks for anything that our network does not compute."""
    config, kind = Config(content, path), content["model_type"]
    config.expect(KNOWN)
    layers = content.get("layer_types") or []
    wanted = "sliding_attention" if kind == "mistral" and window_of(content) else "full_attention"
    if not isinstance(layers, list) or any(layer != wanted for layer in layers):
        raise config.refused("layer_types", f"of {wanted}", layers)
    V, T, L, H, C = (config.whole(key) for key in SIZES)
    width = 128 if kind == "qwen3" and "head_dim" not in content else C // H  # their defaults
    keys = H if "num_key_value_heads" in content else {"qwen2": 32, "qwen3": 32, "smollm3": 4, "mistral": 8}.get(kind, H)
    if type(tied := content.get("tie_word_embeddings", kind == "smollm3")) is not bool:
        raise config.refused("tie_word_embeddings", "true or false", tied)
    rope = read_rope(config)
    family = LlamaShape(
        kv_heads=config.whole("num_key_value_heads", keys),
        head_width=config.whole("head_dim", width),
        feed_forward=config.whole("intermediate_size"),
        norm_epsilon=config.number("rms_norm_eps", 1e-6, content),
        tied=tied,
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        rotary_base=config.number("rope_theta", 2e6 if kind == "smollm3" else 10000.0, {**content, **rope}),
        window=config.whole("sliding_window") if window_of(content) else 0,
        nope_interval=nope_interval(config, L) if kind == "smollm3" else 0,
        **rope_fields(config, rope, T),
    )
    return ModelShape(V, T, L, H, C, "llama", llama=str(family))


def read_rope(config: Config) -> dict[str, Any]:
    """The table of rotary positions. A file of a newer version has rope_parameters; rope_scaling, which model cards tell
    users to add, replaces all of it. Raises `DataError` unless it is one table for all layers."""
    key = "rope_scaling" if config.content.get("rope_scaling") else "rope_parameters"
    rope = config.content.get(key) or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise config.refused(key, "as one object for all layers", rope)
    return rope


def rope_fields(config: Config, rope: dict[str, Any], context: int) -> dict[str, Any]:
    """The fields of `LlamaShape` about the scaling of rotary positions; `context`: the model's, in tokens. Raises
    `DataError` for a scaling that handgrad does not support."""
    if not isinstance(name := rope.get("rope_type", rope.get("type", "default")), str) or name not in ROPES:
        raise config.refused("rope_type", " or ".join(map(json.dumps, ROPES)), name)
    ours = ROPES[name]
    for key, default in (("truncate", True), ("partial_rotary_factor", 1.0)):
        if rope.get(key, default) != default:
            raise config.refused(key, json.dumps(default), rope[key])
    fields: dict[str, Any] = {here: config.number(there, default, rope) for here, there, default in ROPE_NUMBERS[ours]}
    if ours in ("llama3", "yarn"):
        lengths = rope | {LENGTH: config.content.get(LENGTH) or rope.get(LENGTH)}
        fields["rope_length"] = int(config.number(LENGTH, float(context), lengths))
    if ours == "yarn":
        fields["rope_scale"] = config.number("attention_factor", yarn_scale(config, rope, fields["rope_factor"]), rope)
    return {"rope": ours, **fields}


def yarn_scale(config: Config, rope: dict[str, Any], factor: float) -> float:
    """The scale of rotated queries and keys, derived from the factor, for a file without one."""

    def scale(strength: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1

    one, other = (rope.get(key) and config.number(key, None, rope) for key in ("mscale", "mscale_all_dim"))
    return scale(one) / scale(other) if one and other else scale(1.0)


def check_betas(family: Any) -> None:
    """Raises `UsageError` for a yarn of other bounds than llama.cpp's: it ignores the file's."""
    if family.rope == "yarn" and (family.rope_fast, family.rope_slow) != YARN_BETAS:
        actual = f"rope_fast {family.rope_fast} and rope_slow {family.rope_slow}"
        raise UsageError(f"llama.cpp computes rope=yarn with rope_fast 32 and rope_slow 1, found {actual}; use --to hf")


def gguf_name(shape: ModelShape) -> str:
    """llama.cpp's name of the architecture; `UsageError` if it has none that computes the same."""
    family, kind = shape.family, model_type(shape)
    check_betas(family)
    if kind == "mistral":
        raise UsageError(f"llama.cpp has no window in this network, found window {family.window}; use --to hf")
    if kind == "smollm3" and family.nope_interval != NOPE_INTERVAL:  # no key of the file
        raise UsageError(f"llama.cpp has nope_interval {NOPE_INTERVAL} alone, found {family.nope_interval}; use --to hf")
    if family.rope == "llama3" and kind != "llama":
        raise UsageError(f"llama.cpp has rope=llama3 in the network llama alone, found it in a {kind}; use --to hf")
    if kind == "qwen2" and shape.num_heads * family.head_width != shape.channels:
        raise UsageError(
            f"llama.cpp has heads of channels / heads alone in a qwen2, found head_width {family.head_width} of"
            f" {shape.num_heads} heads in {shape.channels} channels; use --to hf"
        )
    return kind


def gguf_numbers(writer: Any, shape: ModelShape) -> None:
    """Adds the numbers, besides the sizes, that change the mathematics."""
    family = shape.family
    writer.add_head_count_kv(family.kv_heads)
    writer.add_key_length(family.head_width)
    writer.add_value_length(family.head_width)
    writer.add_layer_norm_rms_eps(family.norm_epsilon)
    add_rope(writer, family)


def add_rope(writer: Any, family: LlamaShape) -> None:
    """Adds the numbers of the rotation."""
    import gguf

    writer.add_rope_dimension_count(family.head_width)
    writer.add_rope_freq_base(family.rotary_base)
    if family.rope in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType[family.rope.upper()])
        writer.add_rope_scaling_factor(family.rope_factor)
    if family.rope == "yarn":
        writer.add_rope_scaling_orig_ctx_len(family.rope_length)
        writer.add_rope_scaling_yarn_beta_fast(family.rope_fast)
        writer.add_rope_scaling_yarn_beta_slow(family.rope_slow)
        # llama.cpp multiplies it by the scale that follows from the factor.
        writer.add_rope_scaling_attn_factors(family.rope_scale / (1 + 0.1 * math.log(family.rope_factor)))
