"""Tokens per second of texts: handgrad's sampling beside `transformers.generate`, each contender in a process of its own,
and the seconds until a fresh process has the first token of its first text.

All continue the same random prompts greedily with random weights of the same sizes, in the same precision, to the same
length; a call's time runs from the prompts' tokens on the host to the texts' tokens on the host. All contenders load and
compile side by side, in calls that do not count; then each makes `CALLS` calls while the others sleep, and the median
counts. handgrad makes `WARM_UPS` calls before, in which its graphs are captured.

`python -m benchmarks.decode_choices` times single steps.

    handgrad bench sampling --model d12
    python -m benchmarks.sampling Llama-3.2-1B --out h200-sampling-llama-3_2-1b.json
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.contenders import known_names
from benchmarks.llama_twin import SHAPES, sizes as family_sizes
from benchmarks.record import free_memory, keep_commit, run_main, version, write_record
from benchmarks.trainer_run import their_config
from benchmarks.turns import Peer, PeerFailed, answers, excuses, memory, say
from handgrad.generation.decode import decode_buffers, decode_tensors
from handgrad.generation.generate import Continuation, Decoder, SamplingOptions
from handgrad.machine import devices, gpus
from handgrad.machine.backend import choose_backend
from handgrad.memory.arena import Buffer, make_plan
from handgrad.memory.rows import count_parameters, flat_elements, initialize
from handgrad.models import named_weights, parameter_table
from handgrad.settings import presets
from handgrad.settings.config import ModelShape, RunConfig
from handgrad.tools.speeds import copy_bandwidth

VOCABULARY, CONTEXT = 50257, 1024
SHORT_PROMPT, LONG_PROMPT, NEW_TOKENS = 32, 512, 128
FIRST_PROMPT, FIRST_TOKENS, STARTS = 64, 900, 3  # of a fresh process, which does not count the first time
CALLS, WARM_UPS = 3, 2
CONTENDERS = ("handgrad", "transformers", "transformers-compiled")

Call = Callable[[list[list[int]]], list[list[int]]]


def sizes(model: str) -> ModelShape:
    """The shape of a preset, or of a published model in `SHAPES`."""
    if model in SHAPES:
        return RunConfig(**family_sizes(model), sequence_length=CONTEXT).shape(SHAPES[model][0])
    known = presets.model(model)
    return ModelShape(VOCABULARY, CONTEXT, known["num_layers"], known["num_heads"], known["channels"])


def cases(name: str, batches: list[int]) -> list[tuple[int, int]]:
    """(texts at once, tokens of each prompt) that a contender is timed with: a compiled peer takes a minute for each."""
    prompts = (SHORT_PROMPT, LONG_PROMPT) if name == "handgrad" else (SHORT_PROMPT,)
    if name == "transformers-compiled":
        batches = [batch for batch in batches if batch in (min(batches), max(batches))]
    return [(batch, prompt) for batch in batches for prompt in prompts]


class Handgrad:
    """Random weights, and one decoder at a time: for `batch` texts."""

    def __init__(self, shape: ModelShape, device: torch.device, precision: str):
        self.shape, self.device, self.dtype = shape, device, devices.DTYPES[precision]
        self.ops = choose_backend("auto", device, precision)
        table = parameter_table(shape)
        views = make_plan([Buffer("parameters", (flat_elements(table),), self.dtype, "parameters")]).allocate(device)
        initialize(table, 0, lambda row, values: row.stored(views["parameters"]).copy_(values))
        self.weights = named_weights(shape, views["parameters"], table)
        self.decoder: tuple[int, Decoder] | None = None

    def __call__(self, prompts: list[list[int]]) -> list[list[int]]:
        texts = [Continuation(prompt, NEW_TOKENS, 0) for prompt in prompts]
        for _ in self.decoder_of(len(prompts)).generate(texts):
            pass
        return [text.tokens for text in texts]

    def decoder_of(self, batch: int) -> Decoder:
        if self.decoder is None or self.decoder[0] != batch:
            self.forget()
            views = make_plan(decode_buffers(self.shape, batch, self.dtype, self.ops)).allocate(self.device)
            buffers, options = decode_tensors(self.shape, views), SamplingOptions(temperature=0)
            self.decoder = batch, Decoder(self.shape, self.ops, self.weights, buffers, options, end_of_text=None)
        return self.decoder[1]

    def forget(self) -> None:
        """Frees the decoder's memory for the other processes."""
        self.decoder = None
        free_memory(self.device)


def transformers_call(shape: ModelShape, device: torch.device, dtype: torch.dtype, *, compiled: bool) -> Call:
    import transformers

    model = transformers.AutoModelForCausalLM.from_config(their_config(shape)).to(device, dtype).eval()
    options: dict[str, Any] = {"cache_implementation": "static"} if compiled else {}
    length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "pad_token_id": shape.vocab_size - 1}

    def call(prompts: list[list[int]]) -> list[list[int]]:
        tokens = torch.tensor(prompts, device=device)
        whole = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, **length, **options)
        return whole[:, tokens.shape[1] :].tolist()

    return call


def contend(name: str, model: str, batches: list[int], device: torch.device, precision: str) -> None:
    """Runs one contender in this process: reports when it is ready, then answers each line, "TEXTS TOKENS", with the times
    of its calls."""
    pipe = answers()
    with excuses(pipe):
        shape, dtype = sizes(model), devices.dtype_of(device, precision)
        devices.set_arithmetic(device, precision)
        ours = Handgrad(shape, device, precision) if name == "handgrad" else None
        call = ours or transformers_call(shape, device, dtype, compiled=name == "transformers-compiled")
        for batch, tokens in cases(name, batches):
            assert [len(text) for text in call(random_prompts(shape, batch, tokens))] == [NEW_TOKENS] * batch
        if ours:
            ours.forget()
        say(pipe, {"ready": True})
        for line in sys.stdin:
            prompts = random_prompts(shape, *map(int, line.split()))
            for _ in range(WARM_UPS if ours else 0):
                call(prompts)
            seconds = []
            for _ in range(CALLS):
                begun = time.perf_counter()
                call(prompts)
                seconds.append(time.perf_counter() - begun)
            say(pipe, {"seconds_of_calls": [round(s, 4) for s in seconds], **memory(device)})


def first_text(model: str, device: torch.device, precision: str) -> None:
    """Prints, as JSON, how many seconds a fresh process takes from a prompt to its tokens; weights lie in memory before."""
    devices.set_arithmetic(device, precision)
    ours = Handgrad(sizes(model), device, precision)
    decoder = ours.decoder_of(1)
    devices.synchronize(device)
    seconds, begun = [], time.perf_counter()
    (prompt,) = random_prompts(ours.shape, 1, FIRST_PROMPT)
    for _ in decoder.generate([Continuation(prompt, FIRST_TOKENS, 0)]):
        seconds.append(time.perf_counter() - begun)
    each = (seconds[-1] - seconds[1]) / (FIRST_TOKENS - 2)
    figures = {"first_token_seconds": seconds[0], "second_token_seconds": seconds[1] - seconds[0], "seconds": seconds[-1]}
    print(json.dumps(figures | {"milliseconds_per_token_from_the_second_on": 1e3 * each}))


def first_texts(model: str, device: torch.device, precision: str) -> dict[str, float]:
    """The medians of `first_text` over fresh processes, with the compiled kernels on disk."""
    command = [sys.executable, "-m", "benchmarks.sampling", "first", model, device.type, precision]
    runs = [json.loads(subprocess.check_output(command, text=True).splitlines()[-1]) for _ in range(1 + STARTS)]
    return {name: round(statistics.median(run[name] for run in runs[1:]), 4) for name in runs[0]}


def random_prompts(shape: ModelShape, batch: int, tokens: int) -> list[list[int]]:
    return torch.randint(shape.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(0)).tolist()


def compare(model: str, batches: list[int], chosen: str, device: torch.device, precision: str, out: str) -> None:
    """Prints the table, and writes it to `out`."""
    names = known_names(chosen, list(CONTENDERS))
    bandwidth = copy_bandwidth(device)
    weight_bytes = count_parameters(parameter_table(sizes(model))) * devices.DTYPES[precision].itemsize
    limits = {"of_limit": bandwidth / weight_bytes}
    card = gpus.GPUS.get(gpus.short_name(torch.cuda.get_device_name(device))) if device.type == "cuda" else None
    if card:
        limits["of_data_sheet"] = 1e12 * card.terabytes_per_second / weight_bytes
    print(f"{model}, {precision}: {NEW_TOKENS} tokens out, greedy; {devices.describe(device)}")
    speed = f"{limits['of_limit']:.0f} tokens/s a sequence"
    print(f"reading the weights at the {bandwidth / 1e12:.2f} TB/s of a copy: {speed} at most")
    peers = {}
    for name in names:
        arguments = name, model, ",".join(map(str, batches)), device.type, precision
        peers[name] = Peer(name, [sys.executable, "-m", "benchmarks.sampling", "contend", *arguments])
    print(
        f"{'':<24}{'batch':>6}{'tokens in':>11}{'tokens/s':>12}{'ms/token':>10}{'of limit':>10}{'GB':>8}{'handgrad is':>13}"
    )
    rows: list[dict[str, Any]] = []
    try:
        ready = [name for name, peer in peers.items() if is_ready(peer)]
        wanted = {name: cases(name, batches) for name in ready}
        for case in sorted({case for cases_of_one in wanted.values() for case in cases_of_one}):
            for name in ready:
                if case in wanted[name]:
                    rows.append(measured(peers[name], *case, limits))
                    print(line_of(rows[-1], rows), flush=True)
    finally:
        for peer in peers.values():
            peer.close()
    settings = {"model": model, "new_tokens": NEW_TOKENS, "precision": precision}
    figures = {"copy_bytes_per_second": round(bandwidth), "weight_bytes": weight_bytes, "rows": rows}

    def record(**more: Any) -> None:
        if out:
            write_record(out, device, transformers=version("transformers"), **settings, **figures, **more)

    record()
    first = first_texts(model, device, precision)
    print(f"a fresh process, {FIRST_PROMPT} tokens in, {FIRST_TOKENS} out: {first}")
    record(first_text=first)


def measured(peer: Peer, batch: int, tokens: int, limits: dict[str, float]) -> dict[str, Any]:
    """A row of the table. `limits`: tokens per second of one text, at the bandwidth of a copy and of the data sheet."""
    answer = peer.ask(f"{batch} {tokens}")
    seconds = statistics.median(answer["seconds_of_calls"])
    row = {"contender": peer.name, "batch": batch, "prompt_tokens": tokens}
    row["tokens_per_second"] = round(batch * NEW_TOKENS / seconds, 1)
    row |= {"milliseconds_per_token": round(seconds * 1e3 / NEW_TOKENS, 4), **answer}
    return row | {name: round(row["tokens_per_second"] / batch / limit, 4) for name, limit in limits.items()}


def is_ready(peer: Peer) -> bool:
    try:
        peer.answer()
    except PeerFailed as failure:
        print(f"{peer.name:<24}  does not run: {failure}")
        return False
    return True


def line_of(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    same = [r for r in rows if (r["batch"], r["prompt_tokens"]) == (row["batch"], row["prompt_tokens"])]
    ours = next((r for r in same if r["contender"] == "handgrad"), None)
    times = f"{ours['tokens_per_second'] / row['tokens_per_second']:.2f}x" if ours else ""
    reserved = f"{row['reserved_bytes'] / 1e9:.1f}" if row["reserved_bytes"] else ""
    numbers = f"{row['tokens_per_second']:>12.0f}{row['milliseconds_per_token']:>10.3f}{row['of_limit']:>10.1%}"
    return f"{row['contender']:<24}{row['batch']:>6}{row['prompt_tokens']:>11}{numbers}{reserved:>8}{times:>13}"


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Tokens per second of texts, beside transformers.")
    parser.add_argument("model", choices=[*SHAPES])
    parser.add_argument("--batches", default="1,8,64", help="texts at once")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--out", default="", help="the results file")
    asked = parser.parse_args(given)
    keep_commit()
    batches, device = [int(batch) for batch in asked.batches.split(",")], devices.resolve_device(asked.device)
    compare(asked.model, batches, asked.contenders, device, asked.precision, asked.out)


if __name__ == "__main__":
    if sys.argv[1:2] == ["contend"]:
        contender, of_model, of_batches, on, in_precision = sys.argv[2:]
        batches_asked = [int(batch) for batch in of_batches.split(",")]
        contend(contender, of_model, batches_asked, devices.resolve_device(on), in_precision)
    elif sys.argv[1:2] == ["first"]:
        of_model, on, in_precision = sys.argv[2:]
        first_text(of_model, devices.resolve_device(on), in_precision)
    else:
        run_main(main)
