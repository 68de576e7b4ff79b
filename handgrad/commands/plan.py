"""handgrad plan: memory, tokens and operations of a run, from the same arguments as train."""

from argparse import Namespace
from pathlib import Path

from handgrad.config import GPT2_VOCABULARY
from handgrad.data.shards import open_dataset
from handgrad.tools.plan import describe_plan


def run(parsed: Namespace) -> int:
    config, vocab_size = parsed.run_config, parsed.vocab_size
    if vocab_size is None:
        vocab_size = open_dataset(config.data).tokenizer.vocab_size if Path(config.data).exists() else GPT2_VOCABULARY
    print("\n".join(describe_plan(config, vocab_size, parsed.ranks)))
    return 0
