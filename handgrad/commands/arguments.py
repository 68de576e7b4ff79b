"""Parses every command's arguments before the command and its libraries load, so help and usage errors answer at once."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from handgrad.commands import flags
from handgrad.commands.parser import Formatter, Parser
from handgrad.run import settings
from handgrad.settings import presets
from handgrad.settings.config import FIELDS, RunConfig


def parse(command: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Parses a command's arguments; for a command with run settings, also resolves them as `run_config`."""
    summary, add_arguments = COMMANDS[command]
    texts = {"description": summary, "epilog": f"example: {EXAMPLES[command]}"}
    parser = Parser(f"handgrad {command}", formatter_class=Formatter, **texts)
    parser.example = EXAMPLES[command]
    add_arguments(parser)
    namespace = parser.parse(arguments)
    namespace.arguments = list(arguments)
    if "preset" in namespace:
        namespace.run_config = run_config(namespace, command)
    return namespace


def run_config(parsed: argparse.Namespace, command: str = "train") -> RunConfig:
    """The configuration that the arguments of a command describe (`run.settings`)."""
    names, planned = (parsed.preset or "", parsed.config or "", parsed.model or ""), {}
    if command == "plan":
        lanes = {} if parsed.lanes else {"lanes": parsed.gpus or parsed.ranks or 0}
        planned = lanes | ({"device": "meta"} if parsed.gpu else {})
    return settings.run_config(*names, given(parsed), command, **planned)


def given(namespace: argparse.Namespace) -> dict[str, Any]:
    """The settings given as flags on the command line."""
    names = (*FIELDS, *flags.TECHNIQUE_CHANGES, settings.EPOCHS)
    return {name: value for name in names if (value := getattr(namespace, name)) is not None}


COMMANDS: dict[str, tuple[str, Callable[[Parser], None]]] = {
    "demo": ("trains on stories and writes a report, in two to three minutes", flags.demo),
    "prepare": ("turns raw text into a folder of token shards", flags.prepare),
    "train": ("trains the run in --out, or resumes it", flags.train),
    "recipes": ("lists the shipped recipes and launch files, or prints one", flags.recipes),
    "plan": ("predicts memory, speed and cost of a run, here or on other GPUs", flags.plan),
    "sample": ("writes texts with a model, streamed, or one for each prompt", flags.sample),
    "chat": ("lets you talk to a model; through a pipe, one answer per line", flags.chat),
    "serve": ("serves a model over HTTP: a page to talk to it, and OpenAI's API", flags.serve),
    "evaluate": ("measures loss, perplexity, bits per byte, and results on tasks", flags.evaluate),
    "export": ("writes a checkpoint for transformers, PEFT, llm.c or llama.cpp", flags.export),
    "import": ("turns a model of transformers, PEFT or llm.c into a checkpoint", flags.import_),
    "report": ("writes a self-contained HTML page about one or more runs", flags.report),
    "plot": ("draws the loss of one or more runs in the terminal, or as a PNG", flags.plot),
    "watch": ("serves the report of one or more runs, live in a browser", flags.watch),
    "runs": ("lists the runs below a folder: steps, loss, size, state", flags.runs),
    "checkpoints": ("lists a run's checkpoints, verifies their hashes, or prunes them", flags.checkpoints),
    "verify": ("replays an audited run from checkpoints; compares every link", flags.verify),
    "diff": ("finds where runs part: settings, versions, data, link, tensors", flags.diff),
    "certificate": ("writes what a run was trained on, with hashes, into a small file", flags.certificate),
    "climb": ("lets you write GPT-2's operations, grades each, trains with them", flags.climb),
    "gradcheck": ("compares every gradient by hand with differences of its forward", flags.gradcheck),
    "doctor": ("checks what this machine has, uses and lacks; runs each part once", flags.doctor),
    "profile": ("times the kernels of a run's steps, beside this machine's limits", flags.profile),
    "bench": ("measures handgrad beside a PyTorch autograd twin", flags.bench),
    "completion": ("prints the script by which a shell completes commands", flags.completion),
}
# The first command of each group, in order.
COMMAND_GROUPS = {
    "demo": "from text to a model",
    "sample": "a model at work",
    "report": "runs, while they train and after",
    "verify": "proofs",
    "climb": "gradients",
    "doctor": "this machine",
}

EXAMPLES = {
    "prepare": "handgrad prepare my_text.txt --tokenizer bpe:4096 --out shards/mine",
    "train": "handgrad train tiny --data shards/mine --out runs/a --steps 500",
    "plan": "handgrad plan d12 --gpu h100 --gpus 8 --price 2.50",
    "evaluate": "handgrad evaluate runs/a --data shards/mine",
    "sample": 'handgrad sample runs/a --prompt "Once upon a time" --samples 3',
    "chat": 'handgrad chat HuggingFaceTB/SmolLM2-135M-Instruct --system "You are a pirate."',
    "serve": "handgrad serve runs/talks --port 8000",
    "export": "handgrad export runs/a --out exported",
    "import": "handgrad import gpt2 --out imported",
    "report": "handgrad report runs/a runs/b --out compared.html",
    "plot": "handgrad plot runs/a runs/b --out losses.png",
    "watch": "handgrad watch runs",
    "recipes": "handgrad recipes gpt2-124m",
    "runs": "handgrad runs runs",
    "checkpoints": "handgrad checkpoints runs/a --verify",
    "verify": "handgrad verify runs/a --segments 3 --seed 7",
    "diff": "handgrad diff runs/a runs/b",
    "certificate": "handgrad certificate runs/a --key key.pem",
    "bench": "handgrad bench step --model d12 --out step.json",
    "profile": "handgrad profile d12 --precision bf16 --trace trace.json.gz",
    "doctor": "handgrad doctor",
    "climb": "handgrad climb start my-climb",
    "gradcheck": "handgrad gradcheck",
    "demo": "handgrad demo --steps 500",
    "completion": "handgrad completion bash",
}

# The whole command line as one parser, for shtab, which generates shell completions; handgrad itself never builds it.

# shtab's own names for the shell functions that complete paths (https://docs.iterative.ai/shtab/use/).
PATHS = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}
PATH_METAVARS = {"DIR", "FILE", "RUN", "MODEL", "CHECKPOINT", "SOURCE"}


def command_line() -> argparse.ArgumentParser:
    """A parser with a subparser per command, with choices and paths marked for completion."""
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
    elif words in PATH_METAVARS or action.dest in ("data", "out", "init_from", "teacher"):
        action.complete = PATHS  # type: ignore
