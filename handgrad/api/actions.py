"""prepare, plan, evaluate, export: the commands as functions, which return the results that the commands print."""

import os
from pathlib import Path
from typing import Any, Unpack

from handgrad.api.model import Model, load
from handgrad.api.training import Settings, configuration, with_settings
from handgrad.data import prepare as preparing
from handgrad.data.preferences import has_pairs
from handgrad.data.shards import Dataset
from handgrad.errors import UsageError
from handgrad.evaluation.codec import with_codec
from handgrad.evaluation.load import check_window
from handgrad.evaluation.loss import HeldOut, held_out_loss, open_held_out
from handgrad.interop.export import EXPORT_DTYPES, Exported, export_llmc, export_model, export_peft
from handgrad.interop.gguf_file import GGUF_TYPES, export_gguf
from handgrad.interop.sources import open_weights
from handgrad.names import check_choice
from handgrad.run.packing import evaluation_packing
from handgrad.settings.config import STREAM, RunConfig
from handgrad.storage import checkpoint
from handgrad.tools.forecast import Forecast, bytes_of, forecast
from handgrad.tools.plan import as_it_runs
from handgrad.tools.references import add_references


def prepare(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str] = "shards",
    *,
    tokenizer: str = "auto",
    text_field: str = "text",
    chat: bool = False,
    preferences: bool = False,
    reference: str | os.PathLike[str] = "",
    validation_fraction: float | None = None,
    shard_tokens: int = 100_000_000,
    documents: int = 0,
    workers: int = 1,
    seed: int = 0,
    skip_bad_rows: bool = False,
    codes: str = "",
    size: str = "32",
    join: str | os.PathLike[str] = "",
    strict: bool = False,
    overwrite: bool = False,
) -> Dataset:
    """`handgrad prepare`: turns text or pictures into a folder of token shards, or reuses it, and returns it opened.

    Unlike the command, it uses only this process unless `workers` asks for more (0: one per core): new processes import
    the script again, so a script then needs `if __name__ == "__main__":`; a notebook does not.

    Raises the errors of the command."""
    options = preparing.PrepareOptions(
        os.fspath(source),
        Path(out),
        tokenizer=os.fspath(reference if reference and tokenizer == "auto" else tokenizer),
        text_field=text_field,
        chat=chat,
        preferences=preferences,
        shard_tokens=shard_tokens,
        validation_fraction=validation_fraction,
        workers=workers,
        seed=seed,
        documents=documents,
        skip_bad_rows=skip_bad_rows,
        codes=codes,
        size=str(size),
        join=os.fspath(join),
        strict=strict,
        overwrite=overwrite,
    )
    if codes and Path(codes).exists():
        options = with_codec(options, open_weights)
    dataset = preparing.prepare(options).dataset
    return add_references(dataset, os.fspath(reference)) if reference else dataset


@with_settings
def plan(
    preset: str | RunConfig = "",
    *,
    gpu: str,
    gpus: int = 1,
    price: float | None = None,
    fit: str = "",
    vocab_size: int = 0,
    config: str = "",
    model: str = "",
    **settings: Unpack[Settings],
) -> Forecast:
    """`handgrad plan --gpu`: forecasts a run with these settings on `gpus` GPUs, one process per GPU. `price`: dollars per
    GPU-hour; `fit`: memory limit per GPU, like `24GB`, instead of all of it; `vocab_size`: by default the data's, or
    GPT-2's if there are no data.

    Raises `UsageError` for an unknown GPU, a precision that it lacks, a run that does not fit; and the errors of `preset`.
    """
    if gpus < 1 or vocab_size < 0 or (price is not None and not 0 <= price < float("inf")):
        raise UsageError(f"gpus must be at least 1, price and vocab_size 0 or more; found {gpus}, {price}, {vocab_size}")
    named = configuration(preset, settings, os.fspath(config), model, lanes=settings.get("lanes", 0) or gpus, device="meta")
    resolved, words, _ = as_it_runs(named, vocab_size, named="data" in settings)
    return forecast(resolved, words, gpu, ranks=gpus, price=price, fit=bytes_of(fit) if fit else 0)


def evaluate(
    model: Model | str | os.PathLike[str],
    data: str | os.PathLike[str] = "",
    *,
    eval_tokens: int = 0,
    eval_stride: int | None = None,
    context: int = 0,
    micro_batch: int = 8,
    device: str = "auto",
    precision: str = "auto",
    backend: str = "auto",
) -> HeldOut:
    """`handgrad evaluate`: the loss on the validation split of `data`, by default the model's training data. `model`: a
    loaded model, which keeps its precision, or an argument of `load`. Windows of `context` tokens (0: the model's context;
    for an imported model at most 4096) start `eval_stride` tokens apart, and each scores its last ones (0: side by side;
    None: as in the model's run).

    Raises `UsageError` or `DataError` if there are no such data, or if they are not in the model's tokens."""
    if min(eval_tokens, eval_stride or 0, context) < 0 or micro_batch < 1:
        raise UsageError("--eval-tokens, --context and --eval-stride must be 0 or more and --micro-batch 1 or more")
    if not isinstance(model, Model):
        model = load(model, device=device, precision=precision, backend=backend)
    folder = os.fspath(data) or model.data
    if not folder:
        raise UsageError("the model knows no data; give data=DIR, prepared with the model's tokenizer")
    dataset = open_held_out(folder, model.tokenizer, str(model.origin["source"]), chat=model.talks)
    if has_pairs(dataset):
        raise UsageError(f"expected text, found pairs in {folder}; `handgrad evaluate` compares their answers")
    check_window(context, model.shape)
    stride = model.eval_stride if eval_stride is None else eval_stride
    packing = evaluation_packing(model.packing, dataset, other_data=bool(data))
    tokens: dict[str, Any] = {"eval_tokens": eval_tokens, "eval_stride": stride, "packing": packing}
    with model.lock:
        act = model.forward_buffers(micro_batch, context or model.eval_context, packed=packing != STREAM)
        return held_out_loss(model.shape, model.ops, model.weights, act, dataset, **tokens)


def export(source: str | os.PathLike[str], folder: str | os.PathLike[str], *, to: str = "hf", dtype: str = "") -> Exported:
    """`handgrad export`: writes a run or checkpoint to a folder for transformers ("hf"), PEFT ("peft") or llm.c ("llmc"),
    or to a file for llama.cpp ("gguf"). Reads it back and compares it first, then renames it. Raises the command's errors.
    """
    folders = {"hf": export_model, "peft": export_peft, "llmc": export_llmc}
    check_choice("to", to, (*folders, "gguf"))
    dtype = dtype or ("f16" if to == "gguf" else "fp32")
    check_choice("dtype", dtype, GGUF_TYPES if to == "gguf" else EXPORT_DTYPES)
    saved = checkpoint.find(os.fspath(source))
    if to == "gguf":
        return export_gguf(saved, Path(folder), dtype)
    return folders[to](saved, Path(folder), EXPORT_DTYPES[dtype])
