"""Faults of a rank that hit a run while it saves."""

import errno
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from handgrad.run.checkpointing import GatheredBucket
from handgrad.run.log import RunLog
from handgrad.run.loop import Run
from handgrad.run.saves import Saves
from handgrad.storage import checkpoint
from handgrad.training.step import TrainStep
from tests.faults.firing import before, fired, send


def killed_in_save(step: int) -> None:
    """After the weights have been gathered, in the middle of the first moments."""

    def due(gathered: GatheredBucket, shard: torch.Tensor, bucket: Any) -> bool:
        moments = shard.data_ptr() == gathered.state.optimizer["m"].data_ptr()
        return gathered.ranks.step == step and moments and bucket.name == "blocks.1"

    before(GatheredBucket, "__call__", due, send(signal.SIGKILL))


def full_disk(step: int) -> None:
    """Fails between the weights and the moments of a checkpoint; of the run's second save, with step 1."""
    original, calls = checkpoint.write_file, []

    def write(path: Path, chunks: Any) -> dict[str, Any]:
        if path.name.startswith("optimizer"):
            calls.append(path)
            if len(calls) == step + 1:
                fired()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(path, chunks)

    checkpoint.write_file = write


def full_for_good(step: int) -> None:
    """The run's disk is full from the record of a step on, and stays so."""
    original = RunLog.step

    def record(log: RunLog, now: int, *given: Any) -> None:
        if now == step + 1 and log.files:
            fired()
            for file in log.files.values():
                os.dup2(os.open("/dev/full", os.O_WRONLY), file.fileno())
        original(log, now, *given)

    RunLog.step = record


def killed_in_write(after: int) -> None:
    """After so many bytes of this rank's files of the run's second checkpoint."""
    original, left = checkpoint.write_file, [after]

    def counted(chunks: Iterable[Any]) -> Iterator[Any]:
        for chunk in chunks:
            if left[0] < len(chunk):
                yield chunk[: left[0]]
                fired()
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= len(chunk)
            yield chunk

    def write(path: Path, chunks: Any) -> dict[str, Any]:
        second = "step_00000008" in str(path) and path.suffix == ".safetensors"
        return original(path, counted(chunks) if second else chunks)

    checkpoint.write_file = write


def killed_before_record(step: int) -> None:
    """Dies when the checkpoint of the best validation stands and its loss is not yet in the record."""
    before(RunLog, "validation", lambda log, now, *_: now == step, send(signal.SIGKILL))


def flipped_in_save(step: int) -> None:
    """Bit 30 of a moment of this rank's share, before the checkpoint after `step` is judged."""
    original = Run.save

    def save(run: Run) -> None:
        if run.completed == step + 1 and run.saves.last_saved != run.completed:
            moments = run.training.state.optimizer["m"].view(torch.int32)
            moments[int(moments.nonzero()[0])] ^= 1 << 30
            fired()
        original(run)

    Run.save = save


def slow_disk(step: int) -> None:
    """This rank's part of each checkpoint waits until the run is at `step`; 0: until the run waits for it."""
    original, reached = checkpoint.write_tensors, threading.Event()
    if step:
        before(TrainStep, "begin", lambda training, now: now == step, reached.set)
    else:
        before(Saves, "wait", lambda run_saves: True, reached.set)

    def write(*given: Any) -> dict[str, Any]:
        reached.wait()
        return original(*given)

    checkpoint.write_tensors = write
