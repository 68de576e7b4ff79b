"""Folders that stand whole under their name or not at all, and the run-like one that an import leaves."""

import contextlib
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import handgrad
from handgrad import checkpoint
from handgrad.checkpoint import Stored
from handgrad.config import ModelShape, RunConfig, to_dict
from handgrad.data.tokenizer import Tokenizer, tokenizer_files, tokenizer_record
from handgrad.errors import StorageError, UsageError, storage_error
from handgrad.files import sync_folder
from handgrad.run_files import CHECKPOINTS, LOCK_FILE

PARTIAL = ".partial"


def check_free(final: Path) -> None:
    """Raises `UsageError` if something is at `final` already; an empty folder is nothing."""
    if final.is_symlink() or (final.exists() and (not final.is_dir() or any(final.iterdir()))):
        raise UsageError(f"expected nothing at {final}, found files; give another name or remove them")


@contextlib.contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """A folder beside `final` to write into, renamed to it when the block ends well and removed when it does not.

    Raises `UsageError` if `final` is there and not empty, `StorageError` if the disk refuses.
    """
    check_free(final)
    final = final.absolute()
    partial = final.with_name(final.name + PARTIAL)
    try:
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            yield partial
            sync_folder(partial)
            partial.rename(final)
            sync_folder(final.parent)
        except OSError as error:
            raise storage_error(error, f"writing {final}") from None
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Writes and fsyncs a file. Raises OSError."""
    checkpoint.write_file(path, [text.encode()])


def imported_config(shape: ModelShape) -> RunConfig:
    """The configuration in the checkpoint of imported weights: the model's sizes; of training it knows nothing."""
    return RunConfig(
        data="",
        out="",
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        channels=shape.channels,
        sequence_length=shape.sequence_length,
        steps=1,
        tokens_per_step=shape.sequence_length,
        micro_batch=1,
        lanes=1,
    )


def write_imported(
    out: Path,
    shape: ModelShape,
    tokenizer: Tokenizer,
    tensors: Iterable[Stored],
    origin: dict[str, Any],
    *,
    resume_step: int | None = None,
) -> Path:
    """A folder that `evaluate`, `sample`, `export` and `train --init-from` take like a run's: a checkpoint of step 0
    without moments. `origin` is what its manifest says of where the weights come from. Returns the checkpoint's folder.

    With `resume_step` the tensors include moments (m.NAME, v.NAME), and `train --out` goes on from that many steps.

    Raises `UsageError` if `out` is taken, `StorageError` if the disk refuses; nothing is left then.
    """
    manifest = {
        "handgrad": handgrad.__version__,
        "versions": {"handgrad": handgrad.__version__, "torch": torch.__version__},
        "config": to_dict(imported_config(shape)),
        "vocab_size": shape.vocab_size,
        "tokenizer": tokenizer_record(tokenizer),
        "identity": {"data": None, "tokenizer": tokenizer.sha256},
        "imported": origin,
    }
    if resume_step is not None:  # what a run has beside its tensors, as at its start
        manifest |= {"loss_window": [], "norm_window": [], "skips_in_a_row": 0}
    step = resume_step or 0
    with whole_folder(out) as partial:
        written = checkpoint.save(partial / CHECKPOINTS, step, tensors, manifest, tokenizer_files(tokenizer))
        if resume_step is not None:
            checkpoint.write_file(partial / LOCK_FILE, [])
        try:
            checkpoint.open_checkpoint(written)  # sizes and hashes, read back from the disk
        except ValueError as error:
            raise StorageError(f"reading back {out} failed: {error}") from None
    return checkpoint.folder_of(out / CHECKPOINTS, step)
