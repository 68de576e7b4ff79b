"""handgrad completion: the script by which bash, zsh or tcsh completes handgrad's commands, flags, values and paths."""

import importlib
from argparse import Namespace

from handgrad.commands.arguments import command_line
from handgrad.errors import UsageError


def run(parsed: Namespace) -> int:
    try:
        shtab = importlib.import_module("shtab")
    except ModuleNotFoundError:
        raise UsageError("completion needs the package shtab: `pip install 'handgrad[completion]'`") from None
    print(shtab.complete(command_line(), shell=parsed.shell))
    return 0
