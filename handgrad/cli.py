"""The entry point: parses a command line, runs the command, and turns errors for users into one line and an exit code."""

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import handgrad
from handgrad import threads
from handgrad.commands.arguments import COMMANDS, Parser, parse
from handgrad.errors import (
    INTERRUPTED,
    HandgradError,
    MemoryShort,
    UsageError,
    interruptible,
    leave,
    storage_error,
    tell,
)
from handgrad.names import nearest_name


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stdout is None:  # started with `>&-`; this stays open as long as the process
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character must not end a run
    try:
        parser = top_parser()
        if not arguments:
            parser.print_help()
            return UsageError.exit_code
        command = parser.parse(arguments[:1]).command
        if command not in COMMANDS:
            near = nearest_name(command, COMMANDS)
            raise UsageError(f"unknown command {command!r}{near}; `handgrad --help` lists all")
        parsed = parse(command, arguments[1:])
        threads.choose()
        # Imported only now: help and mistakes are answered at once, and `prepare` never loads torch.
        module = importlib.import_module(f"handgrad.commands.{command}")
        with interruptible():
            return module.run(parsed)
    except HandgradError as error:
        tell(error)
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output went away (`handgrad sample ... | head`): end quietly, as other tools do.
        leave(sys.stdout)
        return 0
    except KeyboardInterrupt as interrupt:
        print(f"handgrad: {interrupt}" if str(interrupt) else "handgrad: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (MemoryError, RuntimeError) as error:
        if type(error).__name__ not in ("MemoryError", "OutOfMemoryError"):  # Python's, torch's
            raise
        asked = (str(error).splitlines() or ["Python found no memory"])[0]
        tell(MemoryShort(f"out of memory: {asked} Try half the --micro-batch; `handgrad plan` shows what takes memory"))
        return MemoryShort.exit_code
    except OSError as error:
        message = storage_error(error, f"using {error.filename}" if error.filename else "input or output")
        tell(message)
        return message.exit_code


def top_parser() -> Parser:
    parser = Parser(
        "handgrad",
        description="Trains GPT-2 from raw text, finetunes Llama, Qwen and SmolLM.\nEvery gradient is written by hand.",
        epilog="commands:\n" + "\n".join(f"  {name:<13}{summary}" for name, (summary, _) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"handgrad {handgrad.__version__}")
    parser.add_argument("command", metavar="COMMAND", help="one of those below")
    return parser
