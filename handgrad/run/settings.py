"""A run's configuration from a preset, a recipe, a model's name and single settings."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from handgrad import presets, recipes
from handgrad.config import RunConfig, check, convert, read_toml, to_dict
from handgrad.data.sources import holds_text, prepare_command
from handgrad.errors import UsageError
from handgrad.names import nearest_name
from handgrad.run_files import CONFIG_FILE
from handgrad.techniques import changed, settled

# Other trainers' words in the place of weights.
BEGINNINGS = {
    "resume": "a run resumes by itself, by the same command again",
    "scratch": "a run starts from nothing without it",
}
WITHOUT, WITH = "without", "with"  # settings that change the list `techniques`: no fields of their own


def run_config(preset: str, recipe_file: str, model: str, settings: Mapping[str, Any]) -> RunConfig:
    """Preset, then recipe, then the model's sizes, then single settings: the later one wins. Empty means not given.
    Sizes that none of them gives are those of the weights to start from.

    Raises `UsageError`, `DataError`: a name that does not exist, a value that does not fit, nothing to train.
    """
    recipe = read_toml(recipes.find(recipe_file)) if recipe_file else {}
    recipe_preset = recipe.pop("preset", None)
    name = preset or recipe_preset
    if name and name not in presets.PRESETS:
        refuse_path(name)
    merged = to_dict(presets.preset(name)) if name else {}
    if "model" in recipe:
        merged |= presets.model(recipe.pop("model"))
    merged |= recipe
    listed = recipe.get("techniques", "")
    if model:
        merged |= presets.model(model)
    change = {name: str(settings.get(name, "")) for name in (WITHOUT, WITH)}
    merged |= {name: convert(name, value) for name, value in settings.items() if name not in change}
    if weights := merged.get("init_from"):
        if weights in BEGINNINGS and not Path(weights).exists():
            raise UsageError(f"init_from names the weights to start from, found {weights!r}: {BEGINNINGS[weights]}")
        sizes = sizes_of_weights(merged)
        merged = {**sizes, **({} if name or recipe_file else suited_finetuning(merged, sizes)), **merged}
    elif not name and not recipe_file and "num_layers" not in merged and "data" in merged:
        merged = {**suited(merged), **merged}
    elif not name and not recipe_file and "num_layers" not in merged:
        run = Path(str(merged.get("out", "")))
        if "out" in merged and (run / CONFIG_FILE).is_file():
            raise UsageError(f"say how to train: {run} is a run, which {resumes(run)} resumes")
        raise UsageError(
            f"say what to train: {first_run()}; or name a preset ({presets.listed(presets.PRESETS)}), --config FILE,"
            " --model NAME or --init-from WEIGHTS"
        )
    architecture = merged.get("architecture", RunConfig.architecture)
    if architecture == "modern":
        techniques = settled(architecture, merged.get("techniques", ""))
        merged["techniques"] = changed(techniques, change[WITHOUT], change[WITH])
    for name, text in (change | {"techniques": listed}).items():
        if text and architecture != "modern":
            raise UsageError(f"{name} is for --architecture modern, found {text!r} with {architecture}")
    return check(RunConfig(**merged))


def suited(settings: dict[str, Any]) -> dict[str, Any]:
    """The model and its steps that suit the data and the device, for whom names neither."""
    if settings.get("batch_schedule") and not settings.keys() >= {"steps", "tokens_per_step"}:
        raise UsageError("batch_schedule counts steps, here chosen for the data; give --steps and --tokens-per-step")
    from handgrad.run.suited import chosen_settings  # imports torch, which `--help` spares

    return chosen_settings(*(str(settings.get(name, getattr(RunConfig, name))) for name in ("data", "out", "device")))


def suited_finetuning(settings: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """The rows, steps and learning rate that suit weights, data and device, for whom gives none."""
    if settings.get("batch_schedule"):
        return {}  # counts steps of its own
    from handgrad.run.suited_finetuning import chosen_finetuning  # imports torch, which `--help` spares

    return chosen_finetuning(settings, sizes)


def first_run() -> str:
    """The command that trains a model which suits the data prepared here, or those that prepare some."""
    from handgrad.data.shards import MANIFEST_FILE  # imports numpy, which `--help` spares

    folder = Path(RunConfig.data)
    for path in (folder, *sorted(folder.glob("*/"))):
        if (path / MANIFEST_FILE).is_file():
            return f"`handgrad train --data {shlex.quote(str(path))}` takes what suits these shards"
    return (
        f"nothing is prepared in {folder} yet; `handgrad prepare MY_TEXT.txt --out shards/mine`, then"
        " `handgrad train --data shards/mine`, trains on a text of yours, `handgrad demo` on built-in stories"
    )


def refuse_path(name: str) -> None:
    """Raises `UsageError` with the command to run if `name`, in the place of a preset, is a path to a recipe, a run, shards
    or text."""
    path, start = Path(name), "a run begins with a preset"
    if path.suffix == ".py":
        near = nearest_name(path.stem.removeprefix("train_").replace("_", "-"), recipes.recipe_names())
        raise UsageError(f"{start}, found {name}: recipes are TOML, not programs{near}; `handgrad recipes` lists them")
    if name in recipes.recipe_names() or (path.suffix == ".toml" and path.is_file()):
        raise UsageError(f"{start}, found a recipe: `handgrad train --config {shlex.quote(name)}`")
    if (path / CONFIG_FILE).is_file():
        raise UsageError(f"{start}, found the run folder {name}; resume it by {resumes(path)}")
    if any(path.glob("*.bin")):
        raise UsageError(f"{start}, found shards: `handgrad train --data {shlex.quote(name)}`")
    if holds_text(path):
        raise UsageError(
            f"{start}, found text: run `{prepare_command(path)}`, then `handgrad train --data` with that --out"
        )


def resumes(run: Path) -> str:
    """The command that resumes a run, for an error line. The recipe of a moved one names another folder."""
    recipe = str(run / CONFIG_FILE)
    moved = Path(str(read_toml(recipe).get("out", ""))).resolve() != run.resolve()
    return f"`handgrad train --config {shlex.quote(recipe)}{f' --out {shlex.quote(str(run))}' if moved else ''}`"


def sizes_of_weights(settings: dict[str, Any]) -> dict[str, Any]:
    """The model's sizes, from the weights in `init_from`; or from the run in `out`, which resumes without those weights."""
    from handgrad import checkpoint  # imports torch, which `--help` spares
    from handgrad.interop.sources import SIZES, read_sizes, shape_fields

    if settings.keys() >= set(SIZES):
        return {}
    begun = checkpoint.peek_config(Path(settings.get("out", RunConfig.out)))
    if begun is not None and begun.get("init_from") == settings["init_from"]:
        return shape_fields(begun)
    return read_sizes(settings["init_from"])
