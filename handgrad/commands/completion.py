"""The whole command line as one parser, from which shtab writes completions for a shell; handgrad itself never loads it."""

import argparse

from handgrad.commands.arguments import COMMANDS
from handgrad.commands.parser import Parser
from handgrad.settings import presets

# shtab's own names of the shells' functions that complete paths (https://docs.iterative.ai/shtab/use/).
PATHS = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}
PATH_METAVARS = {"DIR", "FILE", "RUN", "MODEL", "CHECKPOINT", "SOURCE"}


def command_line() -> argparse.ArgumentParser:
    """A parser with a subparser per command, its choices and paths marked."""
    parser = argparse.ArgumentParser("handgrad")
    commands = parser.add_subparsers(dest="command", parser_class=Parser)
    for name, (summary, add_arguments) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        add_arguments(command)
        command.show_all()
        for action in command._actions:
            mark(action, takes_run="preset" in {other.dest for other in command._actions})
    return parser


def mark(action: argparse.Action, *, takes_run: bool) -> None:
    words = str(action.metavar)
    if action.dest == "preset":
        action.choices = list(presets.PRESETS)
    elif takes_run and action.dest == "model":
        action.choices = list(presets.MODELS)
    elif "|" in words and action.nargs is None:
        action.choices = words.split("|")
    elif words in PATH_METAVARS or action.dest in ("data", "out", "init_from"):
        action.complete = PATHS  # type: ignore
