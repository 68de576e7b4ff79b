"""handgrad import: weights from another program, as a checkpoint to evaluate, sample or start from."""

from collections.abc import Sequence
from pathlib import Path

from handgrad.commands.arguments import Parser, flag
from handgrad.interop.sources import SIZES, import_model
from handgrad.models.parameters import count_parameters, parameter_table


def run(arguments: Sequence[str]) -> int:
    parser = Parser("handgrad import", description="Takes a GPT-2 of Hugging Face's transformers or of llm.c.")
    parser.add_argument(
        "source", metavar="SOURCE", help="a transformers folder, a model of the Hub by name, or a model file of llm.c"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="to be made; evaluate, sample, --init-from take it")
    parser.add_argument("--tokenizer", default="", metavar="gpt2|bytes|FILE", help="in the place of the source's own")
    parser.add_argument(
        "--optimizer", default="", metavar="FILE", help="llm.c's state_*.bin of that step: `train --out DIR` can go on"
    )
    parsed = parser.parse(arguments)
    out = Path(parsed.out)
    found, state = import_model(parsed.source, out, parsed.tokenizer, parsed.optimizer)
    shape = found.shape
    print(f"source     {Path(parsed.source)}")
    print(
        f"model      {shape.num_layers} layers, {shape.num_heads} heads, {shape.channels} channels, context"
        f" {shape.sequence_length}: {count_parameters(parameter_table(shape)):,} parameters,"
        f" {found.tokenizer.kind} vocabulary of {shape.vocab_size}"
    )
    if state:
        masters = "moments and master weights" if state.has_master else "moments"
        sizes = " ".join(f"{flag(name)} {getattr(shape, name)}" for name in SIZES)
        print(f"optimizer  {masters} after {state.step} steps; to go on from there:")
        print(f"           handgrad train {sizes} --data SHARDS --out {out} --allow-changes")
    print(f"written    {out}; try `handgrad sample {out}`, or train with --init-from {out}")
    return 0
