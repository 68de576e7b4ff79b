"""handgrad plan: what a run will take, from the same arguments as train."""

from collections.abc import Sequence
from pathlib import Path

from handgrad.commands.arguments import Parser, add_run_arguments, run_config
from handgrad.data.shards import open_dataset
from handgrad.errors import UsageError
from handgrad.tools.plan import describe_plan

GPT2_VOCABULARY = 50257


def run(arguments: Sequence[str]) -> int:
    parser = Parser("handgrad plan", description="Memory, tokens and operations of a run, without starting it.")
    add_run_arguments(parser)
    parser.add_argument("--vocab-size", type=int, metavar="N", help="words (default: those of --data, or GPT-2's)")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="processes that will train together (default: 1)")
    parsed = parser.parse(arguments)
    config = run_config(parsed)
    vocab_size = parsed.vocab_size
    if vocab_size is None:
        vocab_size = open_dataset(config.data).tokenizer.vocab_size if Path(config.data).exists() else GPT2_VOCABULARY
    if vocab_size < 1:
        raise UsageError(f"--vocab-size must be at least 1, found {vocab_size}")
    if parsed.ranks < 1:
        raise UsageError(f"--ranks must be at least 1, found {parsed.ranks}")
    print("\n".join(describe_plan(config, vocab_size, parsed.ranks)))
    return 0
