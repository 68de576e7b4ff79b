"""The Llama family as transformers keeps it: the model types llama, qwen2 and qwen3.

    ours                        theirs                                                           shape there
    wte                         model.embed_tokens.weight                                        (V, C)
    blocks.l.qkv_weight, _bias  model.layers.l.self_attn.q_proj, k_proj, v_proj .weight, .bias   (H D, C), (K D, C) twice
    blocks.l.q_gain, k_gain     model.layers.l.self_attn.q_norm, k_norm .weight                  (D)
    blocks.l.proj_weight        model.layers.l.self_attn.o_proj.weight                           (C, H D)
    blocks.l.gate_up_weight     model.layers.l.mlp.gate_proj, up_proj .weight                    (F, C) twice
    blocks.l.down_weight        model.layers.l.mlp.down_proj.weight                              (C, F)
    blocks.l.norm1_gain, norm2  model.layers.l.input_layernorm, post_attention_layernorm .weight (C)
    lnf_gain, head              model.norm.weight, lm_head.weight                                (C), (V, C)

One of our tensors is several of theirs, one above the other. Which type a model is follows from what it has: qwen3 has the
norms of queries and keys, qwen2 the bias.

Source: transformers, models/{llama,qwen2,qwen3} and modeling_rope_utils.py.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handgrad.config import ModelShape
from handgrad.errors import DataError, UsageError
from handgrad.networks.llama import LlamaShape

MODEL_TYPES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
EMBEDDING = "model.embed_tokens.weight"
BUFFERS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # of old versions

# Keys of config.json that decide the mathematics: the default there, and the values of ours.
KNOWN: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
    ("hidden_act", "silu", ("silu", "swish")),  # two names of one formula
    ("attention_bias", False, (False, None)),  # of the GEMMs that make and take attention's heads, all four
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
# Of a rope type: our number, its name in their file, and the default there (None: it must be there).
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

BLOCK_NAMES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "proj": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    "norm1": ("input_layernorm",),
    "norm2": ("post_attention_layernorm",),
    "q": ("self_attn.q_norm",),
    "k": ("self_attn.k_norm",),
}
OTHER_NAMES = {"wte": EMBEDDING, "lnf_gain": "model.norm.weight", "head": "lm_head.weight"}


def their_names(shape: ModelShape, name: str) -> dict[str, int]:
    """A row of the parameter table -> its tensors there, with the rows of each (0: all of ours)."""
    if name in OTHER_NAMES:
        return {OTHER_NAMES[name]: 0}
    _, layer, rest = name.split(".")
    module, kind = rest.rsplit("_", 1)
    D, F = shape.head_width, shape.feed_forward
    keys = shape.family.kv_heads * D
    rows = {"qkv": (shape.num_heads * D, keys, keys), "gate_up": (F, F)}.get(module, (0,))
    end = "bias" if kind == "bias" else "weight"
    names = (f"model.layers.{layer}.{their}.{end}" for their in BLOCK_NAMES[module])
    return dict(zip(names, rows, strict=True))


def model_type(shape: ModelShape) -> str:
    """The type that computes this model; `UsageError` if none does."""
    family = shape.family
    if family.qk_norm and family.qkv_bias:
        raise UsageError("transformers has no model with qk_norm and qkv_bias, found both; train one without either")
    return "qwen3" if family.qk_norm else "qwen2" if family.qkv_bias else "llama"


def their_config(shape: ModelShape) -> dict[str, Any]:
    """The part of config.json that is this family's, in the form that old and new versions read."""
    family, kind = shape.family, model_type(shape)
    if (
        kind == "llama" and shape.channels % shape.num_heads
    ):  # whatever the heads' own width: LlamaConfig.validate_architecture
        raise UsageError(
            f"transformers has no llama whose channels are no multiple of num_heads, found {shape.channels} and"
            f" {shape.num_heads}; train one with qk_norm or qkv_bias, or with other heads"
        )
    sizes = shape.vocab_size, shape.sequence_length, shape.num_layers, shape.num_heads, shape.channels
    biases = {"llama": ("attention_bias", "mlp_bias"), "qwen2": (), "qwen3": ("attention_bias",)}[kind]
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
        **({} if kind == "llama" else {"use_sliding_window": False}),
        "attention_dropout": 0.0,
        "tie_word_embeddings": family.tied,
    }


def their_scaling(family: LlamaShape) -> dict[str, Any] | None:
    if family.rope == "plain":
        return None
    kind = next(theirs for theirs, ours in ROPES.items() if ours == family.rope)
    numbers = {theirs: getattr(family, ours) for ours, theirs, _ in ROPE_NUMBERS[family.rope]}
    length = {} if family.rope == "linear" else {LENGTH: family.rope_length}
    scale = {"attention_factor": family.rope_scale} if family.rope == "yarn" else {}
    return {"rope_type": kind, **numbers, **length, **scale}


QUANTISED = "give the model in 16 or 32 bits (under adapters of PEFT: `handgrad import ADAPTERS --base MODEL`)"


@dataclass(frozen=True)
class Config:
    """The content of a config.json, whose values are checked as they are read."""

    content: dict[str, Any]
    path: Path

    def refused(self, key: str, wanted: str, found: Any) -> DataError:
        remedy = QUANTISED if key == "quantization_config" else "handgrad has no such model"
        return DataError(f"expected {key} {wanted} in {self.path}, found {found!r:.80}; {remedy}")

    def whole(self, key: str, default: int | None = None) -> int:
        """A number of 1 or more; the default for null and none. Raises `DataError`."""
        value: Any = self.content.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refused(key, "of 1 or more", value)
        return value

    def number(self, key: str, default: float | None, table: dict[str, Any]) -> float:
        """A finite number above 0 of a `table` in the content, as `whole`."""
        value: Any = table.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.refused(key, "above 0", value)
        return float(value)


def read_shape(content: dict[str, Any], path: Path) -> ModelShape:
    """The model of a config.json; `DataError` for one that asks for anything that ours do not compute."""
    config, kind = Config(content, path), content["model_type"]
    for key, default, ours in KNOWN:
        if (value := content.get(key, default)) not in ours:
            raise config.refused(key, json.dumps(ours[0]), value)
    layers = content.get("layer_types") or []
    if other := next((layer for layer in layers if layer != "full_attention"), None):
        raise config.refused("layer_types", "of full_attention", other)
    V, T, L, H, C = (config.whole(key) for key in SIZES)
    width = 128 if kind == "qwen3" and "head_dim" not in content else C // H  # their defaults
    keys = 32 if kind != "llama" and "num_key_value_heads" not in content else H
    tied = content.get("tie_word_embeddings", False)
    if type(tied) is not bool:
        raise config.refused("tie_word_embeddings", "true or false", tied)
    rope = read_rope(config)
    positions = rope_fields(config, rope, T)
    family = LlamaShape(
        kv_heads=config.whole("num_key_value_heads", keys),
        head_width=config.whole("head_dim", width),
        feed_forward=config.whole("intermediate_size"),
        norm_epsilon=config.number("rms_norm_eps", 1e-6, content),
        tied=tied,
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        rotary_base=config.number("rope_theta", 10000.0, {**content, **rope}),
        **positions,
    )
    return ModelShape(V, T, L, H, C, "llama", llama=str(family))


def read_rope(config: Config) -> dict[str, Any]:
    """The table of rotary positions. A file of a newer version has rope_parameters; rope_scaling, which model cards say to
    add, replaces all of it there. Raises `DataError` for one that is not a table for all layers."""
    key = "rope_scaling" if config.content.get("rope_scaling") else "rope_parameters"
    rope = config.content.get(key) or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise config.refused(key, "as one object for all layers", rope)
    return rope


def rope_fields(config: Config, rope: dict[str, Any], context: int) -> dict[str, Any]:
    """The fields of `LlamaShape` about the scaling of rotary positions; `context`: the model's, in tokens. Raises
    `DataError` for a scaling that ours are not."""
    name = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(name, str) or name not in ROPES:
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
        fields["rope_scale"] = config.number("attention_factor", yarn_scale(rope, fields["rope_factor"]), rope)
    return {"rope": ours, **fields}


def yarn_scale(rope: dict[str, Any], factor: float) -> float:
    """The scale of rotated queries and keys that follows from the factor, where the file has none."""

    def scale(strength: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1

    one, other = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(one) / scale(other) if one and other else scale(1.0)
