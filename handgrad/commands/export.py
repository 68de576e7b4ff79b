"""handgrad export: a checkpoint in another program's format, read back and compared."""

from collections.abc import Sequence
from pathlib import Path

from handgrad import checkpoint
from handgrad.commands.arguments import Parser
from handgrad.errors import UsageError
from handgrad.interop.export import EXPORT_DTYPES, export_llmc, export_model, push

FORMATS = {
    "hf": "a folder for Hugging Face's transformers: weights, config, tokenizer, model card",
    "llmc": "a folder for llm.c: model.bin, the tokenizer file",
}


def run(arguments: Sequence[str]) -> int:
    parser = Parser("handgrad export", description="Writes a checkpoint in another program's format, and checks it.")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="run folder (its newest checkpoint) or checkpoint folder")
    parser.add_argument("folder", metavar="DIR", help="to be made")
    formats = "; ".join(f"{name}: {what}" for name, what in FORMATS.items())
    parser.add_argument("--to", required=True, choices=list(FORMATS), help=formats)
    parser.add_argument("--dtype", default="fp32", choices=list(EXPORT_DTYPES), help="of the weights (default: fp32)")
    parser.add_argument(
        "--push", default="", metavar="NAME", help="hf: then upload DIR to the Hub as OWNER/NAME, private if new"
    )
    parser.add_argument("--with-optimizer", action="store_true", help="llmc: moments, too, so that llm.c can go on (-y 1)")
    parsed = parser.parse(arguments)
    if parsed.push and parsed.to != "hf":
        raise UsageError("--push uploads to the Hub and needs --to hf")
    if parsed.with_optimizer and parsed.to != "llmc":
        raise UsageError("--with-optimizer needs --to llmc; transformers keeps no moments")
    source = checkpoint.find(parsed.checkpoint)
    dtype = EXPORT_DTYPES[parsed.dtype]
    if parsed.to == "hf":
        done = export_model(source, Path(parsed.folder), dtype)
        read_back = f"the logits of {done.tokens} random tokens are the same bits"
    else:
        done = export_llmc(source, Path(parsed.folder), dtype, with_optimizer=parsed.with_optimizer)
        read_back = "every number is the same bits"
    print(f"checkpoint {source.folder} (step {source.step})")
    print(f"written    {done.folder}: {done.parameters_bytes >> 10} KiB of weights in {parsed.dtype}")
    print(f"read back  {read_back}")
    if parsed.dtype != "fp32":
        print(f"rounding   to {parsed.dtype} moves a logit by {done.rounding:.2g} at most")
    if parsed.push:
        print(f"pushed     {push(done.folder, parsed.push)}")
    return 0
