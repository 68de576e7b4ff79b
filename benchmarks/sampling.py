"""Texts per second: handgrad's sampling beside `transformers.generate`, in one run, each contender in a process of its own.

All continue the same random prompts greedily with random weights of the same sizes, in the same precision, to the same
length; a call's time is everything from the prompts' tokens on the host to the texts' tokens on the host. Each contender
makes a call that does not count (it loads, compiles and records), then `CALLS` that do, of which the median is taken.

    handgrad bench sampling --model d12
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.record import ROOT, write_record
from handgrad import presets, world
from handgrad.arena import Buffer, make_plan
from handgrad.backend import choose_backend
from handgrad.config import ModelShape
from handgrad.errors import UsageError
from handgrad.evaluation.decode import decode_buffers, decode_tensors
from handgrad.evaluation.generate import Continuation, Decoder, SamplingOptions
from handgrad.model.parameters import count_parameters, flat_elements, initialize, model_tensors, parameter_table
from handgrad.profile import copy_bandwidth

VOCABULARY, CONTEXT = 50257, 1024
PROMPT_TOKENS, NEW_TOKENS = 32, 256
CALLS = 3
CONTENDERS = ("handgrad", "transformers", "transformers-compiled")
PATIENCE_SECONDS = 400  # for a contender, its compiler included

Call = Callable[[list[list[int]]], list[list[int]]]


def sizes(model: str) -> ModelShape:
    known = presets.model(model)
    return ModelShape(VOCABULARY, CONTEXT, known["num_layers"], known["num_heads"], known["channels"])


def handgrad_call(shape: ModelShape, batch: int, device: torch.device, dtype: torch.dtype) -> Call:
    ops, table = choose_backend("auto", device), parameter_table(shape)
    parameters = Buffer("parameters", (flat_elements(table),), dtype, "parameters")
    views = make_plan([parameters, *decode_buffers(shape, batch, dtype, ops)]).allocate(device)
    initialize(table, 0, lambda row, values: row.stored(views["parameters"]).copy_(values))
    weights = model_tensors(views["parameters"], table)
    options = SamplingOptions(temperature=0)
    decoder = Decoder(ops, weights, decode_tensors(views), options, vocab_size=shape.vocab_size, end_of_text=None)

    def call(prompts: list[list[int]]) -> list[list[int]]:
        texts = [Continuation(prompt, NEW_TOKENS, 0) for prompt in prompts]
        for _ in decoder.generate(texts):
            pass
        return [text.tokens for text in texts]

    return call


def transformers_call(shape: ModelShape, device: torch.device, dtype: torch.dtype, *, compiled: bool) -> Call:
    import transformers

    config = transformers.GPT2Config(
        n_layer=shape.num_layers,
        n_head=shape.num_heads,
        n_embd=shape.channels,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    model = transformers.GPT2LMHeadModel(config).to(device, dtype).eval()
    options: dict[str, Any] = {"cache_implementation": "static"} if compiled else {}
    length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "pad_token_id": VOCABULARY - 1}

    def call(prompts: list[list[int]]) -> list[list[int]]:
        tokens = torch.tensor(prompts, device=device)
        whole = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, **length, **options)
        return whole[:, tokens.shape[1] :].tolist()

    return call


def measure(name: str, model: str, batch: int, device: torch.device, precision: str) -> dict[str, Any]:
    """One contender, in this process."""
    shape, dtype = sizes(model), world.use_precision(device, precision)
    begun = time.perf_counter()
    if name == "handgrad":
        call = handgrad_call(shape, batch, device, dtype)
    else:
        call = transformers_call(shape, device, dtype, compiled=name == "transformers-compiled")
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(shape.vocab_size, (batch, PROMPT_TOKENS), generator=generator).tolist()
    first = call(prompts)
    assert [len(text) for text in first] == [NEW_TOKENS] * batch
    ready_seconds, seconds = time.perf_counter() - begun, []
    for _ in range(CALLS):
        begun = time.perf_counter()
        call(prompts)
        seconds.append(time.perf_counter() - begun)
    middle = statistics.median(seconds)
    return {
        "contender": name,
        "model": model,
        "batch": batch,
        "tokens_per_second": round(batch * NEW_TOKENS / middle, 1),
        "milliseconds_per_token": round(middle * 1e3 / NEW_TOKENS, 4),
        "ready_seconds": round(ready_seconds, 1),
        "seconds_of_calls": [round(s, 4) for s in seconds],
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device.type == "cuda" else None,
    }


def compare(model: str, batches: list[int], names: list[str], device: torch.device, precision: str, out: str) -> None:
    """Prints the table, and writes it to `out`."""
    unknown = sorted(set(names) - set(CONTENDERS))
    if unknown:
        raise UsageError(f"unknown contender {unknown[0]!r}; there are {', '.join(CONTENDERS)}")
    bandwidth = copy_bandwidth(device)
    weight_bytes = count_parameters(parameter_table(sizes(model))) * world.DTYPES[precision].itemsize
    limit = bandwidth / weight_bytes
    print(f"{model}, {precision}: {PROMPT_TOKENS} tokens in, {NEW_TOKENS} out, greedy; {world.describe(device)}")
    print(f"reading the weights at the {bandwidth / 1e12:.2f} TB/s of a copy: {limit:.0f} tokens/s a sequence at most")
    print(f"{'':<24}{'batch':>6}{'tokens/s':>12}{'ms/token':>10}{'of limit':>10}{'ready after, s':>16}{'handgrad is':>13}")
    rows = []
    for batch in batches:
        ours = None
        for name in names:
            command = [sys.executable, "-m", "benchmarks.sampling", name, model, str(batch), device.type, precision]
            try:
                process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                print(f"{name:<24}{batch:>6}  not ready after {PATIENCE_SECONDS} s")
                continue
            if process.returncode:
                print(f"{name:<24}{batch:>6}  failed: {(process.stderr.strip().splitlines() or ['no word'])[-1]:.200}")
                continue
            row = json.loads(process.stdout.splitlines()[-1])
            ours = row["tokens_per_second"] if name == "handgrad" else ours
            row["of_limit"] = round(row["tokens_per_second"] / batch / limit, 4)
            row["handgrad_is"] = round(ours / row["tokens_per_second"], 2) if ours else None
            rows.append(row)
            times = f"{row['handgrad_is']:.2f}x" if row["handgrad_is"] else ""
            numbers = f"{row['tokens_per_second']:>12.0f}{row['milliseconds_per_token']:>10.3f}{row['of_limit']:>10.1%}"
            print(f"{name:<24}{batch:>6}{numbers}{row['ready_seconds']:>16.1f}{times:>13}", flush=True)
    if out:
        import transformers

        settings = {"prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "precision": precision}
        figures = {"copy_bytes_per_second": round(bandwidth), "weight_bytes": weight_bytes, "rows": rows}
        write_record(out, device, transformers=transformers.__version__, **settings, **figures)


if __name__ == "__main__":
    contender, of_model, of_batch, on, in_precision = sys.argv[1:]
    print(json.dumps(measure(contender, of_model, int(of_batch), world.resolve_device(on), in_precision)))
