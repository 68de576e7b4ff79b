"""Builds a run's configuration from a preset, a recipe, a model's name and single settings."""

import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from handgrad.data.recommended import prepare_commands
from handgrad.data.sources import holds_text
from handgrad.errors import UsageError
from handgrad.names import nearest_name
from handgrad.networks import NETWORKS
from handgrad.networks.modern import MODERN, changed, resolve_techniques
from handgrad.settings import presets, recipes
from handgrad.settings.config import EPOCHS as EPOCHS, FIELDS, RunConfig, check_value, convert, read_toml, to_dict
from handgrad.storage.run_files import CHECKPOINTS, CONFIG_FILE, place_of

# Values for `--init-from` that other trainers use for the start of a run.
BEGINNINGS = {
    "resume": "a run resumes by itself, by the same command again",
    "scratch": "a run starts from nothing without it",
}
WITHOUT, WITH = "without", "with"  # settings that edit the list `techniques`, without fields of their own


def run_config(
    preset: str, recipe_file: str, model: str, settings: Mapping[str, Any], command: str = "train", **planned: Any
) -> RunConfig:
    """Applies preset, recipe, the model's sizes and single settings, in this order; the later one wins. Empty: not
    given. Sizes that none of them sets come from the initial weights. `command`: the command that errors recommend;
    `planned`: lanes and device of the machine to choose for, instead of this one's.
    Raises `UsageError` or `DataError` for an unknown name, a value out of range, or nothing to train. `check` finds
    conflicting values later, once no setting is open."""
    recipe_path = Path(recipes.find(recipe_file)) if recipe_file else Path()
    recipe = read_toml(str(recipe_path)) if recipe_file else {}
    for one in (recipe, settings):
        if {EPOCHS, "steps"} <= one.keys():
            both = f"found steps {one['steps']} and epochs {one[EPOCHS]}"
            raise UsageError(f"steps and epochs both set the length of a run, {both}; leave one of them out")
    if "steps" not in settings and (epochs := settings.get(EPOCHS, recipe.get(EPOCHS))) is not None:
        if type(epochs) not in (int, float) or not 0 < epochs < math.inf:
            raise UsageError(f"epochs must be a number above 0, found {epochs!r}")
        rest = {name: value for name, value in settings.items() if name != EPOCHS}
        if EPOCHS not in settings and "warmup_steps" in recipe:  # chosen for the recipe's own length, which stays
            rest.setdefault("warmup_steps", recipe["warmup_steps"])
        sized = run_config(preset, recipe_file, model, {**rest, "steps": 1}, command, **planned)  # no size depends on steps
        from handgrad.run.packing import steps_of  # imports torch, which `--help` avoids

        return run_config(preset, recipe_file, model, {**rest, "steps": steps_of(sized, epochs)}, command, **planned)
    recipe.pop(EPOCHS, None)
    if "data" in recipe and "data" not in settings and (recipe_path.parent / CHECKPOINTS).is_dir():
        from handgrad.storage import checkpoint  # imports torch, which `--help` avoids

        _, manifest = checkpoint.peek(recipe_path.parent) or ("", {})
        needed = command == "train" and not recipe.get("reward")  # prompts may be built in
        recipe["data"] = place_of("data", recipe_path.parent, recipe, manifest, needed=needed)
    recipe_preset = recipe.pop("preset", None)
    name = preset or recipe_preset
    if name and name not in presets.PRESETS:
        refuse_path(name, command, str(settings.get("init_from", "")))
    merged = to_dict(presets.preset(name)) if name else {}
    if "model" in recipe:
        merged |= presets.model(recipe.pop("model"))
    merged |= recipe
    listed = recipe.get("techniques", "")
    if model:
        if model not in presets.MODELS and names_weights(model):
            raise UsageError(
                f"--model names a size for a new network, found {model!r}; weights to start from are named by"
                f" `{shlex.join(['handgrad', command, '--init-from', model])}`, with --data"
            )
        merged |= presets.model(model)
    change = {name: str(settings.get(name, "")) for name in (WITHOUT, WITH)}
    merged |= {name: convert(name, value) for name, value in settings.items() if name not in change}
    if "warmup_steps" in merged and "warmup_steps" not in (settings if "steps" in settings else {**recipe, **settings}):
        merged["warmup_steps"] = warmup_of(merged)
    for field, value in merged.items():
        check_value(field, value)
    bare = not (name or recipe_file or settings.keys() >= FIELDS.keys())  # then `run.autosize` chooses the rest
    if weights := merged.get("init_from"):
        if weights in BEGINNINGS and not Path(weights).exists():
            raise UsageError(f"init_from names the weights to start from, found {weights!r}: {BEGINNINGS[weights]}")
        merged = from_weights(merged, planned, bare=bare)
    elif bare and ("num_layers" not in merged or follows_the_rule(merged)):
        if "num_layers" not in merged:
            check_data(merged, command)
        from handgrad.run.autosize import chosen_settings  # imports torch, which `--help` avoids

        chosen = chosen_settings({"data": RunConfig.data, **merged, **planned})
        size = chosen.get("vqvae", "").partition(",")[0]  # of the data's pictures
        if "vqvae" in merged and size and "size=" not in merged["vqvae"]:
            merged["vqvae"] = f"{size},{merged['vqvae']}"
        merged = {**chosen, **merged}
    architecture = merged.get("architecture", RunConfig.architecture)
    if NETWORKS.get(architecture) is MODERN:
        techniques = resolve_techniques(architecture, merged.get("techniques", ""))
        merged["techniques"] = changed(techniques, change[WITHOUT], change[WITH])
    for name, text in (change | {"techniques": listed}).items():
        if text and NETWORKS.get(architecture) is not MODERN:
            raise UsageError(f"{name} is for --architecture modern, found {text!r} with {architecture}")
    return RunConfig(**merged)


def follows_the_rule(settings: dict[str, Any]) -> bool:
    """True if the rest can be chosen for these sizes: the data are prepared, no batch schedule counts tokens and steps."""
    from handgrad.data.mixture import named_sets  # imports numpy, which `--help` avoids
    from handgrad.data.shards import MANIFEST_FILE

    sets = named_sets(settings.get("data", RunConfig.data))
    return not settings.get("batch_schedule") and all(Path(folder, MANIFEST_FILE).is_file() for folder in sets)


def warmup_of(settings: dict[str, Any]) -> int:
    """A preset's or recipe's warm-up, at most a quarter of the steps of this run; a run begun in `out` keeps its own."""
    run, begun = Path(settings.get("out", RunConfig.out)), None
    if (run / CHECKPOINTS).is_dir():
        from handgrad.storage import checkpoint  # imports torch, which `--help` avoids

        begun = checkpoint.peek_config(run)
    usual = min(settings["warmup_steps"], max(1, int(settings.get("steps", RunConfig.steps) * presets.WARMUP_SHARE)))
    return usual if begun is None else begun.get("warmup_steps", usual)


def check_data(settings: dict[str, Any], command: str) -> None:
    """Raises `UsageError` if there is no data to choose settings by."""
    run = Path(str(settings.get("out", "")))
    if "data" not in settings and "out" in settings and (run / CONFIG_FILE).is_file():
        raise UsageError(f"say how to train: {run} is a run; {goes_on(run, command)}")
    if "data" not in settings:
        raise UsageError(
            f"say what to train: {first_run(command)}; or name a preset ({presets.listed(presets.PRESETS)}), --config FILE,"
            " --model NAME or --init-from WEIGHTS"
        )
    if settings.get("batch_schedule") and not settings.keys() >= {"steps", "tokens_per_step"}:
        raise UsageError("batch_schedule counts steps, here chosen for the data; give --steps and --tokens-per-step")


def first_run(command: str) -> str:
    """The command that trains, or plans, a model for the data prepared here; without data, the commands to prepare it."""
    from handgrad.data.shards import MANIFEST_FILE  # imports numpy, which `--help` avoids

    folder = Path(RunConfig.data)
    for path in (folder, *sorted(folder.glob("*/"))):
        if (path / MANIFEST_FILE).is_file():
            return f"`handgrad {command} --data {shlex.quote(str(path))}` takes what suits these shards"
    return (
        f"nothing is prepared in {folder} yet; `handgrad prepare MY_TEXT.txt --out shards/mine`, then"
        " `handgrad train --data shards/mine`, trains on a text of yours, `handgrad demo` on built-in stories"
    )


def refuse_path(name: str, command: str, weights: str) -> None:
    """Raises `UsageError` with the right command if `name`, given as a preset, is a path to a recipe, a run, shards or
    text. `weights`: the run's initial weights, or ""."""
    path, start, starts = Path(name), "a run begins with a preset", ["--init-from", weights] if weights else []
    if path.suffix == ".py":
        near = nearest_name(path.stem.removeprefix("train_").replace("_", "-"), recipes.recipe_names())
        raise UsageError(f"{start}, found {name}: recipes are TOML, not programs{near}; `handgrad recipes` lists them")
    if name in recipes.recipe_names() or (path.suffix == ".toml" and path.is_file()):
        raise UsageError(f"{start}, found a recipe: `handgrad {command} --config {shlex.quote(name)}`")
    if (path / CONFIG_FILE).is_file():
        raise UsageError(f"{start}, found the run folder {name}; {goes_on(path, command)}")
    if path.is_dir() and names_weights(name):
        raise UsageError(f"{start}, found weights: `{shlex.join(['handgrad', command, '--init-from', name])}`, with --data")
    if any(path.glob("*.bin")):
        raise UsageError(f"{start}, found shards: `{shlex.join(['handgrad', command, *starts, '--data', name])}`")
    if holds_text(path):
        raise UsageError(
            f"{start}, found text: run {prepare_commands(path, weights)}, then"
            f" `{shlex.join(['handgrad', command, *starts, '--data'])}` with that --out"
        )


def names_weights(name: str) -> bool:
    """True for the folder of a run, a checkpoint, a transformers model or adapters, and for OWNER/NAME on the Hub."""
    path = Path(name)
    if path.exists():
        inside = (CHECKPOINTS, "config.json", "adapter_config.json")
        return any((path / entry).exists() for entry in inside) or any(path.glob("model*.safetensors"))
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None


def goes_on(run: Path, command: str) -> str:
    """Advice to resume a run, or to reuse its settings by `command`; a moved run's recipe names its old folder."""
    recipe = str(run / CONFIG_FILE)
    moved = Path(str(read_toml(recipe).get("out", ""))).resolve() != run.resolve()
    named = f"`handgrad {command} --config {shlex.quote(recipe)}{f' --out {shlex.quote(str(run))}' if moved else ''}`"
    return f"resume it by {named}" if command == "train" else f"take its settings by {named}"


def from_weights(settings: dict[str, Any], planned: dict[str, Any], *, bare: bool) -> dict[str, Any]:
    """Adds the model's sizes to the settings: from the weights in `init_from`, or from the run in `out`, which can resume
    without these weights. `bare`: nothing else sets rows, steps and learning rate, so this also chooses suitable
    ones."""
    from handgrad.interop.sources import SIZES, read_sizes, shape_fields
    from handgrad.run.autosize import chosen_finetuning
    from handgrad.storage import checkpoint  # imports torch, which `--help` avoids

    begun = checkpoint.peek_config(Path(settings.get("out", RunConfig.out)))
    if begun is not None and begun.get("init_from") != settings["init_from"]:
        begun = None
    sizes = {}
    if not settings.keys() >= set(SIZES):
        sizes = read_sizes(settings["init_from"]) if begun is None else shape_fields(begun)
    chosen = chosen_finetuning({**settings, **planned}, sizes, begun) if bare and not settings.get("batch_schedule") else {}
    return {**sizes, **chosen, **settings}
