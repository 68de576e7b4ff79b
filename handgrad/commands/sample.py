"""handgrad sample: text from a checkpoint, streamed, or a file of prompts answered in a batch."""

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from handgrad import devices
from handgrad.backend import choose_backend
from handgrad.errors import DataError, UsageError, storage_errors
from handgrad.evaluation.load import LoadedModel, load_model
from handgrad.files import check_free
from handgrad.generation.decode import decode_buffers, decode_tensors
from handgrad.generation.generate import Continuation, Decoder, SamplingOptions, check_writing
from handgrad.generation.prompts import read_prompts, whole_lines
from handgrad.generation.text import cropped, document, stream_text
from handgrad.interop.sources import open_weights

PROGRESS_SECONDS = 5  # between two lines of progress


def run(parsed: Namespace) -> int:
    check_writing(parsed.max_tokens, parsed.seed, parsed.stop)
    if bool(parsed.input) != bool(parsed.out):
        raise UsageError("--in FILE.jsonl and --out FILE.jsonl go together")
    if sum(given is not None for given in (parsed.prompt, parsed.prompt_file, parsed.input)) > 1:
        raise UsageError("expected one of --prompt, --prompt-file and --in, found several")
    if parsed.input and parsed.samples is not None:
        raise UsageError("--samples is not for --in: repeat the lines")
    options = SamplingOptions(parsed.temperature, parsed.top_k, parsed.top_p, parsed.min_p, parsed.repetition_penalty)
    prompts = read_prompts(Path(parsed.input)) if parsed.input else [{"prompt": prompt_of(parsed)}] * (parsed.samples or 1)
    if parsed.out:
        check_free(Path(parsed.out))
    batch = min(parsed.batch, len(prompts))
    device = devices.resolve_device(parsed.device)
    precision = devices.settled_precision(parsed.precision, device)
    dtype = devices.use_precision(device, precision)
    ops = choose_backend(parsed.backend, device, precision)
    weights = open_weights(parsed.checkpoint)
    model = load_model(weights, device, dtype, ops, decode_buffers(weights.shape, batch, dtype, ops))
    texts = []
    for number, row in enumerate(prompts):
        most_tokens = row.get("max_tokens", parsed.max_tokens)
        texts.append(Continuation(document(model.tokenizer, row["prompt"]), most_tokens, parsed.seed + number))
    if note := cropped(texts, model.shape.sequence_length):
        print(note, file=sys.stderr)
    buf, end_of_text = decode_tensors(model.shape, model.views), model.tokenizer.end_of_text
    decoder = Decoder(model.shape, ops, model.weights, buf, options, end_of_text=end_of_text)
    started = time.perf_counter()
    if parsed.out:
        write_file(decoder, model, texts, prompts, parsed)
    else:
        write_terminal(decoder, model, texts, prompts[0]["prompt"], parsed.stop)
    print(speed_line(texts, time.perf_counter() - started), file=sys.stderr)
    return 0


def prompt_of(parsed: Namespace) -> str:
    if parsed.prompt_file is None:
        return parsed.prompt or ""
    name = "standard input" if parsed.prompt_file == "-" else parsed.prompt_file
    with storage_errors(f"reading {name}"):
        content = sys.stdin.buffer.read() if parsed.prompt_file == "-" else Path(parsed.prompt_file).read_bytes()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"expected UTF-8, found other bytes at byte {error.start} of {name}; convert it") from None


def write_terminal(
    decoder: Decoder, model: LoadedModel, texts: list[Continuation], prompt: str, stops: Sequence[str]
) -> None:
    """Prints one sample after the other, the prompt before each. Streams the first; the others' text so far follows it."""
    waiting = {id(text): "" for text in texts}  # the text of each that is not shown yet
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
    decoder: Decoder, model: LoadedModel, texts: list[Continuation], prompts: list[dict], parsed: Namespace
) -> None:
    """Writes a line for every prompt, with progress on stderr."""
    numbers = {id(text): number for number, text in enumerate(texts)}
    pieces: list[list[str]] = [[] for _ in texts]
    done, last = 0, time.perf_counter()
    with whole_lines(Path(parsed.out)) as write:
        for text, piece in stream_text(decoder, model.tokenizer, iter(texts), parsed.stop):
            number = numbers[id(text)]
            pieces[number].append(piece)
            if text.stopped:
                added = {"text": "".join(pieces[number]), "stopped": text.stopped, "tokens": len(text.tokens)}
                write(number, prompts[number] | added)
                done += 1
            if time.perf_counter() - last > PROGRESS_SECONDS:
                last = time.perf_counter()
                print(f"{done} of {len(texts)} prompts, {sum(len(t.tokens) for t in texts)} tokens", file=sys.stderr)


def speed_line(texts: list[Continuation], seconds: float) -> str:
    tokens = sum(len(text.tokens) for text in texts)
    return f"{tokens} tokens in {seconds:.1f} s: {tokens / max(seconds, 1e-9):.0f} tokens/s"
