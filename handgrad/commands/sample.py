"""handgrad sample: text from a checkpoint, streamed, or continuations of a file of prompts, in batches."""

import contextlib
import hashlib
import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import handgrad
from handgrad.commands.chat import sampling_options
from handgrad.data import canvas
from handgrad.data.codes import codes_of
from handgrad.errors import DataError, UsageError, storage_errors
from handgrad.evaluation.codec import view_of
from handgrad.evaluation.load import LoadedModel, Machine, Weights, load_model, machine
from handgrad.files import check_replaceable, check_writable, write_bytes_durably
from handgrad.generation.chat import listed_ends
from handgrad.generation.decode import decode_buffers, decode_tensors, with_cache
from handgrad.generation.generate import (
    Continuation,
    Decoder,
    SamplingOptions,
    check_writing,
    cropped,
    document,
    stream_text,
)
from handgrad.generation.pictures import decoder_of, form_of, picture_prompt, read_sheet, tokens_left
from handgrad.generation.prompts import read_prompts, whole_lines
from handgrad.interop.sources import open_weights
from handgrad.machine import devices
from handgrad.run.console import output_wrap

PROGRESS_SECONDS = 5  # between two lines of progress
MAX_TOKENS = 200


def run(parsed: Namespace) -> int:
    limited = parsed.max_tokens is not None
    parsed.max_tokens = parsed.max_tokens if limited else MAX_TOKENS
    check_flags(parsed)
    options = sampling_options(parsed)
    prompts = read_prompts(Path(parsed.input)) if parsed.input else [{"prompt": prompt_of(parsed)}] * (parsed.samples or 1)
    if parsed.out:
        check_writable(Path(parsed.out))
    if parsed.image_out:
        if not parsed.image_out.lower().endswith(".png"):
            raise UsageError(f"--image-out writes PNG, found {parsed.image_out}; name a FILE.png")
        check_replaceable(Path(parsed.image_out), "--image-out")
    batch = min(parsed.batch, len(prompts))
    on = machine(devices.resolve_device(parsed.device), parsed.precision, parsed.backend)
    weights = open_weights(parsed.checkpoint, strict=parsed.strict)
    draws = bool(parsed.image_out or parsed.image_in or parsed.of_class) or codes_of(weights.tokenizer) is not None
    if draws and (parsed.stop or (limited and not parsed.input)):
        raise UsageError("--stop and --max-tokens end a text, found one with a model of pictures; leave it out")
    if draws and not parsed.input:
        codes = form_of(weights.tokenizer)
        asked = prompts[0]["prompt"], parsed.of_class, parsed.image_in, parsed.rows
        begun: dict[str, Any] = {"prompt": picture_prompt(codes, view_of(codes), *asked)}
        begun["max_tokens"] = tokens_left(codes, begun["prompt"], weights.shape.sequence_length)
        prompts = [begun] * len(prompts)
    with contextlib.ExitStack() as opened:
        written, write = {}, None
        if parsed.out:
            identity = identity_of(prompts, weights, parsed, options, on, batch)
            written, write = opened.enter_context(whole_lines(Path(parsed.out), identity))
        texts = []
        for number, row in enumerate(prompts):
            most_tokens = row.get("max_tokens", parsed.max_tokens)
            texts.append(Continuation(document(weights.tokenizer, row["prompt"]), most_tokens, parsed.seed + number))
        longest = max(len(text.prompt) + text.max_tokens for text in texts)
        model, decoder = load_decoder(weights, on, options, batch, longest)
        if note := cropped(texts, model.shape.sequence_length):
            print(note, file=sys.stderr)
        started = time.perf_counter()
        if write is None and draws:
            write_pictures(decoder, model, texts, prompts, parsed.image_out)
        elif write is None:
            write_terminal(decoder, model, texts, prompts[0]["prompt"], parsed.stop)
        else:
            if written:
                print(f"resumes after {len(written)} of {len(prompts)} prompts", file=sys.stderr)
            left = {number: text for number, text in enumerate(texts) if number not in written}
            write_lines(decoder, model, left, prompts, parsed.stop, write)
    seconds, tokens = time.perf_counter() - started, sum(len(text.tokens) for text in texts)
    print(f"{tokens} tokens in {seconds:.1f} s: {tokens / max(seconds, 1e-9):.0f} tokens/s", file=sys.stderr)
    return 0


def check_flags(parsed: Namespace) -> None:
    """Raises `UsageError` for flags that contradict each other, or are out of range."""
    check_writing(parsed.max_tokens, parsed.seed, parsed.stop)
    if bool(parsed.input) != bool(parsed.out):
        raise UsageError("--in FILE.jsonl and --out FILE.jsonl go together")
    if sum(source is not None for source in (parsed.prompt, parsed.prompt_file, parsed.input)) > 1:
        raise UsageError("expected one of --prompt, --prompt-file and --in, found several")
    if parsed.input and parsed.samples is not None:
        raise UsageError("--samples is not for --in: repeat the lines")
    if parsed.rows is not None and not parsed.image_in:
        raise UsageError("--rows goes with --image-in, found it without; leave it out")
    if parsed.input and (parsed.image_out or parsed.image_in or parsed.of_class):
        raise UsageError("--image-out, --image-in and --class are not for --in; use --samples")


def load_decoder(
    weights: Weights, on: Machine, options: SamplingOptions, batch: int, longest: int
) -> tuple[LoadedModel, Decoder]:
    """The model, and a decoder for `batch` texts at a time of up to `longest` tokens, or `DataError`: too little memory."""
    buffers = decode_buffers(with_cache(weights.shape, longest), batch, on.dtype, on.ops)
    model = load_model(weights, on.device, on.dtype, on.ops, buffers)
    about = model.shape, on.ops, model.weights, decode_tensors(model.shape, model.views), options
    ends = {"end_of_text": model.tokenizer.end_of_text, "ends": listed_ends(model.tokenizer)}
    return model, decoder_of(model.tokenizer, *about, **ends)


def identity_of(
    prompts: list[dict], weights: Weights, parsed: Namespace, options: SamplingOptions, on: Machine, batch: int
) -> dict[str, Any]:
    """Everything that the texts for a file of prompts depend on. `batch`: texts at a time."""
    return {
        "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        "weights": weights.origin["sha256"],
        **asdict(options),
        "max_tokens": parsed.max_tokens,
        "stop": parsed.stop,
        "seed": parsed.seed,
        "precision": on.precision,
        "device": on.device.type,
        "backend": on.ops.__name__,
        "batch": batch,
        "versions": [handgrad.__version__, torch.__version__],
    }


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
    """Prints the samples in order, each after its prompt. Streams the first unfinished one; the others wait."""
    waiting = {
        id(text): f"--- sample {n}, seed {text.seed}\n" * (len(texts) > 1) + prompt for n, text in enumerate(texts, 1)
    }
    left, wrap = list(texts), output_wrap()
    for text, piece in stream_text(decoder, model.tokenizer, iter(texts), stops):
        waiting[id(text)] += piece
        while left:
            sys.stdout.write(wrap.feed(waiting[id(left[0])]))
            waiting[id(left[0])] = ""
            if not left[0].stopped:
                break
            sys.stdout.write(wrap.feed("", ends=True) + "\n")
            left, wrap = left[1:], output_wrap()
        sys.stdout.flush()


def write_pictures(decoder: Decoder, model: LoadedModel, texts: list[Continuation], prompts: list[dict], path: str) -> None:
    """Prints a line about each picture. Writes them as a grid to `path`; without one, draws them on a terminal."""
    pieces = {id(text): [row["prompt"]] for text, row in zip(texts, prompts, strict=True)}
    for text, piece in stream_text(decoder, model.tokenizer, iter(texts)):
        pieces[id(text)].append(piece)
    codes = form_of(model.tokenizer)
    lines, pictures = read_sheet(["".join(each) for each in pieces.values()], codes, view_of(codes))
    for line, picture in zip(lines, pictures, strict=True):
        print(line)
        if not path and sys.stdout.isatty():
            print(canvas.blocks(picture))
    if path:
        with storage_errors(f"writing {path}"):
            write_bytes_durably(Path(path), canvas.png(canvas.enlarged(canvas.grid(pictures))))
        print(f"pictures   {path}")
    elif not sys.stdout.isatty():
        print("pictures   not drawn, as this is no terminal; --image-out FILE.png writes them", file=sys.stderr)


def write_lines(
    decoder: Decoder,
    model: LoadedModel,
    texts: dict[int, Continuation],
    prompts: list[dict],
    stops: Sequence[str],
    write: Callable[[int, dict], None],
) -> None:
    """Writes a line for every finished text, with the number of its prompt; prints progress on stderr."""
    numbers = {id(text): number for number, text in texts.items()}
    pieces: dict[int, list[str]] = {number: [] for number in texts}
    done, last = len(prompts) - len(texts), time.perf_counter()
    for text, piece in stream_text(decoder, model.tokenizer, iter(texts.values()), stops):
        number = numbers[id(text)]
        pieces[number].append(piece)
        if text.stopped:
            added = {"text": "".join(pieces[number]), "stopped": text.stopped, "tokens": len(text.tokens)}
            write(number, prompts[number] | added)
            done += 1
        if time.perf_counter() - last > PROGRESS_SECONDS:
            last, tokens = time.perf_counter(), sum(len(text.tokens) for text in texts.values())
            print(f"{done} of {len(prompts)} prompts, {tokens} tokens", file=sys.stderr)
