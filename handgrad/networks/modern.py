"""The modern network (docs/modern.md), and its techniques by name. models/modern.py computes it.

A model stores its complete list of techniques, in table order, so that new defaults change no stored model. transformers
has no such model; an export uses our tensor names without `_weight`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from handgrad.errors import UsageError
from handgrad.names import check_choice
from handgrad.networks.gpt2 import gemms
from handgrad.networks.network import COMMON_FORMS, Fp8, Network

if TYPE_CHECKING:
    from handgrad.networks import ModelShape

# The depth alone sizes a model: the width grows with it (Karpathy 2025, nanochat).
CHANNELS_PER_LAYER, HEAD_WIDTH = 64, 128
DEPTHS = {f"m{depth}": depth for depth in range(4, 49, 2)}
SOFTCAP = 15.0  # bound of the logits
GATE_CHANNELS = 32  # G: stream channels that the gates of the value embeddings read

# Technique -> on by default. The only place that sets the defaults.
TECHNIQUES = {
    "rotary": True,
    "qk_norm": True,
    "softcap": True,
    "embedding_norm": True,
    "zero_init": False,
    "untied_head": False,
    "residual_scalars": True,
    "input_scalars": True,
    "value_embeddings": False,
}
NONE = "none"  # the list of a model without any
# The techniques of older configurations, which store `without` instead of a list.
EARLIER = ("rotary", "qk_norm", "softcap", "embedding_norm", "zero_init", "untied_head")


def names_of(text: str) -> tuple[str, ...]:
    """Splits a comma-separated list."""
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def listed(names: Iterable[str]) -> str:
    """The comma-separated list of these techniques, in table order."""
    names = set(names)
    return ",".join(name for name in TECHNIQUES if name in names) or NONE


def resolve_techniques(architecture: str, techniques: str) -> str:
    """A model's list of techniques: as given, in table order, or the defaults if empty. Other networks have none."""
    if architecture != "modern":
        return ""
    names = set(names_of(techniques))
    if names and not names <= TECHNIQUES.keys() | {NONE}:
        return techniques  # `check_techniques` reports the error
    return listed(names or default())


def default() -> list[str]:
    return [name for name, on in TECHNIQUES.items() if on]


def check_techniques(techniques: str) -> None:
    """Raises `UsageError` for an unknown name."""
    for name in names_of(techniques):
        check_choice("techniques", name, (*TECHNIQUES, NONE))


def changed(techniques: str, without: str = "", added: str = "") -> str:
    """Removes the names in `without`, adds those in `added`. `UsageError`: an unknown one, or one without effect."""
    check_techniques(techniques)
    names = set(names_of(techniques)) - {NONE}
    for option, text, has, state in (
        ("without", without, True, "is not there"),
        ("with", added, False, "is there already"),
    ):
        for name in names_of(text):
            check_choice(option, name, tuple(TECHNIQUES))
            if (name in names) != has:
                raise UsageError(f"{option} names {name}, which {state}; this model has {techniques}: leave {name} out")
            names ^= {name}
    return listed(names)


def of_stored(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Updates a stored configuration: replaces `without` by the list of techniques that it meant, and the old rule that
    moved GEMMs of a saturated tensor to bf16 by a warning."""
    updated = dict(settings)
    if updated.get("fp8_on_saturation") == "bf16":
        updated["fp8_on_saturation"] = "warn"
    without = updated.pop("without", None)
    if isinstance(without, str) and "techniques" not in updated and (without or updated.get("architecture") == "modern"):
        for name in names_of(without):
            check_choice("without", name, EARLIER)
        updated["techniques"] = listed(name for name in EARLIER if name not in names_of(without))
    return updated


def difference(techniques: str) -> tuple[str, str]:
    """(defaults that this list lacks, names that it adds to the defaults), comma-separated."""
    names, usual = names_of(techniques), default()
    return ",".join(n for n in usual if n not in names), ",".join(n for n in TECHNIQUES if n in names and n not in usual)


def variant(shape: "ModelShape") -> str:
    without, beside = difference(shape.techniques)
    return "modern" + (f" without {without}" if without else "") + (f" with {beside}" if beside else "") + ", "


def check(config: Any) -> None:
    """Raises `UsageError` for an unknown technique, and for heads that cannot be rotated."""
    check_techniques(config.techniques)
    width = config.channels // config.num_heads
    if "rotary" in names_of(config.techniques) and width % 2:
        raise UsageError(f"rotary positions turn pairs of channels, found heads of {width}; try another --num-heads")


def fp8(shape: "ModelShape") -> dict[str, Fp8]:
    """Value embeddings read norm1 and dqkv in 16 bits. Without norm and rotation of queries and keys, attention's backward
    writes dqkv itself."""
    values, turns = shape.has("value_embeddings"), shape.has("rotary") or shape.has("qk_norm")
    dqkv = Fp8("qkv", gradient=True, wide=True, workspace="dturned")  # of attention's inputs, normalised and rotated
    return {
        **COMMON_FORMS,
        "norm1": Fp8("qkv", keeps_16bit=values),
        "norm2": Fp8("mlp", rerun_from=1),
        "hidden": Fp8("mlp", keeps_16bit=True, late_columns=True),  # the squared ReLU's backward reads its output
        "dqkv": dqkv if turns else replace(dqkv, workspace="", keeps_16bit=values),
        "dhidden": Fp8("mlp", gradient=True, workspace="dsquare"),  # after the squared ReLU
    }


MODERN = Network(
    title="modern network",
    gemms=gemms,  # GPT-2's; fc and fcproj share the squared ReLU
    models={
        name: (depth, CHANNELS_PER_LAYER * depth // HEAD_WIDTH, CHANNELS_PER_LAYER * depth)
        for name, depth in DEPTHS.items()
    },
    letters=lambda shape: {"G": min(GATE_CHANNELS, shape.channels)},
    softcap=lambda shape: SOFTCAP if shape.has("softcap") else 0.0,
    setting="techniques",
    settle=lambda shape: resolve_techniques(shape.architecture, shape.techniques),
    check=check,
    variant=variant,
    adapters=False,
    tied=lambda shape: not shape.has("untied_head"),
    fp8=fp8,
    model_types=("handgrad_modern",),
    brings_code=True,
)
