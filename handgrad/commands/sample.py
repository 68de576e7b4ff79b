"""handgrad sample: text from a checkpoint, streamed."""

import argparse
import math
import sys
from collections.abc import Sequence

from handgrad import checkpoint, world
from handgrad.backend import choose_backend
from handgrad.commands.arguments import Parser, add_model_arguments
from handgrad.errors import UsageError
from handgrad.evaluation.generate import decode_buffers, decode_tensors, generate, stream_text
from handgrad.evaluation.load import LoadedModel, load_model


def run(arguments: Sequence[str]) -> int:
    parser = Parser("handgrad sample", description="Writes text, token by token.")
    add_model_arguments(parser)
    parser.add_argument("--prompt", default="", metavar="TEXT", help="the beginning (default: a new document)")
    parser.add_argument("--max-tokens", type=int, default=200, metavar="N", help="longest sample (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0 is greedy (default: 0.8)")
    parser.add_argument("--top-k", type=int, default=0, metavar="N", help="only the N likeliest tokens (0: all)")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="how many (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the first sample; each further one counts up")
    parsed = parser.parse(arguments)
    if not 0 <= parsed.temperature < math.inf or parsed.max_tokens < 1 or parsed.top_k < 0 or parsed.samples < 1:
        raise UsageError("--temperature and --top-k must be 0 or more, --max-tokens and --samples 1 or more")
    if not 0 <= parsed.seed < 1 << 32:
        raise UsageError(f"--seed must be at least 0 and below 2^32, found {parsed.seed}")
    device = world.resolve_device(parsed.device)
    dtype = world.use_precision(device, parsed.precision)
    ops = choose_backend(parsed.backend, device)
    model = load_model(
        checkpoint.find(parsed.checkpoint), device, dtype, ops, lambda config, shape: decode_buffers(shape, dtype, ops)
    )
    for number in range(parsed.samples):
        if parsed.samples > 1:
            print(f"--- sample {number + 1}, seed {parsed.seed + number}")
        write_sample(model, parsed, parsed.seed + number)
    return 0


def write_sample(model: LoadedModel, parsed: argparse.Namespace, seed: int) -> None:
    """Streams one text to stdout, the prompt first. A new document starts with end-of-text, as in training."""
    prompt = [model.tokenizer.end_of_text, *model.tokenizer.encode(parsed.prompt).tolist()]
    ids = generate(
        model.ops,
        model.weights,
        decode_tensors(model.views),
        prompt,
        vocab_size=model.shape.vocab_size,
        max_tokens=parsed.max_tokens,
        temperature=parsed.temperature,
        top_k=parsed.top_k,
        seed=seed,
    )
    sys.stdout.write(parsed.prompt)
    for text in stream_text(model.tokenizer, ids):
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n")
