"""handgrad export: a checkpoint in another program's format, read back and compared."""

from argparse import Namespace
from pathlib import Path

from handgrad import checkpoint
from handgrad.errors import UsageError
from handgrad.interop import peft
from handgrad.interop.export import EXPORT_DTYPES, export_llmc, export_model, export_peft, push


def run(parsed: Namespace) -> int:
    if parsed.push and parsed.to != "hf":
        raise UsageError("--push uploads to the Hub and needs --to hf")
    if parsed.with_optimizer and parsed.to != "llmc":
        raise UsageError("--with-optimizer needs --to llmc; transformers keeps no moments")
    source = checkpoint.find(parsed.checkpoint, strict=parsed.strict)
    folder, dtype = Path(parsed.folder), EXPORT_DTYPES[parsed.dtype]
    if parsed.to == "peft":
        done = export_peft(source, folder, dtype)
        read_back = f"every number is the same bits; the adapters of {peft.read_config(folder)[1]}"
    elif parsed.to == "hf":
        done = export_model(source, folder, dtype)
        read_back = f"the logits of {done.tokens} random tokens are the same bits"
    else:
        done = export_llmc(source, folder, dtype, with_optimizer=parsed.with_optimizer)
        read_back = "every number is the same bits"
    print(f"checkpoint {source.folder} (step {source.step})")
    print(f"written    {done.folder}: {done.parameters_bytes >> 10} KiB of weights in {parsed.dtype}")
    print(f"read back  {read_back}")
    if parsed.dtype != "fp32" and parsed.to != "peft":
        print(f"rounding   to {parsed.dtype} moves a logit by {done.rounding:.2g} at most")
    if parsed.push:
        print(f"pushed     {push(done.folder, parsed.push)}")
    return 0
