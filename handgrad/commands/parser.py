"""The parser of every command: argparse with one-line errors, checked numbers, and a short and a long help."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from handgrad.errors import UsageError
from handgrad.names import check_choice, meanings, nearest_name
from handgrad.settings.config import KINDS, Rule

METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT", bool: "true|false"}
# The settings of a run that `--help` shows; `--help-all` shows the others below them, by group.
FIRST_SETTINGS = (
    *("data", "out", "init_from", "steps", "tokens_per_step", "micro_batch"),
    *("sequence_length", "learning_rate", "precision", "device"),
)
# The first field of each group of `RunConfig`, in order.
GROUPS = {
    "num_layers": "the model",
    "steps": "the batch",
    "learning_rate": "the optimizer",
    "zero": "several processes",
    "fp8_keep_bf16": "fp8",
    "eval_every": "watching",
    "save_every": "saving",
    "device": "the machine",
}


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Appends an option's default to its help, unless it has none or the text already names it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        none = action.default is False or action.default in (None, "", [], argparse.SUPPRESS)
        return text if none or "default" in text else f"{text} (default: {action.default})"


class HelpAll(argparse.Action):
    """`--help-all`: the help with the options that `--help` leaves out."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, Parser)
        parser.show_all()
        parser.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """argparse with our errors: one line, exit code 64, and the nearest name for an unknown flag."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, allow_abbrev=False, **kwargs)
        self.rules: dict[str, Rule] = {}
        self.intermixed = False  # flags may stand between positional arguments of which one may be missing
        self.example = ""  # a command line that works, for an error
        self.takes_one = ""  # the remedy for one positional argument too many
        self.elsewhere: dict[str, str] = {}  # a flag of another command, or a removed one: what to do
        self.left_out: dict[argparse.Action, str] = {}  # options that `--help` leaves out, with their help

    def show_all(self) -> None:
        for action, text in self.left_out.items():
            action.help = text

    def error(self, message: str) -> NoReturn:
        missing = message.removeprefix("the following arguments are required: ")
        if missing != message and self.example:
            raise UsageError(f"{missing} is missing; for example `{self.example}`; `{self.prog} --help` lists all")
        if message.endswith("expected one argument"):
            option = message.split()[1].rstrip(":").rpartition("/")[2]  # argument -a/--all: expected one argument
            complaint = f"{option} needs a value, found none{self.meaning(option)}"
            raise UsageError(f"{complaint}; one that begins with - stands behind an =, as {option}=VALUE")
        raise UsageError(f"{message}; `{self.prog} --help` lists all")

    def meaning(self, option: str) -> str:
        """The help of an option, after a colon."""
        action = self._option_string_actions[option]
        text = self.left_out.get(action, action.help or "")
        return f": {text.replace('%%', '%')}" if text else ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """argparse's own check of `choices`, with a setting's message and the nearest choice."""
        if action.choices is not None and value not in action.choices:
            check_choice(name_of(action), str(value), map(str, action.choices))

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """argparse's own conversion, with a setting's message for text that is not a number."""
        if action.type not in (int, float):
            return super()._get_value(action, arg_string)
        try:
            return action.type(arg_string)
        except ValueError:
            raise UsageError(f"{name_of(action)} must be {KINDS[action.type]}, found {arg_string!r}") from None

    def number(self, flag: str, help: str, *, rule: Rule | None = None, kind: type = int, default: Any = None) -> None:
        """Adds a flag that takes a whole number, or with `kind` float any number, checked by `rule`."""
        action = self.add_argument(flag, type=kind, default=default, metavar=METAVARS[kind], help=help)
        if rule is not None:
            self.rules[action.dest] = rule

    def text(self, flag: str, metavar: str, help: str, *, default: str | None = "") -> None:
        """Adds a flag that takes text."""
        self.add_argument(flag, default=default, metavar=metavar, help=help)

    def switch(self, flag: str, help: str) -> None:
        """Adds a flag without a value."""
        self.add_argument(flag, action="store_true", help=help)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Like `parse_args`; checks the numbers, and answers unknown flags with the nearest known ones."""
        parse = self.parse_known_intermixed_args if self.intermixed else self.parse_known_args
        namespace, unknown = parse([self.dashed(word) for word in arguments])
        if unknown:
            if "--" in arguments:
                raise UsageError(f"-- ends the flags, and {unknown[-1]!r} came after it; leave it out")
            names = list(dict.fromkeys(word.split("=")[0] for word in unknown if word.startswith("-")))
            if self.takes_one and not names:
                raise UsageError(f"one argument too many: {unknown[0]!r}; {self.takes_one}")
            full = "--help-all" if self.left_out else "--help"
            known = [option for action in self._actions for option in action.option_strings]
            listed = ", ".join(f"{name!r}{self.hint(name, known)}" for name in names or unknown[:1])
            raise UsageError(f"unknown argument{'s' * (len(names) > 1)} {listed}; `{self.prog} {full}` lists all")
        for name, rule in self.rules.items():
            if getattr(namespace, name) is not None:
                rule.check(flag(name), getattr(namespace, name))
        return namespace

    def hint(self, name: str, known: list[str]) -> str:
        """' (what to do)' for a flag in `elsewhere`, else the `known` flag nearest to an unknown one."""
        way = next((self.elsewhere[word] for word in meanings(name) if word in self.elsewhere), "")
        return f" ({way})" if way else nearest_name(name, known)

    def dashed(self, word: str) -> str:
        """--tokens_per_step=8 -> --tokens-per-step=8: a setting's name in TOML and Python also works as its flag."""
        name, equals, value = word.partition("=")
        option = name.replace("_", "-")
        return option + equals + value if option in self._option_string_actions else word


def name_of(action: argparse.Action) -> str:
    """--max-tokens of an option, PRESET of a positional argument."""
    return action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest)


def flag(name: str) -> str:
    """tokens_per_step -> --tokens-per-step."""
    return "--" + name.replace("_", "-")
