"""handgrad sample: text from a checkpoint, streamed, or a file of prompts answered in a batch."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from handgrad import devices
from handgrad.backend import choose_backend
from handgrad.commands.arguments import Parser, add_model_arguments
from handgrad.errors import DataError, UsageError, storage_error
from handgrad.evaluation.jsonl import check_free, read_prompts, whole_lines
from handgrad.evaluation.load import LoadedModel, load_model
from handgrad.generation.decode import decode_buffers, decode_tensors
from handgrad.generation.generate import Continuation, Decoder, SamplingOptions, check_writing
from handgrad.generation.text import document, stream_text
from handgrad.interop.sources import open_weights

PROGRESS_SECONDS = 5  # between two lines about a file of prompts


def run(arguments: Sequence[str]) -> int:
    parsed = parse(arguments)
    options = SamplingOptions(parsed.temperature, parsed.top_k, parsed.top_p, parsed.min_p, parsed.repetition_penalty)
    prompts = read_prompts(Path(parsed.input)) if parsed.input else [{"prompt": prompt_of(parsed)}] * parsed.samples
    if parsed.out:
        check_free(Path(parsed.out))
    batch = min(parsed.batch, len(prompts))
    device = devices.resolve_device(parsed.device)
    dtype = devices.use_precision(device, parsed.precision)
    ops = choose_backend(parsed.backend, device, parsed.precision)
    model = load_model(
        open_weights(parsed.checkpoint),
        device,
        dtype,
        ops,
        lambda config, shape: decode_buffers(shape, batch, dtype, ops),
    )
    texts = [
        Continuation(
            document(model.tokenizer, row["prompt"]), row.get("max_tokens", parsed.max_tokens), parsed.seed + number
        )
        for number, row in enumerate(prompts)
    ]
    settings = {"vocab_size": model.shape.vocab_size, "end_of_text": model.tokenizer.end_of_text}
    decoder = Decoder(ops, model.weights, decode_tensors(model.views), options, **settings)
    started = time.perf_counter()
    if parsed.out:
        write_file(decoder, model, texts, prompts, parsed)
    else:
        write_terminal(decoder, model, texts, prompts[0]["prompt"], parsed.stop)
    print(speed_line(texts, time.perf_counter() - started), file=sys.stderr)
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("handgrad sample", description="Writes text, token by token; or one for each prompt of a file.")
    add_model_arguments(parser)
    add = parser.add_argument
    add("--prompt", metavar="TEXT", help="the beginning (default: a new document)")
    add("--prompt-file", metavar="FILE", help="the beginning is what this file holds; - is standard input")
    add("--samples", type=int, metavar="N", help="how many (default: 1)")
    add("--max-tokens", type=int, default=200, metavar="N", help="longest sample (default: 200)")
    add("--temperature", type=float, default=0.8, metavar="X", help="divides the logits; 0 is greedy (default: 0.8)")
    add("--top-k", type=int, default=0, metavar="N", help="only the N likeliest tokens (0: all)")
    add("--top-p", type=float, default=1.0, metavar="X", help="only the likeliest that X of the chance falls on (1: all)")
    add("--min-p", type=float, default=0.0, metavar="X", help="only tokens X times as likely as the likeliest (0: all)")
    add(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="divides logits of tokens already there (1: none)",
    )
    add("--stop", action="append", default=[], metavar="TEXT", help="ends a sample before this text; may be repeated")
    add("--seed", type=int, default=0, metavar="N", help="of the first sample or prompt; each further one counts up")
    add("--in", dest="input", metavar="FILE", help='prompts, one {"prompt": TEXT} a line; may have "max_tokens"')
    add("--out", metavar="FILE", help="for --in: the same lines with text, tokens and why it stopped")
    add("--batch", type=int, default=8, metavar="N", help="texts at once, of samples or prompts (default: 8)")
    parsed = parser.parse(arguments)
    for name in ("samples", "batch"):
        value = getattr(parsed, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} must be 1 or more, found {value}")
    check_writing(parsed.max_tokens, parsed.seed, parsed.stop)
    if bool(parsed.input) != bool(parsed.out):
        raise UsageError("--in FILE.jsonl and --out FILE.jsonl go together")
    if sum(given is not None for given in (parsed.prompt, parsed.prompt_file, parsed.input)) > 1:
        raise UsageError("expected one of --prompt, --prompt-file and --in, found several")
    if parsed.input and parsed.samples is not None:
        raise UsageError("--samples is not for --in: repeat the lines")
    parsed.samples = parsed.samples or 1
    return parsed


def prompt_of(parsed: argparse.Namespace) -> str:
    if parsed.prompt_file is None:
        return parsed.prompt or ""
    where = "standard input" if parsed.prompt_file == "-" else parsed.prompt_file
    try:
        content = sys.stdin.buffer.read() if parsed.prompt_file == "-" else Path(parsed.prompt_file).read_bytes()
        return content.decode()
    except OSError as error:
        raise storage_error(error, f"reading {where}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: expected UTF-8, found something else at byte {error.start}") from None


def write_terminal(
    decoder: Decoder, model: LoadedModel, texts: list[Continuation], prompt: str, stops: Sequence[str]
) -> None:
    """One sample after the other, the prompt before each. The first is streamed; what the others have by then follows."""
    waiting = {id(text): "" for text in texts}  # what each has that was not shown yet
    current = iter(texts)

    def start(text: Continuation) -> None:
        heading = f"--- sample {len(texts) - len(waiting) + 1}, seed {text.seed}\n" if len(texts) > 1 else ""
        sys.stdout.write(heading + prompt + waiting[id(text)])

    shown = next(current)
    start(shown)
    for text, piece in stream_text(decoder, model.tokenizer, iter(texts), stops):
        if text is not shown:
            waiting[id(text)] += piece
            continue
        sys.stdout.write(piece)
        while shown.stopped:
            sys.stdout.write("\n")
            del waiting[id(shown)]
            if not waiting:
                break
            shown = next(current)
            start(shown)
        sys.stdout.flush()


def write_file(
    decoder: Decoder, model: LoadedModel, texts: list[Continuation], prompts: list[dict], parsed: argparse.Namespace
) -> None:
    """A line for every prompt, with progress on stderr."""
    places = {id(text): place for place, text in enumerate(texts)}
    pieces: list[list[str]] = [[] for _ in texts]
    done, last = 0, time.perf_counter()
    with whole_lines(Path(parsed.out)) as write:
        for text, piece in stream_text(decoder, model.tokenizer, iter(texts), parsed.stop):
            place = places[id(text)]
            pieces[place].append(piece)
            if text.stopped:
                added = {"text": "".join(pieces[place]), "stopped": text.stopped, "tokens": len(text.tokens)}
                write(place, prompts[place] | added)
                done += 1
            if time.perf_counter() - last > PROGRESS_SECONDS:
                last = time.perf_counter()
                print(f"{done} of {len(texts)} prompts, {sum(len(t.tokens) for t in texts)} tokens", file=sys.stderr)


def speed_line(texts: list[Continuation], seconds: float) -> str:
    tokens = sum(len(text.tokens) for text in texts)
    return f"{tokens} tokens in {seconds:.1f} s: {tokens / max(seconds, 1e-9):.0f} tokens/s"
