"""Every command's flags, parsed before the command and its libraries load: help and mistakes are answered at once."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from handgrad.commands.bench_arguments import bench
from handgrad.commands.epochs import epochs_in_steps
from handgrad.commands.model_arguments import (
    WATCH_PORT,
    add_address,
    add_fp8_weights,
    add_model_arguments,
    add_strict,
    chat,
    sample,
    serve,
)
from handgrad.commands.parser import METAVARS, Formatter, HelpAll, Parser, flag
from handgrad.evaluation.tasks import TASKS
from handgrad.machine.gpus import GPUS, short_name
from handgrad.run import settings
from handgrad.run.settings import Sweep, resolve_sweep
from handgrad.settings import presets
from handgrad.settings.config import AT_LEAST_1, FIELDS, NOT_NEGATIVE, SECONDS, TECHNIQUES, RunConfig, read_toml

TIMEOUTS = ("join_seconds", "silence_seconds", "stall_seconds")
SOURCES = (
    "stories, questions (built in), shakespeare, tinystories, fineweb, fineweb-edu, any hub dataset as OWNER/NAME[:CONFIG],"
    " or local .txt, .md, .jsonl, .parquet: a file, a folder or a quoted glob"
)


# Flags that change the list `techniques`.
TECHNIQUE_CHANGES = {
    settings.WITHOUT: f"techniques to leave out, of {', '.join(name for name, on in TECHNIQUES.items() if on)}",
    settings.WITH: f"techniques to add, of {', '.join(name for name, on in TECHNIQUES.items() if not on)}",
}
PLANNED_GPUS = f"plan for this GPU, which need not be here: {', '.join(GPUS)}; or all (default: this machine, then all)"

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


def parse(command: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Parses a command's arguments; for a command with run settings, also resolves them as `run_config`."""
    summary, add_arguments = COMMANDS[command]
    texts = {"description": summary, "epilog": f"example: {EXAMPLES[command]}"}
    parser = Parser(f"handgrad {command}", formatter_class=Formatter, **texts)
    parser.example = EXAMPLES[command]
    add_arguments(parser)
    namespace = parser.parse(arguments)
    namespace.arguments = list(arguments)
    if "over" in namespace:
        namespace.sweep = sweep_of(namespace)
    elif "preset" in namespace:
        namespace.run_config = run_config(namespace, command)
    return namespace


def add_run_arguments(parser: Parser) -> None:
    """A preset or a recipe, a model size, and a flag for every field, under the heading of its group."""
    parser.takes_one = "after a PRESET all is named: --data DIR, --out RUN, --config FILE, --init-from WEIGHTS"
    parser.in_steps = partial(epochs_in_steps, run_config)
    parser.usage = "%(prog)s [PRESET] [--config FILE] [--SETTING VALUE]..."
    parser.add_argument("preset", nargs="?", help=f"starting point: {presets.listed(presets.PRESETS)}")
    parser.add_argument("--config", metavar="FILE", help="TOML recipe, or the name of a shipped one (`handgrad recipes`)")
    parser.add_argument("--model", metavar="NAME", help=f"sets layers, heads, channels: {presets.listed(presets.MODELS)}")
    parser.add_argument("--help-all", action=HelpAll, nargs=0, help="show all settings")
    change = "a preset, --init-from and --data alone change defaults; --help-all shows all"
    first = group = parser.add_argument_group("settings", change)
    for name, known in FIELDS.items():
        if name in GROUPS:
            group = parser.add_argument_group(GROUPS[name])
        choices = known.metadata["choices"]
        default = str(known.default).lower() if known.type is bool else known.default
        text = known.metadata["help"].replace("%", "%%") + f" (default: {'none' if default == '' else default})"
        options: dict[str, Any] = {"metavar": "|".join(choices) if choices else METAVARS[known.type], "default": None}
        if known.type is bool:
            options |= {"nargs": "?", "const": "true"}
        if name in FIRST_SETTINGS:
            first.add_argument(flag(name), help=text, **options)
        else:
            parser.left_out[group.add_argument(flag(name), help=argparse.SUPPRESS, **options)] = text
        if name == "techniques":
            for change, text in TECHNIQUE_CHANGES.items():
                option = group.add_argument(flag(change), help=argparse.SUPPRESS, metavar="NAMES")
                parser.left_out[option] = text


def run_config(parsed: argparse.Namespace, command: str = "train") -> RunConfig:
    """The configuration that the arguments of a command describe (`run.settings`)."""
    return settings.run_config(parsed.preset or "", parsed.config or "", parsed.model or "", given(parsed), command)


def given(namespace: argparse.Namespace) -> dict[str, Any]:
    """The settings that have a flag on the command line."""
    return {name: value for name in (*FIELDS, *TECHNIQUE_CHANGES) if (value := getattr(namespace, name)) is not None}


def sweep_of(namespace: argparse.Namespace) -> Sweep:
    """The runs that the arguments describe (`run.settings`); a recipe may stand for a preset."""
    start, recipe, flags = namespace.preset or "", namespace.config or "", given(namespace)
    if start.endswith(".toml") and not recipe:
        start, recipe = "", start
    named = flags.pop("out", "") or (read_toml(recipe).get("out", "") if recipe else "")
    return resolve_sweep(namespace.over, start, recipe, namespace.model or "", flags, named)


def add_timeout_arguments(parser: Parser) -> None:
    """The waits of ranks for each other, as in a run."""
    for name in TIMEOUTS:
        text = f"{FIELDS[name].metadata['help']} (default: {FIELDS[name].default})"
        parser.number(flag(name), text, rule=SECONDS, default=FIELDS[name].default)


def prepare(parser: Parser) -> None:
    parser.add_argument("source", metavar="SOURCE", help=SOURCES)
    parser.takes_one = "several files are one SOURCE: their folder, or a glob in quotes, like 'notes/*.txt'"
    parser.text("--out", "DIR", "folder to write (default: shards)", default="shards")
    names = "gpt2, bytes, bpe:SIZE, a run, a model's folder or a tokenizer.json"
    names += " (default: auto: gpt2; for less than 4 MiB of your own text bpe:4096)"
    parser.text("--tokenizer", "NAME", names, default="auto")
    parser.text("--text-field", "NAME", "the column of a row that holds the text", default="text")
    parser.switch("--chat", "rows are conversations, or questions and answers; only the assistant's words are trained")
    share = "share held out (default: 0.1 of text, 0.05 of rows, 0.005 on the Hub, 0.01 of stories, questions)"
    parser.number("--validation-fraction", share, kind=float)
    parser.number("--shard-tokens", "tokens per shard (default: 100 million)", default=100_000_000)
    parser.number("--documents", "at most N documents (0: all; of stories and questions 100,000)", default=0)
    parser.number("--workers", "processes (0: one per core)", default=0)
    parser.number("--seed", "of the stories, the questions and the validation rows", default=0)
    parser.switch("--skip-bad-rows", "with --chat: leave out rows that are not conversations, and count them")
    parser.switch("--overwrite", "replace a folder that holds other data")


def train(parser: Parser) -> None:
    add_run_arguments(parser)
    parser.switch("--allow-changes", "resume although config or data changed (logged)")
    add_strict(parser)
    parser.number("--gpus", "start a process on each of N GPUs of this machine (default: 1)", rule=AT_LEAST_1)
    parser.number("--restarts", "after a crash resume from the newest checkpoint, at most N times", rule=NOT_NEGATIVE)
    parser.number("--ranks", "start N processes on any device, also on a CPU (default: 1)", rule=AT_LEAST_1)


def sweep(parser: Parser) -> None:
    add_run_arguments(parser)
    parser.usage = "%(prog)s [PRESET|RECIPE] --over KEY=VALUE,... [--SETTING VALUE]..."
    over = "settings to vary, each with its values; each combination is a run, in OUT/KEY=VALUE,KEY=VALUE"
    parser.add_argument("--over", nargs="+", action="extend", required=True, metavar="KEY=VALUE,...", help=over)
    parser.number("--jobs", "runs at once (default: one per GPU, one on a CPU)", rule=AT_LEAST_1)


def plan(parser: Parser) -> None:
    add_run_arguments(parser)
    parser.number("--vocab-size", "words (default: as in --data, or GPT-2's)", rule=AT_LEAST_1)
    parser.add_argument("--gpu", type=short_name, choices=[*GPUS, "all"], metavar="NAME", help=PLANNED_GPUS)
    parser.number("--gpus", "number of GPUs, with a process on each (default: 1)", rule=AT_LEAST_1)
    parser.number("--price", "dollars per GPU and hour (default: costs are left out)", kind=float, rule=NOT_NEGATIVE)
    parser.text("--fit", "SIZE", "memory to plan for, like 24GB (default: all of a GPU's)", default=None)
    parser.number("--ranks", "like --gpus, for processes on any device", rule=AT_LEAST_1)


def evaluate(parser: Parser) -> None:
    add_model_arguments(parser, with_fp8=True)
    parser.takes_one = "one MODEL at a time; `handgrad report RUN RUN` compares runs"
    add_fp8_weights(parser)
    parser.text("--data", "DIR", "prepared shards (default without --tasks: the run's)")
    parser.number("--eval-tokens", "tokens to evaluate (default: the whole split)", rule=NOT_NEGATIVE, default=0)
    stride = "tokens between windows, each of which scores its last ones; 0: windows side by side (default: the run's)"
    parser.number("--eval-stride", stride, rule=NOT_NEGATIVE)
    context = "tokens per window (default: the model's context; for an imported model at most 4096)"
    parser.number("--context", context, rule=NOT_NEGATIVE, default=0)
    parser.number("--micro-batch", "contexts' worth of tokens at once (default: 8)", rule=AT_LEAST_1, default=8)
    parser.text("--tasks", "NAME[=FILE],...", f"{', '.join(TASKS)}, or your own; without a FILE from the Hub")
    parser.number("--limit", "first N examples of each task (default: all)", rule=NOT_NEGATIVE, default=0)
    parser.text("--out", "FILE", "write a line of JSON for each example of the tasks")
    add_timeout_arguments(parser)


def export(parser: Parser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="run folder (its newest checkpoint) or checkpoint folder")
    parser.add_argument("folder", metavar="DIR", help="a new folder; for gguf a new file")
    formats = (
        "hf: a folder for Hugging Face's transformers: weights, config, tokenizer, model card;"
        " peft: the adapters of train --lora for PEFT; llmc: a folder for llm.c: model.bin, the tokenizer file;"
        " gguf: one file for llama.cpp (needs `pip install gguf`)"
    )
    parser.add_argument("--to", required=True, choices=("hf", "peft", "llmc", "gguf"), help=formats)
    types = "of the weights: fp32 or bf16 (default: fp32); for gguf f16, bf16 or q8_0 (default: f16)"
    parser.add_argument("--dtype", choices=("fp32", "bf16", "f16", "q8_0"), metavar="NAME", help=types)
    parser.text("--push", "NAME", "hf: then upload DIR to the Hub as OWNER/NAME, private if new")
    parser.switch("--with-optimizer", "llmc: also the moments, so that llm.c can resume (-y 1)")
    add_strict(parser)


def import_(parser: Parser) -> None:
    sources = "a transformers or PEFT folder, the name of a model on the Hub, or a model file of llm.c"
    parser.add_argument("source", metavar="SOURCE", help=sources)
    accepted = "a new folder; evaluate, sample and --init-from accept it"
    parser.add_argument("--out", required=True, metavar="DIR", help=accepted)
    parser.text("--tokenizer", "gpt2|bytes|FILE", "instead of the source's own")
    parser.text("--optimizer", "FILE", "llm.c's state_*.bin of that step, so that `train --out DIR` can resume")
    parser.text("--base", "WEIGHTS", "base weights for a PEFT folder's adapters, instead of the ones it names")


def add_runs(parser: Parser) -> None:
    which = "run folders, a folder of runs, llm.c's main.log; overlaid (default: runs)"
    parser.add_argument("runs", nargs="*", default=["runs"], metavar="RUN", help=which)


def report(parser: Parser) -> None:
    add_runs(parser)
    parser.text("--out", "FILE", "the page; plots go beside it (default: RUN/report.html)")


def recipes(parser: Parser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="a name that `handgrad recipes` lists")


def watch(parser: Parser) -> None:
    add_runs(parser)
    add_address(parser, WATCH_PORT)


def runs(parser: Parser) -> None:
    parser.add_argument("folder", nargs="?", default="runs", metavar="FOLDER", help="the folder to search (default: runs)")
    parser.switch("--json", "print a JSON list instead, for scripts")


def checkpoints(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.switch("--verify", "instead: compare every file with its hash; exit code 65 if one is damaged")
    newest = "instead: delete all but the N newest, the best and the major ones (--keep-every)"
    parser.number("--prune", newest, rule=AT_LEAST_1)


def profile(parser: Parser) -> None:
    add_run_arguments(parser)
    parser.number("--vocab-size", "words of synthetic tokens (default: GPT-2's)", rule=AT_LEAST_1)
    parser.number("--profile-steps", "optimizer steps to record (default: 3)", rule=AT_LEAST_1, default=3)
    parser.text("--trace", "FILE", "also write a trace for Perfetto (.json or .json.gz)")


def doctor(parser: Parser) -> None:
    parser.switch("--net", "instead: measure the network between processes (under torchrun, srun)")
    add_timeout_arguments(parser)


def verify(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder, or a certificate with checkpoints/ beside it")
    parser.text("--data", "DIR", "the run's shards (default: where the run had them)")
    parser.text("--init-from", "DIR", "the weights that it started from (default: where the run had them)")
    parser.number("--from", "step to begin after, 0 or one with a checkpoint (default: the first)", rule=NOT_NEGATIVE)
    parser.number("--to", "last step (default: the step of the last link or checkpoint)", rule=AT_LEAST_1)
    parser.number("--segments", "instead: N segments between checkpoints, drawn by --seed", rule=AT_LEAST_1)
    parser.number("--seed", "of the draw", rule=NOT_NEGATIVE, default=0)
    parser.text("--signed-by", "SHA256", "SHA-256 of the key that must have signed the certificate (default: any, or none)")
    parser.switch("--allow-changes", "replay although the device or versions differ (they are named)")
    parser.number("--ranks", "replay with N processes, on a GPU each if there are any (default: 1)", rule=AT_LEAST_1)
    parser.text("--scratch", "DIR", "an empty folder for the replay (default: a temporary one)")


def diff(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument("other", metavar="RUN", help="another; exit code 0 if nothing differs, 1 otherwise")
    parser.number("--tensors", "differing tensors to list (default: 12; 0: all)", rule=NOT_NEGATIVE, default=12)


def certificate(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder with audit.jsonl")
    parser.text("--out", "FILE", "the certificate; a page goes beside it (default: RUN/certificate.json)")
    parser.text("--key", "FILE", "sign with this Ed25519 key (PEM, no password); needs the package cryptography")


def gradcheck(parser: Parser) -> None:
    """No options: it checks the reference, on a CPU."""


def demo(parser: Parser) -> None:
    parser.text("--data", "DIR", "folder of the shards", default="shards/stories")
    parser.text("--out", "DIR", "folder of the run", default="runs/demo")
    parser.number("--steps", "training steps", default=presets.demo().steps)


COMMANDS: dict[str, tuple[str, Callable[[Parser], None]]] = {
    "demo": ("trains on stories and writes a report, in about two minutes", demo),
    "prepare": ("turns raw text into a folder of token shards", prepare),
    "train": ("trains the run in --out, or resumes it", train),
    "sweep": ("trains a run for every combination of values; one report of all", sweep),
    "recipes": ("lists the shipped recipes and launch files, or prints one", recipes),
    "plan": ("predicts memory, speed and cost of a run, here or on other GPUs", plan),
    "sample": ("writes texts with a model, streamed, or one for each prompt", sample),
    "chat": ("lets you talk to a model; through a pipe, one answer per line", chat),
    "serve": ("serves a model over HTTP: a page to talk to it, and OpenAI's API", serve),
    "evaluate": ("measures loss, perplexity, bits per byte, and results on tasks", evaluate),
    "export": ("writes a checkpoint for transformers, PEFT, llm.c or llama.cpp", export),
    "import": ("turns a model of transformers, PEFT or llm.c into a checkpoint", import_),
    "report": ("writes a self-contained HTML page about one or more runs", report),
    "watch": ("serves the report of one or more runs, live in a browser", watch),
    "runs": ("lists the runs below a folder: steps, loss, size, state", runs),
    "checkpoints": ("lists a run's checkpoints, verifies their hashes, or prunes them", checkpoints),
    "verify": ("replays an audited run from checkpoints; compares every link", verify),
    "diff": ("finds where runs part: settings, versions, data, link, tensors", diff),
    "certificate": ("writes what a run was trained on, with hashes, into a small file", certificate),
    "gradcheck": ("compares every gradient by hand with differences of its forward", gradcheck),
    "doctor": ("checks what this machine has, uses and lacks; runs each part once", doctor),
    "profile": ("times the kernels of a run's steps, beside this machine's limits", profile),
    "bench": ("measures handgrad beside a PyTorch autograd twin", bench),
}
# The first command of each group, in order.
COMMAND_GROUPS = {
    "demo": "from text to a model",
    "sample": "a model at work",
    "report": "runs, while they train and after",
    "verify": "proofs",
    "doctor": "this machine",
}

EXAMPLES = {
    "prepare": "handgrad prepare my_text.txt --tokenizer bpe:4096 --out shards/mine",
    "train": "handgrad train tiny --data shards/mine --out runs/a --steps 500",
    "sweep": "handgrad sweep tiny --over learning_rate=3e-3,6e-3 seed=1,2,3 --data shards/mine --out runs/rates",
    "plan": "handgrad plan d12 --gpu h100 --gpus 8 --price 2.50",
    "evaluate": "handgrad evaluate runs/a --data shards/mine",
    "sample": 'handgrad sample runs/a --prompt "Once upon a time" --samples 3',
    "chat": 'handgrad chat HuggingFaceTB/SmolLM2-135M-Instruct --system "You are a pirate."',
    "serve": "handgrad serve runs/talks --port 8000",
    "export": "handgrad export runs/a exported --to hf",
    "import": "handgrad import gpt2 --out imported",
    "report": "handgrad report runs/a runs/b --out compared.html",
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
    "gradcheck": "handgrad gradcheck",
    "demo": "handgrad demo --steps 500",
}
