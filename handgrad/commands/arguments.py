"""Command-line arguments: every field of `RunConfig` as a flag, and mistakes answered in one line."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from handgrad import presets
from handgrad.config import BACKENDS, DEVICES, FIELDS, PRECISIONS, RunConfig, nearest_name
from handgrad.errors import UsageError
from handgrad.run import settings

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
    """The configuration that the arguments describe (`training.settings`)."""
    given = {name: value for name in FIELDS if (value := getattr(arguments, name)) is not None}
    return settings.run_config(arguments.preset or "", arguments.config or "", arguments.model or "", given)


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
