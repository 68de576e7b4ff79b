"""handgrad export: a checkpoint in another program's format, read back and compared."""

from argparse import Namespace
from pathlib import Path

from handgrad.errors import UsageError
from handgrad.interop.adapters import read_config
from handgrad.interop.export import EXPORT_DTYPES, export_llmc, export_model, export_peft
from handgrad.interop.gguf_file import GGUF_TYPES, export_gguf
from handgrad.names import check_choice
from handgrad.storage import checkpoint


def run(parsed: Namespace) -> int:
    dtype = parsed.dtype or ("f16" if parsed.to == "gguf" else "fp32")
    check_choice(f"--dtype of --to {parsed.to}", dtype, GGUF_TYPES if parsed.to == "gguf" else EXPORT_DTYPES)
    if bool(parsed.folder) == bool(parsed.out):
        actual = f"found both, {parsed.folder} and {parsed.out}" if parsed.out else "found neither"
        raise UsageError(f"expected one of DIR and --out DIR, {actual}; `handgrad export RUN --out DIR` writes to DIR")
    source = checkpoint.find(parsed.checkpoint, strict=parsed.strict)
    path, read_back = Path(parsed.folder or parsed.out), "every number is the same bits"
    if parsed.to == "peft":
        done = export_peft(source, path, EXPORT_DTYPES[dtype])
        read_back += f"; the adapters of {read_config(path)[1]}"
    elif parsed.to == "hf":
        done = export_model(source, path, EXPORT_DTYPES[dtype])
        read_back = f"the logits of {done.tokens} random tokens are the same bits"
    else:
        done = export_llmc(source, path, EXPORT_DTYPES[dtype]) if parsed.to == "llmc" else export_gguf(source, path, dtype)
    print(f"checkpoint {source.folder} (step {source.step})")
    print(f"written    {done.folder}: {done.parameters_bytes >> 10} KiB of weights in {dtype}")
    print(f"read back  {read_back}")
    if dtype != "fp32" and parsed.to != "peft":
        print(f"rounding   to {dtype} moves a logit by {done.rounding:.2g} at most")
    return 0
