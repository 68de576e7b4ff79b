"""handgrad import: weights from another program, as a checkpoint to evaluate, sample or start from."""

import shlex
from argparse import Namespace
from pathlib import Path

from handgrad.evaluation.load import is_taught_to_talk
from handgrad.interop.sources import import_model
from handgrad.memory.rows import count_parameters
from handgrad.models import parameter_table


def run(parsed: Namespace) -> int:
    out = Path(parsed.out)
    imported = import_model(parsed.source, out, parsed.tokenizer, parsed.base)
    shape = imported.shape
    print(f"source     {Path(parsed.source)}")
    print(
        f"model      {shape.variant}{shape.num_layers} layers, {shape.num_heads} heads, {shape.channels} channels, context"
        f" {shape.sequence_length}: {count_parameters(parameter_table(shape)):,} parameters,"
        f" {imported.tokenizer.kind} vocabulary of {shape.vocab_size}"
    )
    print(f"written    {out}")
    name, talks = shlex.quote(str(out)), is_taught_to_talk(imported.tokenizer, imported.checkpoint)
    tries, file = ("chat", "--chat FILE") if talks else ("sample", "FILE")
    print(f"next       handgrad {tries} {name}   or, to finetune it:   handgrad prepare {file} --tokenizer {name}")
    return 0
