"""The commands. Each parses its arguments, calls one function of the package and prints what came of it."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import handgrad
from handgrad.arguments import Parser, add_run_arguments, run_config
from handgrad.errors import HandgradError, UsageError, storage_error

# Heavy imports stand inside the commands: `handgrad --help` and a misspelt flag answer at once.


def prepare(arguments: Sequence[str]) -> int:
    """raw text -> a folder of token shards"""
    from handgrad import commands_data

    return commands_data.prepare(arguments)


def train(arguments: Sequence[str]) -> int:
    """trains, or goes on training, the run in --out"""
    from handgrad.training.loop import train as run_training

    parser = Parser("handgrad train", description="Trains a GPT-2, or goes on where the run in --out stopped.")
    add_run_arguments(parser)
    parser.add_argument("--allow-changes", action="store_true", help="resume although config or data changed (logged)")
    parsed = parser.parse(arguments)
    config = run_config(parsed)
    run_training(config, allow_changes=parsed.allow_changes)
    report_path = write_run_report([Path(config.out)], Path(config.out) / "report.html")
    print(f"report     {report_path}")
    print(f"next       handgrad sample {config.out} --prompt '...' | handgrad evaluate {config.out}")
    return 0


def plan(arguments: Sequence[str]) -> int:
    """what a run will take, from the same arguments as train"""
    from handgrad.data.shards import open_dataset
    from handgrad.plan import describe_plan

    parser = Parser("handgrad plan", description="Memory, tokens and operations of a run, without starting it.")
    add_run_arguments(parser)
    parser.add_argument(
        "--vocab-size", type=int, default=0, help="words, if there is no data yet (default: --data's, or GPT-2's)"
    )
    parsed = parser.parse(arguments)
    config = run_config(parsed)
    vocab_size = parsed.vocab_size
    if not vocab_size:
        vocab_size = open_dataset(config.data).tokenizer.vocab_size if Path(config.data).exists() else 50257
    print("\n".join(describe_plan(config, vocab_size)))
    return 0


def evaluate(arguments: Sequence[str]) -> int:
    """validation loss, perplexity and bits per byte of a checkpoint"""
    from handgrad import commands_model

    return commands_model.evaluate(arguments)


def sample(arguments: Sequence[str]) -> int:
    """text from a checkpoint, streamed"""
    from handgrad import commands_model

    return commands_model.sample(arguments)


def report(arguments: Sequence[str]) -> int:
    """a self-contained HTML page of one or more runs"""
    parser = Parser("handgrad report", description="Curves, samples, memory and settings of runs on one page.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders; several are overlaid")
    parser.add_argument("--out", default="", metavar="FILE", help="the page (default: RUN/report.html, or report.html)")
    parsed = parser.parse(arguments)
    runs = [Path(run) for run in parsed.runs]
    out = Path(parsed.out) if parsed.out else (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    print(write_run_report(runs, out))
    return 0


def write_run_report(runs: list[Path], out: Path) -> Path:
    from handgrad.report.page import write_report

    return write_report(runs, out)


def bench(arguments: Sequence[str]) -> int:
    """handgrad beside a PyTorch autograd twin, on this machine"""
    parser = Parser("handgrad bench", description="Speed and memory beside a plain PyTorch twin, in one run.")
    parser.add_argument("what", choices=["step"], help="step: one optimizer step of a whole model")
    parser.add_argument("--model", default="d12", metavar="NAME", help="model size")
    parser.add_argument("--micro-batch", type=int, default=4, metavar="N", help="samples per step")
    parser.add_argument("--sequence-length", type=int, default=64, metavar="N", help="tokens per sample")
    parser.add_argument("--seconds", type=float, default=15.0, help="measured time per contender, in rounds")
    parser.add_argument("--out", default="", metavar="FILE", help="also write the figures as JSON")
    parsed = parser.parse(arguments)
    folder = Path(handgrad.__file__).parents[1] / "benchmarks"
    if not (folder / "step.py").exists():
        raise UsageError(f"the benchmarks lie in a checkout of handgrad, none found at {folder}; clone the repository")
    sys.path.insert(0, str(folder.parent))
    from benchmarks.step import compare

    compare(parsed.model, parsed.micro_batch, parsed.sequence_length, parsed.seconds, parsed.out)
    return 0


def doctor(arguments: Sequence[str]) -> int:
    """what this machine has, what will be used, what is missing"""
    from handgrad.doctor import examine

    Parser("handgrad doctor", description="Looks at this machine and runs each part once.").parse(arguments)
    well = True
    for fine, line in examine():
        well = well and fine
        print(f"{'ok  ' if fine else 'FAIL'}  {line}")
    return 0 if well else 78


def demo(arguments: Sequence[str]) -> int:
    """the whole way in about two minutes: stories, training, a report, a story"""
    from handgrad import commands_data

    return commands_data.demo(arguments)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    command.__name__: command for command in (prepare, train, plan, evaluate, sample, report, bench, doctor, demo)
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code. Errors meant for users become one line on stderr and their code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = Parser(
        "handgrad",
        description="Trains GPT-2 from raw text, with every gradient written by hand.",
        epilog="commands:\n" + "\n".join(f"  {name:<10}{command.__doc__}" for name, command in COMMANDS.items()),
        formatter_class=lambda prog: __import__("argparse").RawDescriptionHelpFormatter(prog),
    )
    parser.add_argument("--version", action="version", version=f"handgrad {handgrad.__version__}")
    parser.add_argument("command", choices=list(COMMANDS), metavar="COMMAND", help="one of those below")
    try:
        if not arguments:
            parser.print_help()
            return 64
        command = parser.parse(arguments[:1]).command
        return COMMANDS[command](arguments[1:])
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
        raised = storage_error(error, f"using {error.filename}" if error.filename else "input or output")
        print(f"handgrad: {raised}", file=sys.stderr)
        return raised.exit_code
