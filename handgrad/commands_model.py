"""The commands that use a trained model: evaluate and sample."""

import argparse
import math
import sys
from collections.abc import Sequence

from handgrad import checkpoint, world
from handgrad.arena import Buffer
from handgrad.arguments import Parser
from handgrad.config import DEVICES, PRECISIONS, ModelShape, RunConfig
from handgrad.data.batches import Batches
from handgrad.data.shards import open_dataset
from handgrad.errors import DataError, UsageError
from handgrad.evaluation.generate import decode_buffers, decode_tensors, generate, stream_text
from handgrad.evaluation.load import LoadedModel, load_model
from handgrad.evaluation.loss import mean_loss
from handgrad.model.activations import activation_buffers, activations, head_chunk_tokens


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="run folder (its newest checkpoint) or checkpoint folder")
    parser.add_argument("--device", default="auto", choices=DEVICES, help="(default: auto)")
    parser.add_argument("--precision", default="fp32", choices=PRECISIONS, help="of weights and products (default: fp32)")


def evaluate(arguments: Sequence[str]) -> int:
    parser = Parser("handgrad evaluate", description="Loss of a checkpoint on a validation split.")
    add_model_arguments(parser)
    parser.add_argument("--data", default="", metavar="DIR", help="prepared shards (default: those of the run)")
    parser.add_argument("--eval-tokens", type=int, default=0, metavar="N", help="tokens (default: the whole split)")
    parser.add_argument("--micro-batch", type=int, default=8, metavar="N", help="samples at once (default: 8)")
    parsed = parser.parse(arguments)
    if parsed.eval_tokens < 0 or parsed.micro_batch < 1:
        raise UsageError("--eval-tokens must be 0 or more and --micro-batch 1 or more")
    device = world.resolve_device(parsed.device)
    dtype = world.use_precision(device, parsed.precision)

    def buffers(config: RunConfig, shape: ModelShape) -> list[Buffer]:
        tokens = parsed.micro_batch * shape.sequence_length
        chunk = head_chunk_tokens(config.head_chunk_tokens, tokens, shape.padded_vocab_size, dtype.itemsize)
        return activation_buffers(shape, parsed.micro_batch, shape.sequence_length, dtype, chunk=chunk, training=False)

    model = load_model(checkpoint.find(parsed.checkpoint), device, dtype, buffers)
    folder = parsed.data or model.config.data
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
    host = (act.tokens, act.targets) if device.type == "cpu" else (act.tokens.cpu(), act.targets.cpu())
    loss = mean_loss(
        model.ops, model.weights, act, batches, samples=samples, vocab_size=model.shape.vocab_size, host_buffers=host
    )
    tokens = min(samples, batches.samples_per_epoch) * length
    print(f"checkpoint        {parsed.checkpoint} (step {model.step})")
    print(f"validation tokens {tokens} of {dataset.tokens('validation')} in {folder}")
    print(f"loss              {loss:.4f} nats per token")
    print(f"perplexity        {math.exp(min(loss, 700)):.2f}")
    if dataset.manifest and (text_bytes := dataset.manifest["splits"]["validation"]["text_bytes"]):
        print(f"bits per byte     {loss / math.log(2) * dataset.tokens('validation') / text_bytes:.4f}")
    if floor := dataset.floor("validation"):
        print(f"source's entropy  {floor:.4f} nats per token; the loss is {loss / floor - 1:+.1%}")
    return 0


def sample(arguments: Sequence[str]) -> int:
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
    device = world.resolve_device(parsed.device)
    dtype = world.use_precision(device, parsed.precision)
    model = load_model(
        checkpoint.find(parsed.checkpoint), device, dtype, lambda config, shape: decode_buffers(shape, dtype)
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
