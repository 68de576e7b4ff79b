"""handgrad evaluate: what a checkpoint's loss is on held-out text."""

import os
from argparse import Namespace
from collections.abc import Sequence

import torch

from handgrad import checkpoint, world
from handgrad.arena import Buffer
from handgrad.backend import choose_backend
from handgrad.commands.arguments import Parser, add_model_arguments
from handgrad.config import ModelShape, RunConfig
from handgrad.distributed.joining import joined
from handgrad.distributed.launchers import find_place
from handgrad.distributed.ranks import Ranks
from handgrad.errors import UsageError
from handgrad.evaluation.held_out import held_out_loss, open_held_out
from handgrad.evaluation.load import load_model
from handgrad.model.activations import activations, model_buffers


def run(arguments: Sequence[str]) -> int:
    parser = Parser("handgrad evaluate", description="Loss of a checkpoint on a validation split.")
    add_model_arguments(parser)
    parser.add_argument("--data", default="", metavar="DIR", help="prepared shards (default: those of the run)")
    parser.add_argument("--eval-tokens", type=int, default=0, metavar="N", help="tokens (default: the whole split)")
    parser.add_argument("--micro-batch", type=int, default=8, metavar="N", help="samples at once (default: 8)")
    parsed = parser.parse(arguments)
    if parsed.eval_tokens < 0 or parsed.micro_batch < 1:
        raise UsageError("--eval-tokens must be 0 or more and --micro-batch 1 or more")
    place = find_place(os.environ)
    device = world.resolve_device(parsed.device, place.local_rank)
    with joined(place, device, RunConfig()) as ranks:
        lines = evaluate(parsed, device, ranks)
    if ranks.leads:
        print("\n".join(lines))
    return 0


def evaluate(parsed: Namespace, device: torch.device, ranks: Ranks) -> list[str]:
    """What there is to say, from the share of each of the `ranks`."""
    dtype = world.use_precision(device, parsed.precision)
    ops = choose_backend(parsed.backend, device)

    def buffers(config: RunConfig, shape: ModelShape) -> list[Buffer]:
        return model_buffers(config, shape, parsed.micro_batch, dtype, ops, training=False)

    model = load_model(checkpoint.find(parsed.checkpoint), device, dtype, ops, buffers)
    folder = parsed.data or model.config.data
    if not folder:
        raise UsageError(f"{parsed.checkpoint} was imported and knows no data; give --data DIR, of the model's tokenizer")
    dataset = open_held_out(folder, model.tokenizer)
    found = held_out_loss(
        model.ops,
        model.weights,
        activations(model.views),
        dataset,
        vocab_size=model.shape.vocab_size,
        eval_tokens=parsed.eval_tokens,
        ranks=ranks,
    )
    lines = [
        f"checkpoint        {parsed.checkpoint} (step {model.step})",
        f"validation tokens {found.tokens} of {dataset.tokens('validation')} in {folder}",
        f"loss              {found.loss:.4f} nats per token",
        f"perplexity        {found.perplexity:.2f}",
    ]
    if found.bits_per_byte is not None:
        lines.append(f"bits per byte     {found.bits_per_byte:.4f}")
    if floor := dataset.floor("validation"):
        lines.append(f"source's entropy  {floor:.4f} nats per token; the loss is {found.loss / floor - 1:+.1%}")
    return lines
