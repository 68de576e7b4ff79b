"""handgrad prepare: raw text to a folder of token shards."""

import shlex
import string
import sys
import time
from argparse import Namespace
from dataclasses import fields
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress as Bars, TextColumn, TimeRemainingColumn

from handgrad.data.codes import RGB
from handgrad.data.preferences import has_pairs
from handgrad.data.prepare import Prepared, PrepareOptions, Progress, prepare as write_shards
from handgrad.data.shards import Dataset
from handgrad.data.sources import passed_over
from handgrad.errors import UsageError
from handgrad.format import human_count
from handgrad.storage.run_files import BEST, CHECKPOINTS

OTHER_PICTURES = (".gif", ".bmp", ".tif", ".tiff", ".heic", ".avif", ".jp2")  # suffixes that --images does not read


def run(parsed: Namespace) -> int:
    check_reference(parsed)
    choose_source(parsed)
    values = {field.name: getattr(parsed, field.name) for field in fields(PrepareOptions) if field.name in parsed}
    options = PrepareOptions(**values | {"out": Path(parsed.out)})
    if options.codes and Path(options.codes).exists():
        from handgrad.evaluation.codec import with_codec  # imports torch, which other shards do not need
        from handgrad.interop.sources import open_weights

        options = with_codec(options, open_weights)
    prepared = prepare_with_progress(options)
    show_prepared(prepared)
    if parsed.reference:
        from handgrad.tools.references import add_references  # imports torch, which plain shards do not need

        add_references(prepared.dataset, parsed.reference)
        print(f"references the answers' log-probabilities under {parsed.reference}")
    others = passed_over(parsed.source)
    if parsed.codes:  # not labels, captions and the like
        others = {suffix: count for suffix, count in others.items() if suffix in OTHER_PICTURES}
    if others:
        kinds = ", ".join(f"{count} {suffix}" for suffix, count in others.items())
        print(f"left out   {sum(others.values())} files of other kinds: {kinds:.200}")
    if parsed.tokenizer == "auto" and prepared.dataset.tokenizer.kind == "bpe":
        spec, weights = ("MODEL", "a model's") if parsed.chat else ("gpt2", "GPT-2's")
        own = f"--tokenizer {spec} if {weights} weights are to be finetuned on it"
        print(f"           trained on this text, as it is small; {own}")
    print(f"next       {next_command(prepared.dataset, parsed.tokenizer)}")
    return 0


def choose_source(parsed: Namespace) -> None:
    """Sets the source and the codes. Raises `UsageError` unless there is one source."""
    if not parsed.source and not parsed.images:
        example = "handgrad prepare stories --out shards"
        raise UsageError(f"SOURCE is missing; for example `{example}`; `handgrad prepare --help` lists all")
    if parsed.source and parsed.images:
        raise UsageError(f"expected one source, found {parsed.source} and --images {parsed.images}; leave one out")
    parsed.source = parsed.source or parsed.images
    parsed.codes = parsed.codes or ("palette:512" if parsed.images else "")


def check_reference(parsed: Namespace) -> None:
    """Raises `UsageError` for pairs without a model or a model without pairs. Their tokens are the model's."""
    if bool(parsed.reference) != parsed.preferences:
        present, missing = ("--reference", "--preferences") if parsed.reference else ("--preferences", "--reference MODEL")
        raise UsageError(f"{present} goes with {missing}, found it without")
    if parsed.reference and parsed.tokenizer == "auto":
        parsed.tokenizer = parsed.reference


def next_command(dataset: Dataset, tokenizer: str) -> str:
    """The command of a first run on the data, in an unused folder; from the weights of `tokenizer`, if it names any."""
    weights = ["--init-from", tokenizer] if holds_weights(Path(tokenizer)) else []
    free = (out for letter in string.ascii_lowercase if not Path(out := f"runs/{letter}").exists())
    return shlex.join(["handgrad", "train", *weights, "--data", str(dataset.folder), "--out", next(free, "runs/another")])


def holds_weights(folder: Path) -> bool:
    """True for a run, RUN/best, a checkpoint, and a transformers folder with weights."""
    run = folder.parent if folder.name == BEST else folder
    return (run / CHECKPOINTS).is_dir() or any(folder.glob("*.safetensors"))


def prepare_with_progress(options: PrepareOptions) -> Prepared:
    """Prepares with a live bar on a terminal, or a line every ten seconds elsewhere."""
    if not sys.stdout.isatty():
        return write_shards(options, PlainProgress().show)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=32), TextColumn("{task.percentage:>3.0f}%"))
    console = Console(file=getattr(sys.stdout, "terminal", None))
    with Bars(*columns, TimeRemainingColumn(), console=console, transient=True) as bars:
        task = bars.add_task("preparing", total=None)

        def show(progress: Progress) -> None:
            text = f"{progress.phase}, {human_count(progress.tokens)} tokens"
            bars.update(task, total=progress.total, completed=progress.done, description=text)

        return write_shards(options, show)


LEAST_SHARE = 0.05  # of the work, before a line estimates the time left: earlier, the start of the workers dominates


class PlainProgress:
    """Prints a line every ten seconds, with the time left if the total is known."""

    def __init__(self) -> None:
        self.start = self.last = time.monotonic()

    def show(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self.last < 10:
            return
        self.last = now
        share = ""
        if progress.total and progress.done:
            fraction = min(1.0, progress.done / progress.total)
            share = f", {fraction:.0%}"
            if fraction >= LEAST_SHARE:
                share += f", {(now - self.start) * (1 - fraction) / fraction:.0f} s left"
        print(
            f"{progress.phase}: {human_count(progress.done)} {progress.unit}, {human_count(progress.tokens)} tokens{share}"
        )


def show_prepared(prepared: Prepared) -> None:
    dataset, codes = prepared.dataset, prepared.dataset.codes
    assert dataset.manifest is not None
    if prepared.already_prepared:
        print(f"{dataset.folder} is prepared already")
    for name, split in dataset.manifest["splits"].items():
        tokens, documents = split["tokens"], split["documents"]
        if dataset.is_chat:
            trained = split["trained_tokens"]
            count = f"{documents // 2} pairs" if has_pairs(dataset) else f"{documents} conversations"
            text = f"{tokens} tokens in {count}, {trained} of them trained ({trained / tokens:.0%})"
        elif codes:
            (rows, columns), unit = codes.size, " codes" if codes.decoder not in ("", RGB) else ""
            text = f"{documents} pictures of {rows} x {columns}{unit}, {tokens} tokens"
        else:
            marks = "end-of-text and begin-of-text" if dataset.tokenizer.begins else "end-of-text"
            text = f"{split['text_tokens']} text tokens + {tokens - split['text_tokens']} {marks} in {documents} documents"
        print(f"{name:<10} {text}, {len(split['shards'])} shard(s)")
        if split.get("left_out"):
            print(f"           {split['left_out']} rows left out, the first: {split['first_left_out']}")
    vocab_size = dataset.tokenizer.vocab_size
    if codes:
        more = "captions" if codes.captions else f"{len(codes.classes)} classes" if codes.classes else "no classes"
        colours = len(codes.colours)
        kinds = {"": f"palette    {colours} colours, {more}", RGB: "bytes      red, green and blue, for an autoencoder"}
        print(f"{kinds.get(codes.decoder, f'codes      {colours}, {more}')}; {vocab_size} tokens")
    else:
        print(f"tokenizer  {dataset.tokenizer.kind}, {vocab_size} words")
