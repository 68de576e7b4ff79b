"""The flags of every command: shared flags first, then a function for each command."""

import argparse
from typing import Any

from handgrad.commands.parser import FIRST_SETTINGS, GROUPS, METAVARS, HelpAll, Parser, flag
from handgrad.evaluation.tasks import TASKS
from handgrad.machine.gpus import GPUS, short_name
from handgrad.run import settings
from handgrad.settings import presets
from handgrad.settings.config import (
    ABOVE_0,
    AT_LEAST_1,
    AUTO,
    BACKENDS,
    DEVICES,
    FIELDS,
    NOT_NEGATIVE,
    PRECISIONS,
    SECONDS,
    TECHNIQUES,
    between,
)

TIMEOUTS = ("join_seconds", "silence_seconds", "stall_seconds")
SOURCES = (
    "stories, questions, sprites (built in), shakespeare, tinystories, fineweb, fineweb-edu, any hub dataset as"
    " OWNER/NAME[:CONFIG], or local .txt, .md, .jsonl, .parquet: a file, a folder or a quoted glob"
)

# Flags that change the list `techniques`.
TECHNIQUE_CHANGES = {
    settings.WITHOUT: f"techniques to leave out, of {', '.join(name for name, on in TECHNIQUES.items() if on)}",
    settings.WITH: f"techniques to add, of {', '.join(name for name, on in TECHNIQUES.items() if not on)}",
}
PLANNED_GPUS = f"plan for this GPU, which need not be here: {', '.join(GPUS)}; or all (default: this machine, then all)"

EPOCHS_TEXT = "passes over the training split, instead of --steps; the run keeps the steps (default: --steps decides)"
WATCH_PORT, SERVE_PORT = 8360, 8361
FP8_NOTE = "; fp8: as a run in fp8 validates"
SHELLS = ("bash", "zsh", "tcsh")
BENCHMARK_TEXTS = {
    "step": "whole optimizer steps, alternating with the twin: speed, memory; on a GPU power and time to step 1",
    "loss": "the same training run by handgrad and by the twin: the distance of their losses",
    "ladder": "from plain PyTorch to handgrad's kernels, one improvement per row",
    "kernels": "single operations, beside torch's",
    "sampling": "texts of a model with random weights, beside transformers.generate: 1, 8 and 64 at a time",
    "fp8": "kernels and GEMMs of fp8 beside bf16: times, bytes, errors",
    "card": "training steps of four models on this machine, in two minutes: a file to send in",
}


# Flags of several commands.


def add_run_arguments(parser: Parser) -> None:
    """Adds a preset or a recipe, a model size, and a flag for every field, under the heading of its group."""
    parser.takes_one = "after a PRESET all is named: --data DIR, --out RUN, --config FILE, --init-from WEIGHTS"
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
            if name == "steps":
                first.add_argument(flag(settings.EPOCHS), help=EPOCHS_TEXT, type=float, metavar=METAVARS[float])
        else:
            parser.left_out[group.add_argument(flag(name), help=argparse.SUPPRESS, **options)] = text
        if name == "techniques":
            for change, text in TECHNIQUE_CHANGES.items():
                parser.left_out[group.add_argument(flag(change), help=argparse.SUPPRESS, metavar="NAMES")] = text


def add_model_arguments(parser: Parser, *, with_fp8: bool = False) -> None:
    """Adds the model, device, precision and backend. `with_fp8`: accepts fp8 as a precision, for a run's checkpoint."""
    model = "run (its newest checkpoint), RUN/best, checkpoint, transformers folder, Hub name, .bin of llm.c"
    parser.add_argument("checkpoint", metavar="MODEL", help=model)
    parser.elsewhere |= dict.fromkeys(("model", "m", "checkpoint"), f"a model has no flag: `{parser.prog} MODEL`")
    parser.elsewhere |= dict.fromkeys(("ngl", "n_gpu_layers"), "a model is on one device as a whole: --device cuda")
    parser.elsewhere["fp8_weights"] = "removed: weights are read in --precision; leave it out"
    add_strict(parser)
    parser.add_argument("--device", default="auto", choices=DEVICES, help="(default: auto)")
    precisions = [AUTO, *(precision for precision in PRECISIONS if with_fp8 or precision != "fp8")]
    chosen = "of weights and GEMMs (default: auto: bf16 on a GPU that has it, else fp16; fp32 on a CPU)"
    parser.add_argument("--precision", default=AUTO, choices=precisions, help=chosen + FP8_NOTE * with_fp8)
    parser.add_argument("--backend", default="auto", choices=BACKENDS, help="(default: auto: kernels on a CUDA GPU)")


def add_strict(parser: Parser) -> None:
    parser.switch("--strict", "refuse a run whose newest checkpoint is damaged, instead of taking the one before")


def add_sampling_arguments(parser: Parser, text: str) -> None:
    """Adds the rules for choosing a token, and for the end of a text. `text`: the help's word for it, like "an answer"."""
    parser.number("--temperature", "divides the logits; 0 is greedy (default: 0.8)", kind=float, default=0.8)
    parser.number("--top-k", "only the N likeliest tokens (0: all)", default=0)
    parser.number("--top-p", "only the likeliest tokens of total probability X (1: all)", kind=float, default=1.0)
    parser.number("--min-p", "only tokens X times as likely as the likeliest (0: all)", kind=float, default=0.0)
    parser.number("--repetition-penalty", "divides logits of tokens in the text so far (1: none)", kind=float, default=1.0)
    ends = f"ends {text} before this text; may be repeated"
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help=ends)


def add_address(parser: Parser, port: int) -> None:
    """Adds the port and the host of a page."""
    parser.number("--port", f"of the page (default: {port}, or a free one)", rule=between(1, 65535))
    parser.text("--host", "ADDRESS", "address to listen on; 0.0.0.0: all of the network", default="127.0.0.1")


def add_timeout_arguments(parser: Parser) -> None:
    """Adds the timeouts of ranks that wait for each other, as in a run."""
    for name in TIMEOUTS:
        text = f"{FIELDS[name].metadata['help']} (default: {FIELDS[name].default})"
        parser.number(flag(name), text, rule=SECONDS, default=FIELDS[name].default)


def add_runs(parser: Parser) -> None:
    which = "run folders, a folder of runs, llm.c's main.log; overlaid (default: runs)"
    parser.add_argument("runs", nargs="*", default=["runs"], metavar="RUN", help=which)


# Flags of one command.


def prepare(parser: Parser) -> None:
    parser.add_argument("source", metavar="SOURCE", nargs="?", help=SOURCES)
    images = "a SOURCE of pictures: PNG, JPEG, WebP, also in folders by class, CIFAR-10's .bin, MNIST's idx"
    parser.text("--images", "FOLDER", images)
    parser.takes_one = "several files are one SOURCE: their folder, or a glob in quotes, like 'notes/*.txt'"
    parser.text("--out", "DIR", "folder to write (default: shards)", default="shards")
    names = "gpt2, bytes, bpe:SIZE, a run, a model's folder or a tokenizer.json"
    names += " (default: auto: gpt2; for less than 4 MiB of your own text bpe:4096)"
    parser.text("--tokenizer", "NAME", names, default="auto")
    parser.text("--text-field", "NAME", "the column of a row that holds the text", default="text")
    parser.switch("--chat", "rows are conversations, or questions and answers; only the assistant's words are trained")
    parser.switch("--preferences", "rows are pairs of a chosen and a rejected answer, for `train --objective dpo`")
    parser.text("--reference", "MODEL", "with --preferences: the model that the training will start from")
    share = "share held out (default: 0.1 of text, 0.05 of rows, 0.005 on the Hub, 0.01 of stories, questions)"
    parser.number("--validation-fraction", share, kind=float)
    parser.number("--shard-tokens", "tokens per shard (default: 100 million)", default=100_000_000)
    parser.number("--documents", "at most N documents (0: all; of stories and questions 100,000)", default=0)
    parser.number("--workers", "processes (0: one per core)", default=0)
    parser.number("--seed", "of the stories, the questions and the validation rows", default=0)
    codes = "of pictures: a pixel is one of N colours, by k-means; or rgb: bytes, for an autoencoder; or a RUN of one: its"
    parser.text("--codes", "palette:N", f"{codes} codes (default: palette:512)")
    parser.text("--size", "ROWSxCOLUMNS", "of a picture in codes, or one number for both (default: 32)", default="32")
    parser.text("--join", "FILE.jsonl", 'captions of pictures, a {"image": PATH, "caption": TEXT} a line')
    parser.switch("--strict", "refuse pictures of another size; the default crops and resizes them")
    parser.switch("--skip-bad-rows", "with --chat: leave out rows that are not conversations, and count them")
    parser.switch("--overwrite", "replace a folder that holds other data")


def train(parser: Parser) -> None:
    add_run_arguments(parser)
    parser.switch("--allow-changes", "resume although config or data changed (logged)")
    add_strict(parser)
    parser.number("--gpus", "start a process on each of N GPUs of this machine (default: 1)", rule=AT_LEAST_1)
    parser.number("--restarts", "after a crash resume from the newest checkpoint, at most N times", rule=NOT_NEGATIVE)
    parser.number("--ranks", "start N processes on any device, also on a CPU (default: 1)", rule=AT_LEAST_1)


def plan(parser: Parser) -> None:
    add_run_arguments(parser)
    parser.number("--vocab-size", "words (default: as in --data, or GPT-2's)", rule=AT_LEAST_1)
    parser.add_argument("--gpu", type=short_name, choices=[*GPUS, "all"], metavar="NAME", help=PLANNED_GPUS)
    parser.number("--gpus", "number of GPUs, with a process on each (default: 1)", rule=AT_LEAST_1)
    parser.number("--price", "dollars per GPU and hour (default: costs are left out)", kind=float, rule=NOT_NEGATIVE)
    fit = "memory to plan for, like 24GB (default: all of a GPU's)"
    parser.add_argument("--fit", nargs="?", const="", metavar="SIZE", help=fit)
    parser.number("--ranks", "like --gpus, for processes on any device", rule=AT_LEAST_1)


def evaluate(parser: Parser) -> None:
    add_model_arguments(parser, with_fp8=True)
    parser.takes_one = "one MODEL at a time; `handgrad report RUN RUN` compares runs"
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
    parser.text("--reward", "NAME", "of greedy answers to the prompts in --data, as `train --objective reward` takes both")
    parser.text(
        "--answer-stop", "TEXT", "ends an answer, and its reward does not see it (default: the run's)", default=None
    )
    parser.number("--answer-tokens", "of the longest answer (default: the run's, or 256)", rule=NOT_NEGATIVE, default=0)
    add_timeout_arguments(parser)


def export(parser: Parser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="run folder (its newest checkpoint) or checkpoint folder")
    parser.intermixed = True
    parser.add_argument("folder", nargs="?", metavar="DIR", help="a new folder; for gguf a new file")
    parser.text("--out", "DIR", "the same as a flag")
    formats = (
        "hf, the default: a folder for Hugging Face's transformers: weights, config, tokenizer, model card;"
        " peft: the adapters of train --lora for PEFT; llmc: a folder for llm.c: model.bin, the tokenizer file;"
        " gguf: one file for llama.cpp (needs `pip install gguf`)"
    )
    parser.add_argument("--to", default="hf", choices=("hf", "peft", "llmc", "gguf"), help=formats)
    types = "of the weights: fp32 or bf16 (default: fp32); for gguf f16, bf16 or q8_0 (default: f16)"
    parser.add_argument("--dtype", choices=("fp32", "bf16", "f16", "q8_0"), metavar="NAME", help=types)
    parser.elsewhere["push"] = "`hf upload OWNER/NAME DIR --private` uploads the folder to the Hub"
    add_strict(parser)


def import_(parser: Parser) -> None:
    sources = "a transformers or PEFT folder, the name of a model on the Hub, or a model file of llm.c"
    parser.add_argument("source", metavar="SOURCE", help=sources)
    accepted = "a new folder; evaluate, sample and --init-from accept it"
    parser.add_argument("--out", required=True, metavar="DIR", help=accepted)
    parser.text("--tokenizer", "gpt2|bytes|FILE", "instead of the source's own")
    parser.text("--base", "WEIGHTS", "base weights for a PEFT folder's adapters, instead of the ones it names")


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


def plot(parser: Parser) -> None:
    add_runs(parser)
    parser.text("--out", "FILE.png", "write a PNG instead of drawing in the terminal")


def completion(parser: Parser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=f"{', '.join(SHELLS)}; its script goes to stdout")


def doctor(parser: Parser) -> None:
    """No options: it examines everything."""
    parser.elsewhere = {"net": "`python -m benchmarks.network` in the repository measures the network between processes"}


def verify(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder, or a certificate with checkpoints/ beside it")
    parser.text("--data", "DIR", "the run's shards (default: where the run had them)")
    parser.text("--init-from", "DIR", "the weights that it started from (default: where the run had them)")
    parser.text("--teacher", "DIR", "the weights that it learnt from (default: the same)")
    parser.text("--reward", "FILE.py:FUNCTION", "your function that rewarded it: its code runs only if you name it")
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


def climb(parser: Parser) -> None:
    about = "start writes DIR; check grades a STEP, or the next; run trains by your operations (default: the way)"
    parser.add_argument("action", metavar="start|check|run", nargs="?", help=about)
    parser.add_argument("what", metavar="DIR|STEP", nargs="?", help="of start: a new folder; of check: a number or a name")
    parser.text("--dir", "DIR", "the folder of the climb", default=".")
    parser.number("--steps", "training steps of run", default=100, rule=AT_LEAST_1)


def gradcheck(parser: Parser) -> None:
    """No options: it checks the reference, on a CPU."""


def demo(parser: Parser) -> None:
    parser.switch("--images", "pictures with captions instead of stories: about four minutes")
    parser.text("--data", "DIR", "folder of the shards (default: shards/stories, or shards/sprites)")
    parser.text("--out", "DIR", "folder of the run (default: runs/demo, or runs/sprites)")
    parser.number("--steps", "training steps (default: 2000, or 2200 on sprites)", rule=AT_LEAST_1)


def sample(parser: Parser) -> None:
    add_model_arguments(parser)
    parser.takes_one = "give a text as --prompt TEXT"
    parser.elsewhere |= dict.fromkeys(("system", "chat"), "`handgrad chat MODEL --system TEXT` talks")
    parser.text("--prompt", "TEXT", "the beginning (default: a new document)", default=None)
    parser.text("--prompt-file", "FILE", "a file with the beginning; - reads standard input", default=None)
    parser.number("--samples", "number of samples (default: 1)", rule=AT_LEAST_1)
    parser.number("--max-tokens", "longest sample (default: 200)")
    add_sampling_arguments(parser, "a sample")
    parser.number("--seed", "of the first sample or prompt; each further one counts up", default=0)
    prompts = 'prompts, one {"prompt": TEXT} a line; may have "max_tokens"'
    parser.add_argument("--in", dest="input", metavar="FILE", help=prompts)
    parser.text("--out", "FILE", "for --in: the same lines with text, tokens and the reason of the end", default=None)
    parser.number("--batch", "texts at once, of samples or prompts (default: 8)", rule=AT_LEAST_1, default=8)
    parser.text("--image-out", "FILE.png", "for a model of pictures: writes the samples' pictures as a grid", default="")
    parser.add_argument("--class", dest="of_class", metavar="NAME", default="", help="the pictures' class, or its number")
    parser.text("--image-in", "FILE", "a picture to continue or, for a model with captions, to describe", default="")
    parser.number("--rows", "upper rows of --image-in to keep (default: half; to describe it: all)", rule=NOT_NEGATIVE)


def chat(parser: Parser) -> None:
    add_conversation(parser)
    parser.text("--prompt", "TEXT", "one message: prints the answer alone and ends", default=None)
    parser.takes_one = "give a message as --prompt TEXT"
    parser.elsewhere |= dict.fromkeys(
        ("prompt_file", "in"), "a message a line through a pipe: handgrad chat MODEL < FILE; or --prompt TEXT"
    )


def add_conversation(parser: Parser) -> None:
    """Adds the flags of `chat` that `serve` has as well."""
    add_model_arguments(parser)
    parser.text("--system", "TEXT", "the system message, before the conversation")
    parser.number("--max-tokens", "longest answer (default: 512)", default=512)
    add_sampling_arguments(parser, "an answer")
    parser.number("--seed", "of the first answer; each further one counts up", default=0)
    reads = "most tokens of the conversation that the model reads (default: its context, or what fits into memory)"
    parser.number("--context", reads, rule=between(2, 1 << 24))


def serve(parser: Parser) -> None:
    add_conversation(parser)
    parser.takes_one = "its page and its API take the messages; for one: handgrad chat MODEL --prompt TEXT"
    parser.elsewhere |= dict.fromkeys(("prompt", "prompt_file", "in"), parser.takes_one)
    add_address(parser, SERVE_PORT)


def bench(parser: Parser) -> None:
    texts = "; ".join(f"{name}: {text}" for name, text in BENCHMARK_TEXTS.items())
    parser.add_argument("what", choices=list(BENCHMARK_TEXTS), metavar="BENCHMARK", help=texts)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="(default: auto)")
    parser.text("--model", "NAME", "model size (default: d12)", default=None)
    parser.number("--micro-batch", "samples at once (default: step 64, loss 32, ladder 16; CPU: 4)", rule=AT_LEAST_1)
    parser.number("--sequence-length", "tokens per sample (default: 1024; CPU: 64)", rule=AT_LEAST_1)
    parser.number("--micro-steps", "micro-batches per optimizer step (default: 1)", rule=AT_LEAST_1)
    parser.add_argument("--precision", choices=PRECISIONS, help="of handgrad (default: bf16)")
    parser.add_argument("--recompute", type=int, choices=(0, 1, 2, 3), help="of handgrad, as in train (default: 0)")
    parser.text("--data", "DIR", "prepared shards to read the tokens from (default: synthetic tokens)", default=None)
    parser.text("--techniques", "NAMES", "all techniques of a modern network (default: as in train)", default=None)
    parser.text("--contenders", "TEXT", "step on a GPU, loss: names, with commas; an unknown one lists all", default=None)
    parser.number("--seconds", "per contender (default: 20; ladder: 5 a row; card: 110 in all)", rule=ABOVE_0, kind=float)
    parser.number("--turn-seconds", "step on a GPU: length of a slice (default: 10)", rule=ABOVE_0, kind=float)
    starts = "step on a GPU: 1: start only with empty kernel caches; 2: again with full ones (default: 2)"
    parser.add_argument("--starts", type=int, choices=(1, 2), help=starts)
    parser.number("--steps", "loss: optimizer steps (default: 200)", rule=AT_LEAST_1)
    parser.number("--learning-rate", "loss: peak learning rate (default: 6e-4)", rule=ABOVE_0, kind=float)
    parser.text("--rows", "NUMBERS", "ladder: only these, added to those in --out, like 6-9", default=None)
    parser.number("--rounds", "step on a CPU: slices of every contender (default: 5)", rule=AT_LEAST_1)
    parser.text("--out", "FILE", "also write a record, as JSON (card: default card.json)")
