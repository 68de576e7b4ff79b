"""The entry point: finds the command, runs it, and turns errors meant for users into one line and an exit code."""

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import handgrad
from handgrad.errors import HandgradError, UsageError, storage_error

COMMANDS = {
    "prepare": "raw text -> a folder of token shards",
    "train": "trains, or goes on training, the run in --out",
    "plan": "what a run will take, from the same arguments as train",
    "evaluate": "validation loss, perplexity and bits per byte of a checkpoint",
    "sample": "text from a checkpoint, streamed",
    "export": "a checkpoint -> a folder for Hugging Face's transformers or llm.c, read back and compared",
    "import": "a GPT-2 of transformers or of llm.c -> a checkpoint",
    "report": "a self-contained HTML page of one or more runs",
    "bench": "handgrad beside a PyTorch autograd twin, on this machine",
    "tune": "freezes the fastest algorithm of every product of a model on this GPU",
    "profile": "where the time of a step goes, kernel by kernel",
    "doctor": "what this machine has, what will be used, what is missing",
    "demo": "the whole way in about two minutes: stories, training, a report",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stdout is None:  # started with `>&-`; this stays open as long as the process
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character must not end a run
    try:
        return run_command(arguments)
    except HandgradError as error:
        print(f"handgrad: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output went away (`handgrad sample ... | head`): end quietly, as other tools do.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("handgrad: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        told = storage_error(error, f"using {error.filename}" if error.filename else "input or output")
        print(f"handgrad: {told}", file=sys.stderr)
        return told.exit_code


def run_command(arguments: list[str]) -> int:
    from handgrad.commands.arguments import Parser
    from handgrad.config import nearest_name

    parser = Parser(
        "handgrad",
        description="Trains GPT-2 from raw text, with every gradient written by hand.",
        epilog="commands:\n" + "\n".join(f"  {name:<10}{what}" for name, what in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"handgrad {handgrad.__version__}")
    parser.add_argument("command", choices=list(COMMANDS), metavar="COMMAND", help="one of those below")
    if not arguments:
        parser.print_help()
        return 64
    if not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        near = nearest_name(arguments[0], COMMANDS)
        raise UsageError(f"unknown command {arguments[0]!r}{near}; commands: {', '.join(COMMANDS)}")
    command = parser.parse(arguments[:1]).command
    # Imported only now: `handgrad --help` answers at once, and `prepare` never loads what only `train` needs.
    return importlib.import_module(f"handgrad.commands.{command}").run(arguments[1:])
