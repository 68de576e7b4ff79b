"""handgrad import: weights from another program, as a checkpoint to evaluate, sample or start from."""

import shlex
from argparse import Namespace
from pathlib import Path

from handgrad.commands.parser import flag
from handgrad.evaluation.load import is_taught_to_talk
from handgrad.interop.sources import SIZES, import_model
from handgrad.memory.rows import count_parameters
from handgrad.models import parameter_table


def run(parsed: Namespace) -> int:
    out = Path(parsed.out)
    found, state = import_model(parsed.source, out, parsed.tokenizer, parsed.optimizer, parsed.base)
    shape = found.shape
    print(f"source     {Path(parsed.source)}")
    print(
        f"model      {shape.variant}{shape.num_layers} layers, {shape.num_heads} heads, {shape.channels} channels, context"
        f" {shape.sequence_length}: {count_parameters(parameter_table(shape)):,} parameters,"
        f" {found.tokenizer.kind} vocabulary of {shape.vocab_size}"
    )
    if state:
        masters = "moments and master weights" if state.has_master else "moments"
        sizes = " ".join(f"{flag(name)} {getattr(shape, name)}" for name in SIZES)
        print(f"optimizer  {masters} after {state.step} steps; to resume from there:")
        print(f"           handgrad train {sizes} --data SHARDS --out {out} --allow-changes")
    print(f"written    {out}")
    name, talks = shlex.quote(str(out)), is_taught_to_talk(found.tokenizer, found.checkpoint)
    tries, file = ("chat", "--chat FILE") if talks else ("sample", "FILE")
    print(f"next       handgrad {tries} {name}   or, to finetune it:   handgrad prepare {file} --tokenizer {name}")
    return 0
