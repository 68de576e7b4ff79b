"""handgrad evaluate: what a checkpoint's loss is on held-out text."""

import math
import os
from argparse import Namespace
from collections.abc import Sequence

import torch

from handgrad import checkpoint, world
from handgrad.arena import Buffer
from handgrad.backend import choose_backend
from handgrad.commands.arguments import Parser, add_model_arguments
from handgrad.config import ModelShape, RunConfig
from handgrad.data.batches import Batches, host_buffers
from handgrad.data.shards import open_dataset
from handgrad.distributed.joining import joined
from handgrad.distributed.launchers import find_place
from handgrad.distributed.ranks import Ranks
from handgrad.errors import DataError, UsageError
from handgrad.evaluation.load import load_model
from handgrad.evaluation.loss import mean_loss
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
    dataset = open_dataset(folder)
    if dataset.tokenizer.sha256 != model.tokenizer.sha256:
        raise DataError(
            f"{folder} was made with another tokenizer ({dataset.tokenizer.kind}) than the model's"
            f" ({model.tokenizer.kind}); prepare the text with the model's tokenizer"
        )
    if not dataset.splits["validation"]:
        raise DataError(f"{folder} has no validation split; prepare it with --validation-fraction above 0")
    length = model.shape.sequence_length
    batches = Batches(dataset.splits["validation"], length, 0, shuffle=False)
    samples = max(1, parsed.eval_tokens // length) if parsed.eval_tokens else batches.samples_per_epoch
    act = activations(model.views)
    loss = mean_loss(
        model.ops,
        model.weights,
        act,
        batches,
        samples=samples,
        vocab_size=model.shape.vocab_size,
        host_buffers=host_buffers(act.tokens, act.targets),
        ranks=ranks,
    )
    tokens = min(samples, batches.samples_per_epoch) * length
    lines = [
        f"checkpoint        {parsed.checkpoint} (step {model.step})",
        f"validation tokens {tokens} of {dataset.tokens('validation')} in {folder}",
        f"loss              {loss:.4f} nats per token",
        f"perplexity        {math.exp(min(loss, 700)):.2f}",
    ]
    if dataset.manifest and (text_bytes := dataset.manifest["splits"]["validation"]["text_bytes"]):
        lines.append(f"bits per byte     {loss / math.log(2) * dataset.tokens('validation') / text_bytes:.4f}")
    if floor := dataset.floor("validation"):
        lines.append(f"source's entropy  {floor:.4f} nats per token; the loss is {loss / floor - 1:+.1%}")
    return lines
