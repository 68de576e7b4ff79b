"""Tokens per second of texts: handgrad's sampling beside `transformers.generate`, each contender in a process of its own.

All continue the same random prompts greedily with random weights of the same sizes, in the same precision, to the same
length; a call's time runs from the prompts' tokens on the host to the texts' tokens on the host. All contenders load,
compile and capture side by side, in a call that does not count; then each makes `CALLS` calls while the others sleep, and
the median counts.

    handgrad bench sampling --model d12
"""

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

from benchmarks.contenders import known_names
from benchmarks.record import write_record
from benchmarks.turns import Peer, PeerFailed, answers, excuses, memory, say
from handgrad import devices, presets
from handgrad.arena import Buffer, make_plan
from handgrad.backend import choose_backend
from handgrad.config import ModelShape
from handgrad.generation.decode import decode_buffers, decode_tensors
from handgrad.generation.generate import Continuation, Decoder, SamplingOptions
from handgrad.models import named_weights, parameter_table
from handgrad.models.rows import count_parameters, flat_elements, initialize
from handgrad.tools.rates import copy_bandwidth

VOCABULARY, CONTEXT = 50257, 1024
PROMPT_TOKENS, NEW_TOKENS = 32, 128
CALLS = 3
CONTENDERS = ("handgrad", "transformers", "transformers-compiled")

Call = Callable[[list[list[int]]], list[list[int]]]


def sizes(model: str) -> ModelShape:
    known = presets.model(model)
    return ModelShape(VOCABULARY, CONTEXT, known["num_layers"], known["num_heads"], known["channels"])


def handgrad_call(shape: ModelShape, batch: int, device: torch.device, precision: str) -> Call:
    ops, dtype = choose_backend("auto", device, precision), devices.DTYPES[precision]
    table = parameter_table(shape)
    parameters = Buffer("parameters", (flat_elements(table),), dtype, "parameters")
    views = make_plan([parameters, *decode_buffers(shape, batch, dtype, ops)]).allocate(device)
    initialize(table, 0, lambda row, values: row.stored(views["parameters"]).copy_(values))
    weights = named_weights(shape, views["parameters"], table)
    options = SamplingOptions(temperature=0)
    decoder = Decoder(shape, ops, weights, decode_tensors(shape, views), options, end_of_text=None)

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
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = transformers.GPT2LMHeadModel(config).to(device, dtype).eval()
    options: dict[str, Any] = {"cache_implementation": "static"} if compiled else {}
    length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "pad_token_id": VOCABULARY - 1}

    def call(prompts: list[list[int]]) -> list[list[int]]:
        tokens = torch.tensor(prompts, device=device)
        whole = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, **length, **options)
        return whole[:, tokens.shape[1] :].tolist()

    return call


def contend(name: str, model: str, batch: int, device: torch.device, precision: str) -> None:
    """Runs one contender in this process: reports when it is ready, then answers each line with its calls' times."""
    pipe = answers()
    with excuses(pipe):
        shape, dtype = sizes(model), devices.use_precision(device, precision)
        if name == "handgrad":
            call = handgrad_call(shape, batch, device, precision)
        else:
            call = transformers_call(shape, device, dtype, compiled=name == "transformers-compiled")
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(shape.vocab_size, (batch, PROMPT_TOKENS), generator=generator).tolist()
        assert [len(text) for text in call(prompts)] == [NEW_TOKENS] * batch
        say(pipe, {"ready": True})
        for _ in sys.stdin:
            seconds = []
            for _ in range(CALLS):
                begun = time.perf_counter()
                call(prompts)
                seconds.append(time.perf_counter() - begun)
            say(pipe, {"seconds_of_calls": [round(s, 4) for s in seconds], **memory(device)})


def compare(model: str, batches: list[int], chosen: str, device: torch.device, precision: str, out: str) -> None:
    """Prints the table, and writes it to `out`."""
    names = known_names(chosen, list(CONTENDERS))
    bandwidth = copy_bandwidth(device)
    weight_bytes = count_parameters(parameter_table(sizes(model))) * devices.DTYPES[precision].itemsize
    limit = bandwidth / weight_bytes
    print(f"{model}, {precision}: {PROMPT_TOKENS} tokens in, {NEW_TOKENS} out, greedy; {devices.describe(device)}")
    print(f"reading the weights at the {bandwidth / 1e12:.2f} TB/s of a copy: {limit:.0f} tokens/s a sequence at most")
    peers = {}
    for batch, name in itertools.product(batches, names):
        arguments = name, model, str(batch), device.type, precision
        peers[batch, name] = Peer(name, [sys.executable, "-m", "benchmarks.sampling", *arguments])
    print(f"{'':<24}{'batch':>6}{'tokens/s':>12}{'ms/token':>10}{'of limit':>10}{'GB':>8}{'handgrad is':>13}")
    rows: list[dict[str, Any]] = []
    try:
        ready = {key: is_ready(peer) for key, peer in peers.items()}
        for (batch, name), peer in peers.items():
            if ready[batch, name]:
                answer = peer.ask("go")
                seconds = statistics.median(answer["seconds_of_calls"])
                row = {"contender": name, "batch": batch, "tokens_per_second": round(batch * NEW_TOKENS / seconds, 1)}
                row |= {"milliseconds_per_token": round(seconds * 1e3 / NEW_TOKENS, 4), **answer}
                rows.append(row | {"of_limit": round(row["tokens_per_second"] / batch / limit, 4)})
                print(line_of(rows[-1], rows), flush=True)
    finally:
        for peer in peers.values():
            peer.close()
    if out:
        settings = {"model": model, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "precision": precision}
        figures = {"copy_bytes_per_second": round(bandwidth), "weight_bytes": weight_bytes, "rows": rows}
        write_record(out, device, transformers=version("transformers"), **settings, **figures)


def is_ready(peer: Peer) -> bool:
    try:
        peer.answer()
    except PeerFailed as failure:
        print(f"{peer.name:<24}  does not run: {failure}")
        return False
    return True


def line_of(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    ours = next((r for r in rows if r["contender"] == "handgrad" and r["batch"] == row["batch"]), None)
    times = f"{ours['tokens_per_second'] / row['tokens_per_second']:.2f}x" if ours else ""
    reserved = f"{row['reserved_bytes'] / 1e9:.1f}" if row["reserved_bytes"] else ""
    numbers = f"{row['tokens_per_second']:>12.0f}{row['milliseconds_per_token']:>10.3f}{row['of_limit']:>10.1%}"
    return f"{row['contender']:<24}{row['batch']:>6}{numbers}{reserved:>8}{times:>13}"


if __name__ == "__main__":
    contender, of_model, of_batch, on, in_precision = sys.argv[1:]
    contend(contender, of_model, int(of_batch), devices.resolve_device(on), in_precision)
