"""Command-line arguments: every field of `RunConfig` as a flag, and mistakes answered in one line."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from handgrad import presets
from handgrad.config import (
    BACKENDS,
    DEVICES,
    FIELDS,
    PRECISIONS,
    RunConfig,
    check,
    convert,
    nearest_name,
    read_toml,
    to_dict,
)
from handgrad.errors import UsageError

METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT"}


class Parser(argparse.ArgumentParser):
    """argparse with our errors: one line, exit code 64, and the nearest name for an unknown flag."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; `{self.prog} --help` lists what there is")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Like `parse_args`; an unknown flag is answered with the nearest known one."""
        namespace, unknown = self.parse_known_args(arguments)
        if unknown:
            name = unknown[0].split("=")[0]
            known = [option for action in self._actions for option in action.option_strings]
            raise UsageError(f"unknown argument {name!r}{nearest_name(name, known)}; `{self.prog} --help` lists all")
        return namespace


def flag(name: str) -> str:
    """tokens_per_step -> --tokens-per-step."""
    return "--" + name.replace("_", "-")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """A preset or a recipe, a model size, and a flag for every field."""
    parser.add_argument("preset", nargs="?", help=f"starting point: {', '.join(presets.PRESETS)}")
    parser.add_argument("--config", metavar="FILE", help="TOML recipe: field names as keys, and `preset` or `model`")
    parser.add_argument("--model", metavar="NAME", help=f"sets layers, heads, channels: {', '.join(presets.MODELS)}")
    for name, known in FIELDS.items():
        choices = known.metadata["choices"]
        text = known.metadata["help"].replace("%", "%%") + f" (default: {known.default})"
        if known.type is bool:
            parser.add_argument(flag(name), nargs="?", const="true", default=None, metavar="true|false", help=text)
        else:
            metavar = "|".join(choices) if choices else METAVARS[known.type]
            parser.add_argument(flag(name), default=None, metavar=metavar, help=text)


def run_config(arguments: argparse.Namespace) -> RunConfig:
    """The configuration that the arguments describe: preset, then recipe, then `--model`, then single flags."""
    recipe = read_toml(arguments.config) if arguments.config else {}
    recipe_preset = recipe.pop("preset", None)
    name = arguments.preset or recipe_preset
    settings = to_dict(presets.preset(name)) if name else {}
    if "model" in recipe:
        settings |= presets.model(recipe.pop("model"))
    settings |= recipe
    if arguments.model:
        settings |= presets.model(arguments.model)
    settings |= {n: convert(n, getattr(arguments, n)) for n in FIELDS if getattr(arguments, n) is not None}
    if settings.get("init_from"):
        settings = {**sizes_of_weights(settings), **settings}
    elif not name and not arguments.config and "num_layers" not in settings:
        raise UsageError(
            f"say what to train: a preset ({', '.join(presets.PRESETS)}), --config FILE, --model NAME or"
            " --init-from WEIGHTS"
        )
    return check(RunConfig(**settings))


def sizes_of_weights(settings: dict[str, Any]) -> dict[str, Any]:
    """The model's sizes as the weights in `init_from` have them. A run that has begun from them has them, too, and goes on
    without the weights."""
    from handgrad import checkpoint  # which needs torch, as `--help` does not
    from handgrad.interop.sources import SIZES, read_sizes

    if settings.keys() >= set(SIZES):
        return {}
    begun = checkpoint.peek_config(Path(settings.get("out", RunConfig.out)))
    if begun is not None and begun.get("init_from") == settings["init_from"]:
        return {name: begun[name] for name in SIZES}
    return read_sizes(settings["init_from"])


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        metavar="MODEL",
        help="run (its newest checkpoint), RUN/best, checkpoint, transformers folder, Hub name, .bin of llm.c",
    )
    parser.add_argument("--device", default="auto", choices=DEVICES, help="(default: auto)")
    parser.add_argument(
        "--precision",
        default="fp32",
        choices=[p for p in PRECISIONS if p != "fp8"],
        help="of weights and products (default: fp32)",
    )
    parser.add_argument("--backend", default="auto", choices=BACKENDS, help="(default: auto: kernels on a CUDA GPU)")
