"""handgrad import: weights from another program, as a checkpoint to evaluate, sample or start from."""

from collections.abc import Sequence
from pathlib import Path

from handgrad.commands.arguments import Parser
from handgrad.interop.sources import import_model
from handgrad.model.parameters import count_parameters, parameter_table


def run(arguments: Sequence[str]) -> int:
    parser = Parser("handgrad import", description="Takes weights of Hugging Face's GPT-2 (`GPT2LMHeadModel`).")
    parser.add_argument("source", metavar="SOURCE", help="a transformers folder, or a model of the Hub by name")
    parser.add_argument("--out", required=True, metavar="DIR", help="to be made; evaluate, sample, --init-from take it")
    parser.add_argument("--tokenizer", default="", metavar="gpt2|bytes|FILE", help="in the place of the source's own")
    parsed = parser.parse(arguments)
    found = import_model(parsed.source, Path(parsed.out), parsed.tokenizer)
    shape = found.shape
    print(f"source     {parsed.source}")
    print(
        f"model      {shape.num_layers} layers, {shape.num_heads} heads, {shape.channels} channels, context"
        f" {shape.sequence_length}: {count_parameters(parameter_table(shape)):,} parameters, {found.tokenizer.kind}"
        f" vocabulary of {shape.vocab_size}"
    )
    print(f"written    {parsed.out}; try `handgrad sample {parsed.out}`, or train with --init-from {parsed.out}")
    return 0
