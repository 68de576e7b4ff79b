"""The techniques of the modern network (docs/modern.md), by name, and a model's list of them.

A model's list is whole: it names all that the model has, in the table's order, so that a change of the defaults changes no
stored model.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from handgrad.errors import UsageError
from handgrad.names import check_choice

# The name: true if a model has it unless its configuration says otherwise. The one place of the defaults.
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
# The techniques of older configurations, which have `without` instead of a list.
EARLIER = ("rotary", "qk_norm", "softcap", "embedding_norm", "zero_init", "untied_head")


def names_of(text: str) -> tuple[str, ...]:
    """The names of a list with commas."""
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def listed(names: Iterable[str]) -> str:
    """The list of these techniques, in the table's order."""
    names = set(names)
    return ",".join(name for name in TECHNIQUES if name in names) or NONE


def resolve_techniques(architecture: str, techniques: str) -> str:
    """A model's list: as given, in order, or the defaults if it is empty. Only the modern network has one."""
    if architecture != "modern":
        return ""
    names = set(names_of(techniques))
    if names and not names <= TECHNIQUES.keys() | {NONE}:
        return techniques  # `check_techniques` says what is wrong with it
    return listed(names or default())


def default() -> list[str]:
    return [name for name, on in TECHNIQUES.items() if on]


def check_techniques(techniques: str) -> None:
    """Raises `UsageError` for an unknown name."""
    for name in names_of(techniques):
        check_choice("techniques", name, (*TECHNIQUES, NONE))


def changed(techniques: str, without: str = "", added: str = "") -> str:
    """The list less the names in `without`, and with those in `added`. Raises `UsageError` for an unknown name, and for one
    that changes nothing."""
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
    """Translates a stored configuration: `without` becomes the list of techniques that it meant, and a saturated tensor
    only warns where the GEMMs that read it once left fp8."""
    found = dict(settings)
    if found.get("fp8_on_saturation") == "bf16":
        found["fp8_on_saturation"] = "warn"
    without = found.pop("without", None)
    if isinstance(without, str) and "techniques" not in found and (without or found.get("architecture") == "modern"):
        for name in names_of(without):
            check_choice("without", name, EARLIER)
        found["techniques"] = listed(name for name in EARLIER if name not in names_of(without))
    return found


def difference(techniques: str) -> tuple[str, str]:
    """(the defaults that this list lacks, the names that it adds to them), with commas."""
    names, usual = names_of(techniques), default()
    return ",".join(n for n in usual if n not in names), ",".join(n for n in TECHNIQUES if n in names and n not in usual)
