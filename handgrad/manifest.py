"""The fields of a checkpoint's manifest: a hash proves that nobody changed it, not that its writer was right."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from handgrad.errors import DataError


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def is_object(value: Any) -> bool:
    return isinstance(value, dict)


def are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) in (int, float) and math.isfinite(one) for one in value)


# A condition on a field, and its words.
Conditions = dict[str, tuple[Callable[[Any], bool], str]]
FIELDS: Conditions = {
    "step": (is_count, "a whole number"),
    "config": (is_object, "an object"),
    "files": (is_object, "an object"),
}
RUN_FIELDS: Conditions = {  # with which a run resumes; weights alone have none of them
    "loss_window": (are_numbers, "a list of numbers"),
    "norm_window": (are_numbers, "a list of numbers"),
    "skips_in_a_row": (is_count, "a whole number"),
}
BESIDE: Conditions = {
    "versions": (is_object, "an object"),
    "loss_scale": (lambda value: are_numbers(value) and len(value) == 2, "two numbers"),  # of fp16
}


def check_fields(manifest: dict[str, Any], path: Path) -> None:
    """Raises `DataError` unless the manifest at `path` has its fields, and the step in its folder's name; if it has any of
    those that a run resumes with, it needs them all."""
    check(manifest, FIELDS, path)
    name, step = path.parent.name, path.parent.name.removeprefix("step_")
    if step != name and step.isdecimal() and int(step) != manifest["step"]:
        raise DataError(f"{path}: expected step {int(step)}, found {manifest['step']}; it belongs into another folder")
    if manifest.keys() & RUN_FIELDS:
        needed = manifest["config"].get("precision") == "fp16"
        beside = {key: condition for key, condition in BESIDE.items() if key in manifest or key == "versions" or needed}
        check(manifest, RUN_FIELDS | beside, path)


def check(manifest: dict[str, Any], conditions: Conditions, path: Path) -> None:
    for name, (holds, wanted) in conditions.items():
        value = manifest.get(name)
        if not holds(value):
            raise DataError(f"{path}: expected {wanted} as {name}, found {value!r:.80}; it was edited or damaged")
