"""handgrad export: a checkpoint in another program's format, read back and compared."""

from collections.abc import Sequence
from pathlib import Path

from handgrad import checkpoint
from handgrad.commands.arguments import Parser
from handgrad.interop.hf_export import EXPORT_DTYPES, export_model, push

FORMATS = {"hf": "a folder for Hugging Face's transformers: weights, config, tokenizer, model card"}


def run(arguments: Sequence[str]) -> int:
    parser = Parser("handgrad export", description="Writes a checkpoint in another program's format, and checks it.")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="run folder (its newest checkpoint) or checkpoint folder")
    parser.add_argument("folder", metavar="DIR", help="to be made")
    formats = "; ".join(f"{name}: {what}" for name, what in FORMATS.items())
    parser.add_argument("--to", required=True, choices=list(FORMATS), help=formats)
    parser.add_argument("--dtype", default="fp32", choices=list(EXPORT_DTYPES), help="of the weights (default: fp32)")
    parser.add_argument(
        "--push", default="", metavar="NAME", help="then upload DIR to the Hub as OWNER/NAME, private if new"
    )
    parsed = parser.parse(arguments)
    source = checkpoint.find(parsed.checkpoint)
    done = export_model(source, Path(parsed.folder), EXPORT_DTYPES[parsed.dtype])
    print(f"checkpoint {source.folder} (step {source.step})")
    print(f"written    {done.folder}: {done.parameters_bytes >> 10} KiB of weights in {parsed.dtype}")
    print(f"read back  the logits of {done.tokens} random tokens are the same bits")
    if parsed.dtype != "fp32":
        print(f"rounding   to {parsed.dtype} moves a logit by {done.rounding:.2g} at most")
    if parsed.push:
        print(f"pushed     {push(done.folder, parsed.push)}")
    return 0
