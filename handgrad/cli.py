"""The entry point: parses a command line, runs the command, and turns errors for users into one line and an exit code."""

import argparse
import contextlib
import importlib
import io
import os
import select
import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO, cast

import handgrad
from handgrad.commands.arguments import COMMAND_GROUPS, COMMANDS, parse
from handgrad.commands.parser import Parser
from handgrad.errors import INTERRUPTED, ShownOutput, UsageError, interruptible, print_message, send_to_devnull, user_error
from handgrad.machine import threads
from handgrad.names import nearest_name

# Commands of earlier versions, and what to do instead.
REMOVED = {
    "sweep": "is a loop of the shell now: `for seed in 1 2 3; do handgrad train tiny --data shards/mine --seed $seed --out"
    " runs/seeds/$seed; done`, then `handgrad report runs/seeds`",
    "tune": "is a script of the repository now: `python -m benchmarks.tune` there takes the same flags",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    open_missing_streams()
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's; the error for a missing package says it
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character must not end a run
        if sys.stdout.isatty():
            sys.stdout = cast(TextIO, ShownOutput(sys.stdout))
    try:
        parser = top_parser()
        if not arguments:
            parser.print_help()
            return UsageError.exit_code
        if arguments[0] == "help":
            arguments = [*arguments[1:2], "--help"]
        if arguments[0].startswith("-") and arguments[0] not in ("-h", "--help", "--version"):
            raise UsageError(f"expected a command first, found {arguments[0]!r}; `handgrad --help` lists all")
        if flag := next((word for word in arguments if word.startswith("--out=~/")), ""):
            raise UsageError(f"expected a path, found {flag}: shells leave that ~ alone; try {flag.replace('=', ' ', 1)}")
        command = parser.parse(arguments[:1]).command
        if command in REMOVED:
            raise UsageError(f"{command} {REMOVED[command]}")
        if command not in COMMANDS:
            raise UsageError(f"unknown command {command!r}{nearest_name(command, COMMANDS)}; `handgrad --help` lists all")
        note_other_checkout(command)
        threads.choose()  # before `parse`, which loads torch to choose a run for data or weights
        parsed = parse(command, arguments[1:])
        # Imported late, so that help and usage errors answer at once and `prepare` never loads torch.
        module = importlib.import_module(f"handgrad.commands.{command}")
        with interruptible():
            return module.run(parsed)
    except KeyboardInterrupt as interrupt:
        print(f"handgrad: {interrupt}" if str(interrupt) else "handgrad: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # `user_error` returns None for a bug, which propagates
        if isinstance(error, BrokenPipeError) and reader_is_gone():
            send_to_devnull(sys.stdout)
            return 0
        message = user_error(error)
        if message is None:
            raise
        print_message(message)
        return message.exit_code


def reader_is_gone() -> bool:
    """True if stdout's reader is gone (`handgrad sample ... | head`): the command then ends quietly, as other tools do."""
    poll = select.poll()
    poll.register(1, 0)
    return bool(poll.poll(0))  # an error or a hang-up; no other event was asked for


def note_other_checkout(command: str) -> None:
    """Prints a note if the working directory is in another checkout, whose changes would not take effect."""
    ours = Path(handgrad.__file__).resolve().parents[1]
    with contextlib.suppress(OSError):  # a folder that cannot be read
        for folder in (Path.cwd(), *Path.cwd().parents):
            if (folder / "pyproject.toml").is_file() and (folder / "handgrad" / "__init__.py").is_file():
                from handgrad.joins.parallel.local import is_launched  # imported late: `--help` does not need it

                if folder != ours and not is_launched():
                    remedy = f"`cd {shlex.quote(str(folder))} && python -m handgrad {command}` runs the code there"
                    print_message(f"this is the code in {ours}, not the checkout in {folder}; {remedy}", ends=False)
                return


def open_missing_streams() -> None:
    """Opens the standard streams that the process was started without (`>&-`, `2>&-`). Otherwise the next file it opens,
    perhaps a run's record, would get the descriptor of a missing stream, and libraries would print into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor, which is this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # open until exit  # noqa: SIM115


FIRST_STEPS = """\
Trains GPT-2 from raw text, finetunes Llama, Qwen, SmolLM, Gemma and OLMo.
Every gradient is written by hand.

begin with:
  handgrad demo                                      a small model of stories
or, for a text of your own:
  handgrad prepare my_text.txt --out shards/mine
  handgrad train --data shards/mine --out runs/mine
  handgrad sample runs/mine"""


def top_parser() -> Parser:
    lines = []
    for name, (summary, _) in COMMANDS.items():
        if name in COMMAND_GROUPS:
            lines += ["", f"{COMMAND_GROUPS[name]}:"]
        lines.append(f"  {name:<13}{summary}")
    parser = Parser(
        "handgrad",
        usage="handgrad COMMAND [ARGUMENTS]",
        description=FIRST_STEPS,
        epilog="\n".join([*lines[1:], "", "`handgrad COMMAND --help` explains one, with an example."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"handgrad {handgrad.__version__}")
    parser.add_argument("command", metavar="COMMAND", help=argparse.SUPPRESS)
    return parser
